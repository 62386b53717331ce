# SPDX-License-Identifier: Apache-2.0
"""Runs TVM's own Relay tests without and with this package, and compares the outcome of each.

    .venv-relay/bin/python benchmarks/relay_host_tests.py TVM_CHECKOUT

TVM_CHECKOUT is a checkout of apache/tvm at the version of the TVM that has Relay (v0.17.dev0 for .venv-relay). Its
tests need scipy, too. Those that need a GPU are skipped by TVM itself where there is none. Exit code 1: an outcome
differs. Options behind `--` go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "relay/test_op_grad_level1.py",
    "relay/test_op_grad_level2.py",
    "relay/test_op_grad_level3.py",
    "relay/test_op_grad_level4.py",
    "relay/test_op_grad_level10.py",
    "relay/test_op_level2.py",
    "relay/test_pass_convert_op_layout.py",
    "relay/test_pass_alter_op_layout.py",
    "relay/test_pass_gradient.py",
    "relay/test_pass_legalize.py",
    "relay/test_pass_legalize_tensorcore.py",
    "relay/test_pass_merge_composite.py",
    "relay/test_pass_partition_graph.py",
    "relay/test_pass_annotate_target.py",
    "relay/test_pass_merge_compiler_regions.py",
    "relay/test_pass_fuse_ops.py",
    "relay/test_pass_fold_scale_axis.py",
    "relay/test_pass_simplify_expr.py",
    "relay/test_to_mixed_precision.py",
    "relay/test_type_infer.py",
    "relay/test_ir_op.py",
    "relay/test_ir_parser.py",
    "relay/test_ir_text_printer.py",
    "contrib/test_cutlass.py",
)


def main(arguments: list[str]) -> int:
    """Both runs, and what differs."""
    own, _, given = " ".join(arguments).partition(" -- ")
    if not own or own.startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(own).resolve() / "tests" / "python"
    found = {}
    for name, plugin in (("without", []), ("with", ["-p", "tvm_convgrad"])):
        found[name] = outcomes(folder, plugin, given.split())
        print(f"{name:8} {dict(sorted(Counter(found[name].values()).items()))}", flush=True)
    differing = {
        test: tuple(found[name].get(test, "absent") for name in found)
        for test in sorted(found["without"].keys() | found["with"].keys())
        if found["without"].get(test) != found["with"].get(test)
    }
    for test, (without, with_it) in differing.items():
        print(f"{test}: {without} without, {with_it} with")
    print(f"{len(differing)} outcomes differ")
    return int(bool(differing))


def outcomes(folder: Path, plugin: list[str], given: list[str]) -> dict[str, str]:
    """The outcome of each test: passed, failure, error or skipped."""
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    if not plugin:
        environment["TVM_DEVICE_BACKEND_AUTOLOAD"] = "0"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tvm.testing.plugin", *plugin]
        command += [f"--junitxml={report}", *given, *(str(folder / name) for name in FILES)]
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        return {
            f"{case.get('classname')}::{case.get('name')}": next(
                (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
            )
            for case in ElementTree.parse(report).getroot().iter("testcase")
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
