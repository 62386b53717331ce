# SPDX-License-Identifier: Apache-2.0
"""python -m tests.fuzzing.run_share FIRST COUNT SEED [first]: interprets cases, and prints the wrong ones as JSON.

A case whose string does not give the same case again is wrong, too. With "first" it ends at the first wrong one and
prints how many cases it took.
"""

import json
import sys
from collections import Counter

import tvm_convgrad
from tvm_convgrad.verify.fuzzing.campaign import case_number
from tvm_convgrad.verify.fuzzing.check import FAILED, check_case, read_case


def main(first: int, count: int, seed: int, only_first: bool) -> None:
    tvm_convgrad.register()
    kinds: Counter[str] = Counter()
    for number in range(first, first + count):
        case = case_number(number, seed)
        kinds[f"{case.kernel.label(case.direction)}, {case.machine.name}"] += 1
        fault = check_case(case, seed)
        if not fault and read_case(case.problem, case.direction, case.tiling_text) != case:
            fault = "its string gives another case"
        if fault and only_first:
            # A planted fault has to show in results, not by breaking the kernel's code.
            print("broken" if fault.startswith(FAILED) else number - first + 1)
            return
        if fault:
            print(json.dumps({"case": str(case), "fault": fault}), flush=True)
    print(json.dumps({"kinds": kinds}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), "first" in sys.argv[4:])
