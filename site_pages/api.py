# SPDX-License-Identifier: Apache-2.0
"""The pages of the Python interface, which mkdocstrings fills from docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tvm_convgrad
from tvm_convgrad import training


class Page(NamedTuple):
    """A page of the reference.

    Attributes:
        title: its heading.
        names: dotted names of functions and classes, whose docstrings it shows in this order.
        about: a module whose docstring introduces the page, or "".
    """

    title: str
    names: tuple[str, ...]
    about: str = ""


MODULES = {
    "op": "tvm_convgrad.op",
    "reference": "tvm_convgrad.core.reference",
    "batching": "tvm_convgrad.batching",
    "catalogue": "tvm_convgrad.core.catalogue",
}
"""Public modules, by the name that tvm_convgrad offers them under."""

FRAMEWORKS = tuple(
    name for name in ("torch", "jax") if (Path(tvm_convgrad.__file__).parent / name / "__init__.py").is_file()
)
"""Packages that put the kernels under another framework, which need not be installed."""

_EAGER = {"ConvProblem": "tvm_convgrad.core.problem.ConvProblem", "register": "tvm_convgrad.register"}
"""Names that are not in the table of lazy ones."""

_OLD = ("convert_layout",)
"""Names of version 0.1, which have no entry."""

_TYPES = ("step.options.StepOptions", "step.module.StepModule", "model.model.Model", "runtime.checkpoint.Checkpoint")
"""Classes of tvm_convgrad.training that its public functions take or return."""


def pages() -> Iterator[tuple[str, Page]]:
    """(path in the site, page) of the whole interface."""
    functions = tuple(map(_path_of, public_names()))
    yield "reference/api/functions.md", Page("tvm_convgrad", functions)
    for name, module in MODULES.items():
        yield f"reference/api/{name}.md", Page(f"tvm_convgrad.{name}", _defined(module), about=module)
    trained = (f"{place}.{name}" for name, place in sorted(training._PLACES.items()))
    names = tuple(f"tvm_convgrad.training.{each}" for each in (*trained, *_TYPES))
    yield "reference/api/training.md", Page("tvm_convgrad.training", names)
    for name in FRAMEWORKS:
        module = f"tvm_convgrad.{name}"
        yield f"reference/api/{name}.md", Page(module, _exported(module))


def public_names() -> list[str]:
    """Functions and classes of `tvm_convgrad.__all__`; modules, errors and old names have other places."""
    elsewhere = {*MODULES, *_OLD, "__version__"}
    return [name for name in tvm_convgrad.__all__ if name not in elsewhere and not name.endswith("Error")]


def _path_of(name: str) -> str:
    return _EAGER.get(name) or tvm_convgrad._LAZY[name].replace(":", ".")


def _defined(name: str) -> tuple[str, ...]:
    """The public functions and classes that a module defines, in the order of its text."""
    module = importlib.import_module(name)
    return tuple(
        f"{name}.{each}"
        for each, value in vars(module).items()
        if not each.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == name
    )


def _exported(name: str) -> tuple[str, ...]:
    """What a package hands on by `__all__`, by the modules that define it; the package is read, not imported."""
    source = Path(tvm_convgrad.__file__).parents[1].joinpath(*name.split("."), "__init__.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    places = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    (listed,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return tuple(places.get(each, f"{name}.{each}") for each in listed)


def text_of(page: Page) -> str:
    """The Markdown of a page: a heading, and a block of mkdocstrings for each name."""
    blocks = [f"# {page.title}"]
    if page.about:
        hidden = ("members: false", "show_root_heading: false", "show_root_toc_entry: false")
        blocks.append(_block(page.about, hidden))
    blocks += [_block(name, ("heading_level: 2", "show_root_heading: true")) for name in page.names]
    return "\n\n".join(blocks)


def _block(name: str, options: tuple[str, ...]) -> str:
    return "\n".join([f"::: {name}", "    options:", *(f"      {option}" for option in options)])
