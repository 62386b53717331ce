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

import tvm_convgrad
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.kernels.registry import all_kernels

CASES, SEED, PROCESSES = 4200, 20261126, 2

PACKAGE = Path(tvm_convgrad.__file__).parent
MEASURED = ("codegen", "kernels")
"""Folders of which every branch is to be reached."""

AHEAD = "weights that are constants: tests/kernels/test_packed_ahead.py"
OTHERS = {
    "codegen/extrema.py": "most of it is for pools and steps: tests/gradients/test_nonfinite.py",
    "codegen/hardware.py": "it reads TVM's targets: tests/kernels/test_targets.py",
    "codegen/tir.py": "it chooses by the TVM in use",
    "codegen/tir_nested.py": "the TIR of a TVM that has Relay: tests/relay_ops/test_cpu_kernels.py",
    "kernels/candidates.py": "the tuner's other plans: tests/tuning",
    "kernels/gemm/ahead.py": AHEAD,
    "kernels/pool/channels.py": "no convolution: tests/kernels/test_max_pool.py",
    "kernels/pool/gather.py": "no convolution: tests/kernels/test_max_pool.py",
    "kernels/pool/geometry.py": "no convolution: tests/kernels/test_max_pool.py",
    "kernels/pool/planes.py": "no convolution: tests/kernels/test_max_pool.py",
    "kernels/tuned.py": "it reads the tuner's files: tests/tuning",
    "kernels/version.py": "a key of the tuner's files: tests/tuning",
}
"""Files of which the fuzzer is not to reach every branch, and why."""

