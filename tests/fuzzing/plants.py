# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels, one at a time in a temporary copy: how many cases the fuzzer needs to find each.

    python -m tests.fuzzing.plants [--most 20000] [--seed 20261122] [NAME ...]

It prints a table and fails if a fault is not found. It is run by hand; docs/VERIFY.md has the table. test_plants.py
keeps the replaced lines in step with the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize", "tests")


@dataclass(frozen=True)
class Plant:
    """A fault: in a file of tvm_convgrad, `right` is replaced by `wrong`; it stands there once."""

    name: str
    file: str
    right: str
    wrong: str


PLANTS = (
    Plant(
        "pointwise assumed because extents are equal (a bug of 0.1.0)",
        "kernels/wgrad/spec.py",
        "return self.kernel == (1, 1, 1)",
        "return self.kernel == (1, 1, 1) and self.x.extents == self.dy.extents  #",
    ),
    Plant(
        "the last, partial block is computed again beyond the end (a bug of 0.1.0)",
        "kernels/depthwise/channels_wgrad.py",
        "splits = -(-self.blocks // per_split)",
        "splits = tiling.channel_splits",
    ),
    Plant(
        "off by one at the border: a tap's last row of dY is left out",
        "kernels/wgrad/spec.py",
        "valid_range(offset, stride, count, self.x.extents[axis])",
        "valid_range(offset, stride, count, self.x.extents[axis] - 1)",
    ),
    Plant(
        "missing tail: channels that do not fill a vector",
        "kernels/depthwise/channels.py",
        "if self.channels % lanes:",
        "if self.channels % lanes > 1:",
    ),
    Plant(
        "swapped steps of rows and columns",
        "kernels/wgrad/kernel.py",
        "pixel = spec.step_w * self.width // spec.word_columns\n"
        '        return loops.let(expr(at), "vectors"), spec.step_h * panel.row_size, pixel',
        "pixel = spec.step_h * self.width // spec.word_columns\n"
        '        return loops.let(expr(at), "vectors"), spec.step_w * panel.row_size, pixel',
    ),
    Plant(
        "a stale accumulator: the second slab sets the sums, too",
        "kernels/wgrad/panels.py",
        "first = slab_number < 1",
        "first = slab_number < 2",
    ),
    Plant(
        "relu before the bias",
        "kernels/epilogue.py",
        "    if epilogue.bias:\n        total = total + bias()\n",
        "    if epilogue.bias:\n        total = at_least(total, zero(dtype, lanes_of(total))) + bias()\n",
    ),
    Plant(
        "padding of a packed row counted from the panel's start",
        "kernels/gemm/source.py",
        'first = loops.let(expr(block.w * spec.in_step[2] + blocking.panel_first[2]), "column0")',
        'first = loops.let(expr(block.w + blocking.panel_first[2]), "column0")',
    ),
    Plant(
        "a sign in Winograd's transform of dY",
        "kernels/winograd/tiles.py",
        "_half(y[0] - y[1]), -y[1]]",
        "_half(y[0] - y[1]), y[1]]",
    ),
    Plant(
        "with stride 2, odd columns are read one position too far",
        "kernels/depthwise/row_vectors.py",
        "range(1, 2 * lanes, 2)",
        "[*range(3, 2 * lanes, 2), 1]",
    ),
    Plant(
        "masked lanes of the last channels read beyond the tensor",
        "kernels/depthwise/channels.py",
        "self._block_in_place(n, whole, lanes_below(0, self.channels % lanes, lanes))",
        "self._block_in_place(n, whole, lanes_below(0, self.channels % lanes + 1, lanes))",
    ),
    Plant(
        "two work items share their sums",
        "kernels/wgrad/kernel.py",
        "block = (part * spec.groups + group) * blocks.in_blocks",
        "block = group * blocks.in_blocks",
    ),
    Plant(
        "the second row of a tile is stored in place of its second column",
        "kernels/gemm/kernel.py",
        "i // blocking.tile_w * blocking.step_h +",
        "i // blocking.tile_w * blocking.step_w +",
    ),
    Plant(
        "bfloat16 rounded half away from zero",
        "codegen/loops.py",
        "number(0x7FFF) + odd",
        "number(0x8000)",
    ),
    Plant(
        "a last pixel without a partner is multiplied with the next one",
        "kernels/wgrad/kernel.py",
        "return low_half(words) if alone else words",
        "return words",
    ),
    Plant(
        "the last word of an odd number of channels reaches into the next channel",
        "kernels/gemm/pairs.py",
        "if self._channels % 2 == 0 and",
        "if self._pair or",
    ),
    Plant(
        "a tile of AMX: pieces of the second row of pixels are read from the first",
        "kernels/gemm/tile_sums.py",
        "at = s + (down * blocking.step_h",
        "at = s + (0 * blocking.step_h",
    ),
    Plant(
        "a tile of AMX: zeros behind a row of dY are multiplied with pixels of X",
        "kernels/wgrad/tile_panels.py",
        "min(x.extents[2], first + (extent - 1) * stride + 1)",
        "min(x.extents[2], first + extent * stride + 1)",
    ),
)


def plant(fault: Plant, folder: Path) -> None:
    """Copy the packages into a folder, with the fault."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "tvm_convgrad" / fault.file
    text = path.read_text()
    assert text.count(fault.right) == 1, (fault.name, text.count(fault.right))
    path.write_text(text.replace(fault.right, fault.wrong))


def cases_until_found(fault: Plant, most: int, seed: int) -> int | None:
    """How many cases were checked when the first one was wrong; None if none of `most` was."""
    with tempfile.TemporaryDirectory() as folder:
        plant(fault, Path(folder))
        command = [sys.executable, "-m", "tests.fuzzing.run_share", "0", str(most), str(seed), "first"]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    found = done.stdout.strip().splitlines()[-1]
    return int(found) if found.isdigit() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("names", nargs="*", help="parts of names; all faults if there are none")
    options = parser.parse_args()
    missed = 0
    print("| planted fault | file | found at case | seconds |\n|---|---|---|---|")
    for fault in PLANTS:
        if options.names and not any(name in fault.name for name in options.names):
            continue
        start = time.monotonic()
        found = cases_until_found(fault, options.most, options.seed)
        missed += found is None
        shown = "not found" if found is None else f"{found:,}"
        print(f"| {fault.name} | {fault.file} | {shown} | {time.monotonic() - start:.0f} |", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
