# SPDX-License-Identifier: Apache-2.0
"""Functions of Python files that return Relax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.registry import Format, Request

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import Model


def load(request: Request) -> Model:
    """The model that a function returns."""
    from tvm_convgrad.training.frontends.python_function import load_function  # here: it loads TVM

    return load_function(request.path, request.function, request.batch, request.outputs)


FORMAT = Format(name="Python function", suffixes=(".py",), load=load, takes_function=True)
