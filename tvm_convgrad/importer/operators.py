# SPDX-License-Identifier: Apache-2.0
"""All operators: importing this module fills the table."""

from __future__ import annotations

from collections import Counter

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import (  # noqa: F401
    ops_conv,
    ops_elementwise,
    ops_layout,
    ops_nn,
    ops_pool,
    ops_reduce,
    ops_shape,
)
from tvm_convgrad.importer.program import Call, Program, Unsupported, walk
from tvm_convgrad.importer.table import TABLE

__all__ = ["TABLE", "refuse_unknown"]

_KINDS = {
    "Match": "pattern matching on algebraic data types",
}


def refuse_unknown(program: Program) -> None:
    """Look at all of a program before any work.

    Raises:
        ModelError: it has operators, or kinds of expressions, that are not imported; all are named, with counts.
    """
    operators: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for expr in walk(program):
        if isinstance(expr, Call) and isinstance(expr.op, str) and expr.op not in TABLE:
            operators[expr.op] += 1
        elif isinstance(expr, Unsupported):
            kinds[expr.kind] += 1
    parts = [
        f"{count} {name} ({_KINDS.get(name, 'which Relax programs do not have')})" for name, count in kinds.items()
    ]
    parts += [f"{count} {name}" for name, count in sorted(operators.items())]
    if parts:
        version = f" (TVM {program.version})" if program.version and not program.version.startswith("text") else ""
        raise ModelError(
            f"{program.source}{version} holds what is not imported: {', '.join(parts)}. What is imported stands in "
            "docs/RELAY_IMPORT.md."
        )
