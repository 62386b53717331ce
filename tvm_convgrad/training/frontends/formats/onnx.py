# SPDX-License-Identifier: Apache-2.0
"""ONNX files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.registry import Format, Request

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import Model


def load(request: Request) -> Model:
    """The model of an .onnx file."""
    from tvm_convgrad.training.frontends.onnx.model import load_onnx  # here: it loads TVM

    return load_onnx(request.path, request.batch, request.outputs)


FORMAT = Format(name="ONNX", suffixes=(".onnx",), load=load, package="onnx")
