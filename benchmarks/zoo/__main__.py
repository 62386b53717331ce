# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of the zoo, each in a process of its own, and writes the table."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.zoo.architectures import Architecture, architectures
from benchmarks.zoo.case import CRASHED, IMPORTED, RIGHT, STAGES, Outcome
from benchmarks.zoo.problem import FORMS
from benchmarks.zoo.table import document, read


def recorded(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The outcomes in a file of JSON lines, by architecture and form; none, if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(each["name"], each["form"]): each for each in map(json.loads, lines)}


def main() -> None:
    """Run what the command line asks for; cases that a former run has in OUT/cases.jsonl are not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/zoo"))
    parser.add_argument("--only", default="*", help="patterns of names between commas, such as 'timm:*,*:vgg11'")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--stage", choices=STAGES, default="time")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one case")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time; times want 1")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument("--merge", type=Path, help="a table of this machine, whose cases stay where this run has none")
    parser.add_argument("--having", help="only the cases that --merge's table has with this result, such as 'imported'")
    parser.add_argument(
        "--keep", action="store_true", help="keep libraries in OUT/libraries: stage compare makes what time takes"
    )
    parser.add_argument("--no-run", action="store_true", help="run nothing, only write the table")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / f"{given.stage}.jsonl"
    compared = recorded(given.out / "compare.jsonl") if given.keep and given.stage == "time" else {}
    done = recorded(kept)
    patterns = given.only.split(",")
    found = [each for each in architectures(given.out) if any(fnmatch.fnmatch(each.name, one) for one in patterns)]
    forms = given.forms.split(",")
    known = {(each.name, each.form): each for each in read(given.merge.read_text())} if given.merge else {}
    cases = [(each, form) for form in forms for each in found if (each.name, form) not in done and not given.no_run]
    if given.having:
        wanted = {case for case, each in known.items() if each.result == given.having}
        cases = [case for case in cases if (case[0].name, case[1]) in wanted]

    def run(case: tuple[Architecture, str]) -> dict[str, object]:
        architecture, form = case
        name, shapes = architecture.name, json.dumps(architecture.shapes)
        options = ["--stage", given.stage, "--batch", given.batch, "--seconds", given.seconds, "--shapes", shapes]
        options += ["--libraries", given.out / "libraries"] if given.keep else []
        command = [sys.executable, "-m", "benchmarks.zoo.case", name, form, *map(str, options)]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=given.limit, check=False, env=dict(os.environ)
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "form": form, "result": CRASHED, "reason": f"not done after {given.limit:.0f} s"}
        if ended.returncode or not ended.stdout.strip():
            last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            return {"name": name, "form": form, "result": CRASHED, "reason": f"exit {ended.returncode}: {last[:300]}"}
        found: dict[str, object] = json.loads(ended.stdout.strip().splitlines()[-1])
        if found["result"] == RIGHT:  # of a library that was kept, the run that made it tells how it compared
            before = compared.get((name, form), {})
            found |= {key: value for key, value in before.items() if value is not None}
        return found

    with ThreadPoolExecutor(given.processes) as pool, kept.open("a") as file:
        for number, outcome in enumerate(pool.map(run, cases), 1):
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            done[outcome["name"], outcome["form"]] = outcome
            print(
                f"[{number}/{len(cases)}] {outcome['name']} {outcome['form']}: {outcome['result']} {outcome['reason']}"
            )
    for stage in STAGES[: STAGES.index(given.stage) + 1]:
        for case, each in recorded(given.out / f"{stage}.jsonl").items():
            if each["result"] != IMPORTED or case not in known:  # an import tells less than a comparison
                known[case] = Outcome(**each)
    outcomes = [known[each.name, form] for each in found for form in forms if (each.name, form) in known]
    if given.markdown:
        command = f"python -m benchmarks.zoo {' '.join(sys.argv[1:])}"
        given.markdown.write_text(document(outcomes, command, len(found) * len(forms)))
    counts = Counter((each.form, each.result) for each in outcomes)
    for (form, result), count in sorted(counts.items()):
        print(f"{form:6} {result:13} {count}")


if __name__ == "__main__":
    main()
