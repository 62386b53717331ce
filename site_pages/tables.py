# SPDX-License-Identifier: Apache-2.0
"""Pages made of what the code lists: operators, their rules, kernels, backends, model formats, errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from relax_ops.rules import operator_rules
from relax_ops.rules.contract import OperatorRules
from tvm_convgrad import op
from tvm_convgrad.core.catalogue import BY_NAME, FORWARD, NEW_OPS, OpEntry
from tvm_convgrad.core.errors import FAMILY
from tvm_convgrad.importer.operators import TABLE as RELAY_OPERATORS
from tvm_convgrad.kernels.registry import all_kernels
from tvm_convgrad.offload.registry import ENTRIES
from tvm_convgrad.training.frontends.registry import all_formats

COLUMNS = {
    "gradient": ("gradient",),
    "layout": ("layout",),
    "vmap": ("vmap",),
    "axis of samples": ("mapped_axis",),
    "sums over samples": ("sums", "linear"),
    "lowering": ("legalize",),
    "TVM's gradient errs": ("stock_fails",),
}
"""Columns of the table of rules, and the fields of OperatorRules of which one makes a tick."""

YES = "✓"
"""What a table has where a rule exists."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; vertical lines in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(words: Iterable[str]) -> str:
    """Words as code, with commas between them."""
    return ", ".join(f"`{word}`" for word in words)


def first_sentence(value: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def operators() -> str:
    """The page of the operator family and of all Relax operators that have rules here."""
    family = [(f"`{entry.name}`", *_gradients(entry), _arguments(entry)) for entry in BY_NAME.values()]
    rules = operator_rules()
    shown = [
        (f"`{name.removeprefix('relax.')}`", *(YES if _has(entry, column) else "" for column in COLUMNS))
        for name, entry in sorted(rules.items())
    ]
    return "\n\n".join(
        [
            "# Operators",
            "The family, from `tvm_convgrad/core/catalogue.py`. `result` is the gradient that comes in; what a call "
            "means is in the [reference of `op`](api/op.md).",
            table(("operator", "gradient of its first operand", "of its second", "attributes"), family),
            "## Rules of Relax operators",
            f"{len(rules)} operators have rules in `relax_ops/rules/`. An empty cell is TVM's own rule, or none. Rules "
            "over TVM's own are in force inside `tvm_convgrad.rules()`, and always where TVM's are wrong "
            "([TVM](../TVM.md)).",
            table(("operator", *COLUMNS), shown),
        ]
    )


def _has(rules: OperatorRules, column: str) -> bool:
    """Whether an operator has a rule."""
    return any(bool(getattr(rules, name)) for name in COLUMNS[column])


def _gradients(entry: OpEntry) -> list[str]:
    """The gradients of the operands of an operator, as calls."""
    found = []
    for operand, (name, operands) in zip(entry.direction.operands, entry.direction.gradients, strict=True):
        called = f"conv{entry.rank}d" + ("" if name == FORWARD.name else f"_{name}")
        found.append(f"{operand}: `{called}({', '.join(operands)})`")
    return found


def _arguments(entry: OpEntry) -> str:
    if entry not in NEW_OPS:
        return "TVM's own"
    names = list(inspect.signature(getattr(op, entry.name)).parameters)
    return code(name for name in names if name not in entry.direction.operands)


def kernels() -> str:
    """The page of the generated CPU kernels."""
    rows = [
        (
            kernel.name,
            f"`{kernel.form}`",
            ", ".join(kernel.label(direction).rpartition(" ")[2] for direction in kernel.directions),
            "; ".join(f"{direction}: {code(kernel.epilogues(direction))}" for direction in kernel.directions),
            YES if kernel.exact else "only with `--transforms`, or forced",
            YES if kernel.any_batch else "",
            first_sentence(type(kernel)),
        )
        for kernel in all_kernels()
    ]
    columns = ("kernel", "`impl`", "directions", "what it fuses", "plain sums", "free batch", "what it is")
    return "\n\n".join(
        [
            "# Kernels",
            "The kernels that the chooser knows (`tvm_convgrad/kernels/registry.py`). Of those that do not refuse a "
            "problem the one of least estimate is taken; `convgrad explain` shows which, and why no other is. How they "
            "work: [KERNELS](../KERNELS.md).",
            table(columns, rows),
        ]
    )


def backends() -> str:
    """The page of vendor libraries."""
    rows = [
        (
            entry.title,
            f"`{entry.name}`",
            entry.used_on,
            ", ".join(entry.dtypes),
            "; ".join(f"{direction}: {code(fused) or 'nothing'}" for direction, fused in entry.epilogues.items()),
            entry.layout or "any",
            f"`{entry.install}`",
            f"`{entry.variable}`" if entry.variable else "",
        )
        for entry in sorted(ENTRIES.values(), key=lambda each: each.order)
    ]
    columns = ("library", "`--offload`", "on", "types", "what one call fuses", "layout", "install", "settings")
    return "\n\n".join(
        [
            "# Libraries",
            "Backends, in the order in which `--offload auto` tries them (`tvm_convgrad/offload/*/entry.py`). What "
            "each refuses, and why: [OFFLOAD](../OFFLOAD.md).",
            table(columns, rows),
        ]
    )


def formats() -> str:
    """The page of model files."""
    rows = [
        (
            each.name,
            code(each.suffixes),
            f"`pip install 'tvm-convgrad[{each.package}]'`" if each.package else "",
            "`--params`" if each.takes_params else "",
        )
        for each in all_formats()
    ]
    noted = sum(1 for entry in RELAY_OPERATORS.values() if entry.note)
    return "\n\n".join(
        [
            "# Model files",
            "What `convgrad build`, `explain` and `tune` read (`tvm_convgrad/training/frontends/formats/`).",
            table(("format", "endings", "needs", "values of parameters"), rows),
            f"Of Relay's operators {len(RELAY_OPERATORS)} are imported, {noted} of them with a note: "
            "[the table](../RELAY_IMPORT.md#operators).",
        ]
    )


def errors() -> str:
    """The page of the error classes."""
    rows = [
        (
            f"`{error.__name__}`",
            first_sentence(error),
            code(base.__name__ for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception),
        )
        for error in FAMILY
    ]
    return "\n\n".join(
        [
            "# Errors",
            "Everything that this package refuses is a `tvm_convgrad.ConvGradError`: a sentence with the operator and "
            "parameter, the rule, the values and the remedy. The command prints it and ends with exit code 1.",
            table(("error", "what it is about", "is also a"), rows),
        ]
    )


PAGES = {
    "reference/operators.md": operators,
    "reference/kernels.md": kernels,
    "reference/backends.md": backends,
    "reference/formats.md": formats,
    "reference/errors.md": errors,
}
"""Where each page is in the site."""
