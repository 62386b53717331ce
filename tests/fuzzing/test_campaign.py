# SPDX-License-Identifier: Apache-2.0
"""CI's share of the fuzzer: no case is wrong, each kernel and instruction set has a part, all branches are reached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import coverage
import pytest

import tvm_convgrad.kernels
from tvm_convgrad.fuzzing.families import FAMILIES
from tvm_convgrad.kernels.target import CPUS

CASES, SEED, PROCESSES = 3000, 20261122, 2

KERNELS = Path(tvm_convgrad.kernels.__file__).parent

OTHERS = {
    "candidates.py": "the tuner's other tilings: tests/tuning",
    "extrema.py": "most of it is for pools and steps: tests/gradients/test_nonfinite.py",
    "max_pool.py": "no convolution: tests/kernels/test_max_pool.py",
    "max_pool_channels.py": "no convolution: tests/kernels/test_max_pool.py",
    "plan.py": "it refuses what no kernel takes, which is no case: tests/relax/test_default_kernels.py",
    "target.py": "it reads TVM's targets: tests/kernels/test_targets.py",
    "transforms.py": "a context, which tests/cli/test_transforms.py enters",
    "tuned.py": "it reads the tuner's files: tests/tuning",
}
"""Files of which the fuzzer is not to reach every branch, and why."""

TOO_LARGE = "problems of the fuzzer are small"
SELDOM = "other draws of 3,000 cases reach it, those of CI's seed do not"
TUNER = "the tuner's: tests/tuning"
UNREACHED = {
    "depthwise_plan.py": {
        'return replace(choice, refused={other.kind: "estimated to be slower"})': SELDOM,
        'return f"parts is {tiling.parts}; it must be at most {MOST_PIECES}"': TUNER,
        'return f"borders and phases would take {products} multiply-adds of code"': TOO_LARGE,
        "dy_pages, x_pages = (": TOO_LARGE,
        "return max(1, int((NEAR_PAGES * 3 / 4 - x_pages) / (dy_pages + strides[1] * x_pages)))": TOO_LARGE,
    },
    "depthwise_planes_plan.py": {
        "lines -= 1": TOO_LARGE,
        'return f"borders and phases would take {emitted} multiply-adds of code"': TOO_LARGE,
        'return f"the code would have more than {MAX_PRODUCTS} multiply-adds"': TOO_LARGE,
    },
    "gather.py": {"self.tile_ahead.channel(panel, s)": SELDOM},
    "gather_result.py": {
        "mask = _lanes_from(j * lanes, place.fresh, lanes)": SELDOM,
        "return ramp(first, lanes) >= splat(expr(limit), lanes)": SELDOM,
    },
    "gather_source.py": {
        "for i in range(self._width, 2 * self._width, self._line):": SELDOM,
        "self.loops.prefetch(source, at + i)": SELDOM,
    },
    "gather_plan.py": {
        "if rows >= 1:  # the tuner has fewer registers than there are": SELDOM,
        "if gather.source.channel * element % 64:": SELDOM,
        'return "the panel of the whole source is too large"': TOO_LARGE,
        "if not invalid(gather, phases, tiling, machine):": TOO_LARGE,
        "work += arithmetic * 0.3  # all rows fall into the same sets of the cache": TOO_LARGE,
        "other_cuts": TUNER,
    },
    "weight_plan.py": {
        "invalid_cut": TUNER,
        "other_cuts": TUNER,
        'return f"parts is {tiling.parts}; it must be at most {MOST_PIECES}"': TUNER,
    },
    "winograd_plan.py": {
        'return f"the transformed weight would take more than {LARGEST_WEIGHT >> 20} MiB"': TOO_LARGE,
        'return f"the tiles of one line would take more than {LARGEST >> 20} MiB"': TOO_LARGE,
        "continue": TOO_LARGE,
        "if _chunk_bytes(gather, problem, tiling, machine) <= LARGEST:": TOO_LARGE,
    },
}
"""Lines, or whole functions, that CI's cases do not reach or do not leave by every branch, and why not."""


@pytest.fixture(scope="module")
def share(tmp_path_factory):
    """(the wrong cases, cases by kernel and instruction set, coverage by file) of CI's share."""
    folder = tmp_path_factory.mktemp("share")
    each = CASES // PROCESSES
    processes = []
    for number in range(PROCESSES):
        options = ["--branch", f"--source={tvm_convgrad.kernels.__name__}", f"--data-file={folder / f'data.{number}'}"]
        arguments = ["-m", "tests.fuzzing.run_share", str(number * each), str(each), str(SEED)]
        command = [sys.executable, "-m", "coverage", "run", *options, *arguments]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_root())
        )
    wrong, kinds = [], Counter()
    for process in processes:
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err
        *lines, last = map(json.loads, out.splitlines())
        wrong += lines
        kinds.update(last["kinds"])
    measured = coverage.Coverage(data_file=str(folder / "data"), branch=True)
    measured.combine([str(folder)])
    measured.json_report(outfile=str(folder / "report.json"))
    files = json.loads((folder / "report.json").read_text())["files"]
    return wrong, kinds, {Path(name).name: found for name, found in files.items()}


def _root() -> Path:
    return Path(__file__).parents[2]


def test_no_case_is_wrong(share):
    wrong, kinds, _ = share
    assert sum(kinds.values()) == CASES
    assert wrong == []


def test_every_family_has_its_share_on_every_instruction_set(share):
    _, kinds, _ = share
    by_family: Counter[str] = Counter()
    for kind, count in kinds.items():
        name, _, cpu = kind.rpartition(", ")
        by_family[name, cpu] += count
    names = {
        family.kind(direction) for family in FAMILIES for direction in ("forward", "backward_weight", "backward_data")
    }
    for name in names:
        for cpu in CPUS.values():
            masked = name.startswith(("winograd", "depthwise planes"))
            wanted = 0 if masked and not cpu.has_masks else 3
            assert by_family[name, cpu.name] >= wanted, (name, cpu.name)
            assert not (masked and not cpu.has_masks and by_family[name, cpu.name])


def test_every_branch_is_reached(share):
    _, _, files = share
    unreached = {}
    for path in sorted(KERNELS.glob("*.py")):
        if path.name in OTHERS or path.name not in files:
            assert path.name in OTHERS or not path.read_text().count("def "), path.name
            continue
        allowed = UNREACHED.get(path.name, {})
        lines = path.read_text().splitlines()
        of_tuner = {
            line
            for name, function in files[path.name].get("functions", {}).items()
            if allowed.get(name) == TUNER
            for line in [*function["missing_lines"], *(pair[0] for pair in function["missing_branches"])]
        }
        missing = set(files[path.name]["missing_lines"])
        # A branch to a line that is never reached is that line's matter.
        missing |= {start for start, end in files[path.name]["missing_branches"] if end not in missing}
        left = sorted(n for n in missing - of_tuner if lines[n - 1].strip() not in allowed)
        if left:
            unreached[path.name] = [f"{n}: {lines[n - 1].strip()}" for n in left]
    assert unreached == {}


def test_every_exception_is_still_in_the_code():
    """A line that was deleted or changed leaves the table above, too."""
    for name, allowed in UNREACHED.items():
        text = (KERNELS / name).read_text()
        for line in allowed:
            assert line in text, (name, line)
    assert set(OTHERS) <= {path.name for path in KERNELS.glob("*.py")}
