# SPDX-License-Identifier: Apache-2.0
"""The documentation of what people import: complete sections, every argument described, and examples that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

import tvm_convgrad
from tvm_convgrad.core import errors

MODULES = (
    "relax_ops.passes.layout",
    "tvm_convgrad.batching",
    "tvm_convgrad.core.arguments",
    "tvm_convgrad.core.catalogue",
    "tvm_convgrad.core.descriptor",
    "tvm_convgrad.core.geometry",
    "tvm_convgrad.core.problem",
    "tvm_convgrad.core.reference",
    "tvm_convgrad.core.type_relation",
    "tvm_convgrad.evaluation",
    "tvm_convgrad.kernels.transforms",
    "tvm_convgrad.op",
    "tvm_convgrad.training.runtime.images.augment",
    "tvm_convgrad.training.runtime.images.index",
    "tvm_convgrad.training.runtime.images.options",
    "tvm_convgrad.training.runtime.images.shards",
    "tvm_convgrad.training.runtime.source",
)
"""Modules whose examples are run."""

DOCUMENTED = ("tvm_convgrad.op", "tvm_convgrad.core.reference", "tvm_convgrad.batching")
"""Modules of which every public function is checked, besides those of tvm_convgrad.__all__."""

EXCEPTIONS = {
    "register": {"Args": "it has none", "Returns": "nothing", "Example": "it changes the TVM in use, once"},
    "from_relay": {"Example": "it reads a file that another TVM has written"},
    "partition": {"Example": "it needs an installed library"},
    "allow_transforms": {"Raises": "nothing"},
    "rules": {"Args": "it has none", "Raises": "nothing"},
}
"""Sections that a public function may lack, and why."""

SECTIONS = ("Args", "Returns", "Raises", "Example")


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module_name in DOCUMENTED:
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ == module_name and not name.startswith("_"):
                yield f"{module_name.rpartition('.')[2]}.{name}", value
    for name in tvm_convgrad.__all__:
        value = getattr(tvm_convgrad, name)
        if isinstance(value, FunctionType) and value.__module__ not in DOCUMENTED:
            yield name, value


FUNCTIONS = dict(public_functions())


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0, f"{found.failed} examples of {name} are wrong; their output is above"


def test_the_examples_are_found() -> None:
    for name in ("tvm_convgrad.op", "tvm_convgrad.core.reference", "tvm_convgrad.core.problem"):
        examples = doctest.DocTestFinder().find(importlib.import_module(name))
        assert sum(bool(example.examples) for example in examples), name
    assert sum(bool(e.examples) for e in doctest.DocTestFinder().find(tvm_convgrad.op)) == 7


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    sections = re.findall(r"^(\w+):$", text, re.MULTILINE)
    allowed = EXCEPTIONS.get(name, {})
    missing = [section for section in SECTIONS if section not in sections and section not in allowed]
    assert not missing, f"{name} has the sections {sections}; write {missing}"
    assert sections == sorted(sections, key=SECTIONS.index), name
    if "Example" not in allowed:
        assert ">>> " in text, f"the example of {name} does not run"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    described = re.findall(
        r"^    ([a-z_, ]+): ", text.partition("\nArgs:\n")[2].partition("\nReturns:\n")[0], re.MULTILINE
    )
    words = [word for names in described for word in names.split(", ")]
    assert words == list(inspect.signature(FUNCTIONS[name]).parameters)


def test_what_an_operator_documents() -> None:
    """help() of an operator is enough to use it: its own rank's letters, layouts and formula."""
    text = inspect.getdoc(tvm_convgrad.op.conv3d_backward_weight) or ""
    for part in ("(N, O, D, H, W)", "NCDHW", "OIDHW", "dW[o, i, k] = sum over n, y of", "oneDNN"):
        assert part in text


def test_all_errors_are_offered() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ConvGradError)
    }
    assert defined == {error.__name__ for error in errors.FAMILY}
    for error in errors.FAMILY:
        assert error.__name__ in tvm_convgrad.__all__
        assert getattr(tvm_convgrad, error.__name__) is error