TOO_LARGE = "problems of the fuzzer are small"
TUNER = "the tuner's: tests/tuning"
NO_CASE = "what no kernel takes is not a case: tests/relax/test_default_kernels.py, tests/kernels/test_targets.py"
OTHER_PLAN = "plans of the fuzzer are of the kernel: tests/fuzzing/test_cases.py"
HALVES = "seldom: bfloat16, AVX512-BF16 and NHWC or large kernels at once: tests/kernels/test_depthwise_halves.py"
UNREACHED = {
    "kernels/chooser.py": {
        "packed_weight": AHEAD,
        'return Choice(COMPOSITION, "the target is not a CPU that kernels are made for")': NO_CASE,
        "return found[0]": NO_CASE,
        "continue": "a kernel is forced by impl: tests/kernels/test_extension.py",
        "reasons = list(dict.fromkeys(refused.values()))": NO_CASE,
        'return (Choice(COMPOSITION, "; ".join(reasons) or "no kernel computes it", refused=refused),)': NO_CASE,
        'return "the batch is known only at run time"': NO_CASE,
        'return "a batch known only at run time must be the outermost axis"': NO_CASE,
        'return "the height or width is known only at run time"': NO_CASE,
        'return f"{name} has no elements"': NO_CASE,
        'return f"{name} has more than {MAX_INDEX // 2} elements, half of what an int32 index reaches"': TOO_LARGE,
        'raise UnsupportedError(f"{direction} of {problem.descriptor}: {reason}; apply it to the result")': (
            "cases have the epilogues of their kernels: tests/kernels/test_gemm.py"
        ),
    },
    "kernels/contract.py": {
        'raise TypeError(f"a plan of {type(tiling).__name__}; this kernel takes {kind.__name__}")': OTHER_PLAN,
        'return f"there are {len(plan.tilings)} tilings of region {plan.region}; there must be one, of region 0"': (
            OTHER_PLAN
        ),
        "Kernel.packed_weight": AHEAD,
        "Kernel.emit_packed": AHEAD,
        "Kernel.form": "the value of impl: tests/kernels/test_extension.py",
        "Kernel.tilings": TUNER,
        "variants": TUNER,
    },
    "kernels/depthwise/channels_plan.py": {
        "DepthwiseChannels.tilings": TUNER,
        "return reason": OTHER_PLAN,
        'return f"split_k is {tiling.split_k}; it must be at most {MOST_PIECES}"': TUNER,
        'return f"it would keep more than {MOST_PARTIAL_SUMS} sums"': TOO_LARGE,
        'return f"split_k is {tiling.split_k}; parts of {size} sums must be at most {MOST_PARTIAL_SUMS} sums in all"': (
            TOO_LARGE
        ),
        'return f"borders and phases would take {products} multiply-adds of code"': TOO_LARGE,
        "pixels = min(pixels, FAR_TILE_W // spec.in_step[2] or 1)": TOO_LARGE,
        "pixels = min(pixels, GROUPS_FAR_TILE_W)": TOO_LARGE,
        "piece, slab_h = GROUPS_FAR_PIECE, min(height, GROUPS_FAR_ROWS)": TOO_LARGE,
        "pixels = min(pixels, ALIASED_TILE_W if each == 1 else GROUPS_FAR_TILE_W)": TOO_LARGE,
        'return "channels_inner needs in_place"': TUNER,
        "dy_pages, x_pages = (": TOO_LARGE,
        "return max(1, int((Machine.near_pages * 3 / 4 - x_pages) / (dy_pages + strides[1] * x_pages)))": TOO_LARGE,
    },
    "kernels/depthwise/channel_words.py": {"add_pairs": HALVES, "add_pairs.read": HALVES, "pack_words": HALVES},
    "kernels/depthwise/columns.py": {
        "for number in range(terms.number):": HALVES,
        "self._sum_term(tile, rows, at, x, weights, terms.at(number))": HALVES,
    },
    "kernels/depthwise/columns_plan.py": {
        'return "rows_per_vector needs depth slices of one tile, and no split_h"': OTHER_PLAN,
        'return f"rows_per_vector is {tiling.rows_per_vector}; it must be 1 or {most}"': OTHER_PLAN,
        'return f"tile_h is {tiling.tile_h}; with {tiling.rows_per_vector} rows in a vector it must be all vectors"': (
            OTHER_PLAN
        ),
        "return reason": OTHER_PLAN,
        "tile_h -= 1": TOO_LARGE,
        "tile_h = min(tile_h, _far_tile_h(spec.source, spec.in_step[2] * spec.out_step[2]))": TOO_LARGE,
        "tile_h = min(tile_h, _far_tile_h(x, strides[2]))": TOO_LARGE,
        "_far_tile_h": TOO_LARGE,
        'return f"the code would have more than {MAX_PRODUCTS} multiply-adds"': TOO_LARGE,
    },
    "kernels/depthwise/row_vectors.py": {"MultiRowReader.words": HALVES},
    "kernels/gemm/cycles.py": {
        "work += arithmetic * SAME_SET_PENALTY": TOO_LARGE,
        "again = weight_bytes * blocking.ranges.share": TOO_LARGE,
        "work += tiles * EXPOSED * again / (RATE_WHILE_STORING * machine.shared_rate)": TOO_LARGE,
    },
    "kernels/gemm/kernel.py": {
        "if self.packed_at is None:": AHEAD,
        'packed_at = loops.let(expr(rest * self.weights.size + self.packed_at), "w_at")': AHEAD,
    },
    "kernels/gemm/plan.py": {
        "dividing = (n for n in range(2, spec.source_channels + 1) if spec.source_channels % n == 0)": TOO_LARGE,
        "return next((n for n in dividing if weight_bytes <= n * machine.l2_bytes * PART_SHARE), 1)": TOO_LARGE,
        "ImplicitGemm.packed_weight": AHEAD,
        "ImplicitGemm.emit_packed": AHEAD,
        'return f"region is {plan.region}; it must be from 0 to {len(regions) - 1}"': OTHER_PLAN,
        'return f"there are {len(plan.tilings)} tilings for {len(spec.phases)} loop nests of region {plan.region}"': (
            OTHER_PLAN
        ),
        "ImplicitGemm.tilings": TUNER,
        'raise TypeError(f"{plan} is a plan of another kernel than the implicit GEMM")': OTHER_PLAN,
        'return f"the panel of the whole source takes {size} bytes, more than {MAX_PANEL_BYTES}"': TOO_LARGE,
        "if not refusal(spec, phases, tiling, machine):": TOO_LARGE,
    },
    "kernels/registry.py": {
        "raise SetupError(": "all names are unique: tests/kernels/test_extension.py",
        'known = ", ".join(kernel.name for kernel in kernels_of(direction))': OTHER_PLAN,
        'raise UnsupportedError(f"kernels: {name!r} computes no {direction}; there are {known}")': OTHER_PLAN,
        "forms_of": "values of impl: tests/kernels/test_extension.py",
    },
    "kernels/roofline.py": {"roofline": "a column of explain: tests/kernels/test_extension.py"},
    "kernels/wgrad/plan.py": {
        "ImplicitGemmWgrad.tilings": TUNER,
        'return f"split_k is {tiling.split_k}; it must be at most {most}, for {MOST_PARTIAL_SUMS} sums in all"': (
            TOO_LARGE
        ),
        'return f"split_k is {tiling.split_k}; it must be at most {MOST_PIECES}"': TUNER,
    },
    "kernels/winograd/plan.py": {
        'return f"the transformed weight would take more than {MAX_WEIGHT_BYTES >> 20} MiB"': TOO_LARGE,
        'return f"the tiles of one row would take more than {MAX_SLAB_BYTES >> 20} MiB"': TOO_LARGE,
        "Winograd.tilings": TUNER,
        "continue": TOO_LARGE,
        "if _slab_bytes(spec, problem, tiling, machine) <= MAX_SLAB_BYTES:": TOO_LARGE,
    },
}
"""Lines and functions that CI's cases do not reach, or do not leave by every branch, and why not."""


