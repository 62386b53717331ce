# SPDX-License-Identifier: Apache-2.0
"""Pages made of what the code lists: operators, their rules, kernels, backends, model formats, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from relax_ops.rules import operator_rules
from relax_ops.rules.contract import OperatorRules
from site_pages import messages
from tvm_convgrad import op
from tvm_convgrad.core.catalogue import BY_NAME, FORWARD, NEW_OPS, OpEntry
from tvm_convgrad.core.errors import FAMILY
from tvm_convgrad.importer.operators import TABLE as RELAY_OPERATORS
from tvm_convgrad.kernels.contract import Kernel
from tvm_convgrad.kernels.registry import all_kernels
from tvm_convgrad.offload.contract import Entry
from tvm_convgrad.offload.registry import ENTRIES
from tvm_convgrad.training.frontends.registry import Format, all_formats

T = TypeVar("T")

COLUMNS = {
    "gradient": ("gradient",),
    "layout": ("layout",),
    "vmap": ("vmap",),
    "sample axis": ("mapped_axis",),
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


def listing(title: str, about: str, items: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> str:
    """A page with a table of what the code lists.

    Args:
        title: the heading of the page.
        about: the paragraph above the table.
        items: a row each.
        columns: what each column says of an item, by its heading.
    """
    rows = ([cell(item) for cell in columns.values()] for item in items)
    return "\n\n".join([f"# {title}", about, table(tuple(columns), rows)])


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
            "The operators of `tvm_convgrad/core/catalogue.py`. `result` stands for the gradient with respect to the "
            "operator's result; the [reference of `op`](api/op.md) defines each operator.",
            table(("operator", "gradient of its first operand", "of its second", "attributes"), family),
            "## Rules of Relax operators",
            f"{len(rules)} operators have rules in `relax_ops/rules/`. An empty cell means TVM's own rule, or none. "
            "Rules that replace TVM's apply inside `tvm_convgrad.rules()`; where TVM's rule is wrong they always apply "
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
    columns: dict[str, Callable[[Kernel], str]] = {
        "kernel": lambda kernel: kernel.name,
        "`impl`": lambda kernel: f"`{kernel.form}`",
        "directions": lambda kernel: ", ".join(kernel.label(each).rpartition(" ")[2] for each in kernel.directions),
        "fuses": lambda kernel: _fused({each: kernel.epilogues(each) for each in kernel.directions}),
        "exact": lambda kernel: YES if kernel.exact else "only with `--transforms`, or forced",
        "symbolic batch": lambda kernel: YES if kernel.any_batch else "",
        "description": lambda kernel: first_sentence(type(kernel)),
    }
    return listing(
        "Kernels",
        "All generated kernels (`tvm_convgrad/kernels/registry.py`). Of those that support a problem, the one with the "
        "least estimated time is used; `convgrad explain` shows it, and with `--refused` why the others were rejected. "
        "How they work: [KERNELS](../KERNELS.md).",
        all_kernels(),
        columns,
    )


def backends() -> str:
    """The page of vendor libraries."""
    columns: dict[str, Callable[[Entry], str]] = {
        "library": lambda entry: entry.title,
        "`--offload`": lambda entry: f"`{entry.name}`",
        "on": lambda entry: entry.used_on,
        "types": lambda entry: ", ".join(entry.dtypes),
        "what one call fuses": lambda entry: _fused(entry.epilogues),
        "layout": lambda entry: entry.layout or "any",
        "install": lambda entry: f"`{entry.install}`",
        "settings": lambda entry: f"`{entry.variable}`" if entry.variable else "",
    }
    return listing(
        "Libraries",
        "Vendor libraries, in the order in which `--offload auto` tries them (`tvm_convgrad/offload/*/entry.py`). "
        "[OFFLOAD](../OFFLOAD.md) describes what each supports.",
        sorted(ENTRIES.values(), key=lambda each: each.order),
        columns,
    )


def _fused(epilogues: Mapping[str, Sequence[str]]) -> str:
    """What is fused in each direction."""
    return "; ".join(f"{direction}: {code(fused) or 'nothing'}" for direction, fused in epilogues.items())


def formats() -> str:
    """The page of model files."""
    columns: dict[str, Callable[[Format], str]] = {
        "format": lambda each: each.name,
        "endings": lambda each: code(each.suffixes),
        "needs": lambda each: f"`pip install 'tvm-convgrad[{each.package}]'`" if each.package else "",
        "values of parameters": lambda each: "`--params`" if each.takes_params else "",
    }
    noted = sum(1 for entry in RELAY_OPERATORS.values() if entry.note)
    about = "The files that `convgrad build`, `explain` and `tune` read (`tvm_convgrad/training/frontends/formats/`)."
    rest = (
        f"Of Relay's operators {len(RELAY_OPERATORS)} are imported, {noted} of them with a note: "
        "[the table](../RELAY_IMPORT.md#operators)."
    )
    return "\n\n".join([listing("Model files", about, all_formats(), columns), rest])


def errors() -> str:
    """The page of the error classes, and of the sentences that each has in the sources."""
    columns: dict[str, Callable[[type[Exception]], str]] = {
        "error": lambda error: f"`{error.__name__}`",
        "meaning": first_sentence,
        "is also a": lambda error: code(
            base.__name__ for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception
        ),
    }
    classes = listing(
        "Errors",
        "Every error of this package is a `tvm_convgrad.ConvGradError`: a sentence with the operator and parameter, "
        "the rule, the values and the remedy. The command prints it and ends with exit code 1.",
        FAMILY,
        columns,
    )
    found = messages.by_class({error.__name__ for error in FAMILY})
    sections = [f"## Messages of {name}\n\n" + table(("message", "from"), rows) for name, rows in found.items()]
    about = "All messages follow, with … for the parts that vary. The search of the site finds them by their words."
    return "\n\n".join([classes, about, *sections])


PAGES = {
    "reference/operators.md": operators,
    "reference/kernels.md": kernels,
    "reference/backends.md": backends,
    "reference/formats.md": formats,
    "reference/errors.md": errors,
}
"""Where each page is in the site."""
