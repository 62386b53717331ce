# SPDX-License-Identifier: Apache-2.0
"""TVM's own tests with and without this package: every outcome that differs must be one that is expected.

    TVM_SOURCE=~/tvm make test-host          a checkout of TVM, best of the version that is installed

Only the tests are taken from the checkout; TVM itself is the one that is installed. Without this package is
TVM_DEVICE_BACKEND_AUTOLOAD=0, TVM's own switch for what plugs into it. `expected.json`, beside this file, has the
outcomes that may differ, each with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

TESTS = "tests/python/relax"

FILES = (
    "test_blockbuilder_*.py",
    "test_codegen_cu*.py",
    "test_dataflow_*.py",
    "test_e2e_op_dynamic.py",
    "test_expr*.py",
    "test_frontend_nn_*.py",
    "test_frontend_from_*.py",
    "test_fuse_*.py",
    "test_op_*.py",
    "test_optimize_layout_transform.py",
    "test_pipeline.py",
    "test_relax_operators.py",
    "test_training_*.py",
    "test_transform*.py",
    "test_tvmscript_*.py",
    "test_vm_*.py",
)
"""Patterns of the files that concern operators, gradients, training, layouts, legalization, fusion and frontends."""

EXPECTED = Path(__file__).with_name("expected.json")

Outcomes = dict[str, str]
"""Outcome by test: "passed", "failed" or "skipped"."""


def outcomes(source: Path, files: list[str], workers: str, plugin: bool) -> Outcomes:
    """Run the tests in a process of their own, and read the outcome of each."""
    with tempfile.TemporaryDirectory(prefix="convgrad-host-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal"]
        command += ["-p", "no:cacheprovider", f"--junit-xml={report}"]
        environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "1" if plugin else "0"}
        # In the folder of the tests, so that neither this repository's configuration nor the checkout's TVM is found.
        done = subprocess.run(
            [*command, "--rootdir", str(source / TESTS), *files],
            cwd=source / TESTS,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            sys.exit(f"pytest has not run: {(done.stderr or done.stdout).strip()[-2000:]}")
        found: Outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{case.get('classname')}::{case.get('name')}"] = outcome
        return found


def table(without: Outcomes, with_plugin: Outcomes, expected: dict[str, str]) -> tuple[str, int]:
    """What differs, in Markdown, and how many of these are not expected or are expected and do not differ."""
    names = sorted(without.keys() | with_plugin.keys())
    changed = [name for name in names if without.get(name) != with_plugin.get(name)]
    counts = [Counter(outcomes.values()) for outcomes in (without, with_plugin)]
    lines = ["| | passed | failed | skipped |", "|---|---|---|---|"]
    for title, count in zip(("without tvm-convgrad", "with it"), counts, strict=True):
        lines.append(f"| {title} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    lines += ["", f"{len(changed)} of {len(names)} outcomes differ.", ""]
    if changed:
        lines += ["| test | without | with | reason |", "|---|---|---|---|"]
    for name in changed:
        reason = expected.get(name, "NOT EXPECTED")
        lines.append(f"| {name} | {without.get(name, 'absent')} | {with_plugin.get(name, 'absent')} | {reason} |")
    surprises = [name for name in changed if name not in expected]
    stale = [name for name in expected if name in without and name not in changed]
    lines += [f"expected to differ, and does not: {name}" for name in stale]
    return "\n".join(lines), len(surprises) + len(stale)


def main() -> int:
    """Compare, print the table, write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=os.environ.get("TVM_SOURCE") or None)
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", nargs="*", default=list(FILES), help="patterns of files")
    given = parser.parse_args()
    if given.source is None:
        print("test-host: not run, as TVM_SOURCE names no checkout of TVM; its tests are not part of TVM's package.")
        return 0
    folder = given.source / TESTS
    files = sorted({str(path.relative_to(folder)) for pattern in given.only for path in folder.glob(pattern)})
    if not files:
        print(f"test-host: {folder} has no tests; TVM_SOURCE must name a checkout of TVM with Relax.")
        return 2
    without = outcomes(given.source.resolve(), files, given.workers, plugin=False)
    with_plugin = outcomes(given.source.resolve(), files, given.workers, plugin=True)
    text, surprises = table(without, with_plugin, json.loads(EXPECTED.read_text()))
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