@pytest.fixture(scope="module")
def share(tmp_path_factory):
    """(the wrong cases, cases by kernel and instruction set, coverage by file) of CI's share."""
    folder = tmp_path_factory.mktemp("share")
    each = CASES // PROCESSES
    processes = []
    for number in range(PROCESSES):
        sources = ",".join(f"tvm_convgrad.{name}" for name in MEASURED)
        options = ["--branch", f"--source={sources}", f"--data-file={folder / f'data.{number}'}"]
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
    return wrong, kinds, {_place(Path(name).resolve()): found for name, found in files.items()}


def _root() -> Path:
    return Path(__file__).parents[2]


def _place(path: Path) -> str:
    """Where a file lies in the package."""
    return path.relative_to(PACKAGE.resolve()).as_posix()


def _sources() -> dict[str, Path]:
    """The files of the measured folders, by their places."""
    return {_place(path.resolve()): path for name in MEASURED for path in sorted((PACKAGE / name).rglob("*.py"))}


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
    names = {kernel.label(direction) for kernel in all_kernels() for direction in kernel.directions}
    for name in names:
        for cpu in CPUS.values():
            masked = name.startswith(("winograd", "depthwise columns"))
            refused = (masked and not cpu.has_masks) or (name.startswith("dot product") and not cpu.dots)
            tiles = "float16" if name.startswith("AMX-FP16") else "bfloat16"
            refused = refused or (name.startswith("AMX") and tiles not in cpu.tiles)
            assert by_family[name, cpu.name] >= (0 if refused else 3), (name, cpu.name)
            assert not (refused and by_family[name, cpu.name])


def test_every_branch_is_reached(share):
    _, _, files = share
    unreached = {}
    for name, path in _sources().items():
        if name in OTHERS or name not in files:
            assert name in OTHERS or not path.read_text().count("def "), name
            continue
        allowed = UNREACHED.get(name, {})
        lines = path.read_text().splitlines()
        of_functions = {
            line
            for function_name, function in files[name]["functions"].items()
            if function_name in allowed
            for line in [*function["missing_lines"], *(pair[0] for pair in function["missing_branches"])]
        }
        missing = set(files[name]["missing_lines"])
        # A branch to a line that is never reached is that line's matter.
        missing |= {start for start, end in files[name]["missing_branches"] if end not in missing}
        left = sorted(n for n in missing - of_functions if lines[n - 1].strip() not in allowed)
        if left:
            unreached[name] = [f"{n}: {lines[n - 1].strip()}" for n in left]
    assert unreached == {}


def test_every_exception_is_still_in_the_code():
    """A line or function that was deleted or changed leaves the table above, too."""
    for name, allowed in UNREACHED.items():
        text = (PACKAGE / name).read_text()
        for line in allowed:
            function = line.rpartition(".")[2]
            assert line in text if " " in line or line == "continue" else f"def {function}(" in text, (name, line)
    assert set(OTHERS) <= set(_sources())
