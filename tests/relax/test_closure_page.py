# SPDX-License-Identifier: Apache-2.0
"""docs/CLOSURE.md: its table is the catalogue's, its examples run; and so does examples/hessian_vector.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tvm_convgrad.core.catalogue import DIRECTIONS, FORWARD, Direction

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "CLOSURE.md").read_text()


def operator(direction: Direction) -> str:
    return "conv{r}d" if direction is FORWARD else f"conv{{r}}d_{direction.name}"


def row(direction: Direction) -> str:
    cells = [f"`{operator(direction)}({', '.join(direction.operands)})`"]
    for operand, (name, (first, second)) in zip(direction.operands, direction.gradients, strict=True):
        cells.append(f"{operand}: `{operator(DIRECTIONS[name])}({first}, {second})`")
    return f"| {' | '.join(cells)} |"


def test_the_table_is_the_catalogue_s() -> None:
    assert [line for line in PAGE.splitlines() if line.startswith("| `conv")] == [
        row(direction) for direction in DIRECTIONS.values()
    ]


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/CLOSURE.md", "exec"), names)


def test_hessian_vector_products() -> None:
    command = [sys.executable, str(ROOT / "examples" / "hessian_vector.py"), "--iterations", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.match(r"largest curvature \d", done.stdout)
