# SPDX-License-Identifier: Apache-2.0
"""docs/BATCHING.md has the table that the code has."""

from __future__ import annotations

from pathlib import Path

from tvm_convgrad.core.batch_rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "BATCHING.md"


def test_the_table_of_the_document_is_that_of_the_code() -> None:
    wanted = []
    for (direction, batched), rule in RULES.items():
        operands = ", ".join(f"{name} `{pattern}`" for name, pattern in rule.folds.items())
        wanted.append(f"| {direction} | {', '.join(batched)} | {operands} | `{rule.result}` | {rule.into} |")
    lines = PAGE.read_text().splitlines()
    start = lines.index("| operator | batched | operands | result | b becomes |") + 2
    assert lines[start : start + len(wanted)] == wanted
    assert not lines[start + len(wanted)], "the table has more rows than the code has rules"
