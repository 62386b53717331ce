# SPDX-License-Identifier: Apache-2.0
"""The list of operators in docs/RELAY_IMPORT.md: `python -m tvm_convgrad.importer.listing docs/RELAY_IMPORT.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.operators import TABLE
from tvm_convgrad.importer.schema import SCHEMAS

BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"


def listing() -> str:
    """The table in Markdown: operator, attributes, notes."""
    lines = [f"{len(TABLE)} operators:", "", "| operator | attributes | |", "|---|---|---|"]
    for name, entry in sorted(TABLE.items()):
        fields = ", ".join(sorted(SCHEMAS.get(entry.attributes, {})))
        lines.append(f"| `{name}` | {fields} | {entry.note} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """A document with the list between its two marks made again.

    Raises:
        ModelError: a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ModelError(f"the document lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (document := Path(sys.argv[1])).is_file():
        sys.exit("usage: python -m tvm_convgrad.importer.listing docs/RELAY_IMPORT.md")
    document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
