# SPDX-License-Identifier: Apache-2.0
"""Import, compile and run every program of a Relay corpus, and compare with its recorded outputs.

    python benchmarks/relay_corpus.py ../shared/relay_corpus [--form json text tar] [--jobs 2] [--only NAME]

Errors are shares of the largest number of an output: at most 1e-5 for single operators, 1e-4 for networks, 1e-2 in
float16. The exit code is 1 unless all are right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.importer import corpus


def checked(job: tuple[corpus.Entry, str], target: str) -> dict[str, object]:
    entry, form = job
    return corpus.check(entry, form, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=corpus.FOLDER)
    parser.add_argument("--form", nargs="*", default=["json", "text", "tar"], help="which files to read")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--target", default="native")
    parser.add_argument("--json", type=Path, help="a file for the report of each program")
    options = parser.parse_args()

    entries = [e for e in corpus.entries(options.folder) if not options.only or any(o in e.name for o in options.only)]
    jobs = [(entry, form) for entry in entries for form in entry.forms if form in options.form]
    start, reports = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=60) as pool:
        for report in pool.imap_unordered(partial(checked, target=options.target), jobs):
            reports.append(report)
            if report["state"] != "right":
                print(report["state"], report["name"], report["form"], report.get("error", ""), report.get("why", ""))
            if len(reports) % 25 == 0:
                print(f"{len(reports)} of {len(jobs)} files", file=sys.stderr, flush=True)
    states = Counter(str(report["state"]) for report in reports)
    lifted = Counter(key for report in reports for key in report.get("lifted", {}))
    print(f"{len(entries)} programs, {len(jobs)} files: {dict(states)}, {time.perf_counter() - start:.0f} s")
    for sentence, count in lifted.most_common():
        print(f"  in {count} files: {sentence}")
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))
    sys.exit(0 if states["right"] == len(jobs) and jobs else 1)


if __name__ == "__main__":
    main()
