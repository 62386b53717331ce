# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.export, written by torch.export.save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.registry import Format, Request

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import Model


def load(request: Request) -> Model:
    """The model of a .pt2 file."""
    from tvm_convgrad.training.frontends.torch_export.model import load_pt2  # here: it loads TVM

    return load_pt2(request.path, request.batch, request.outputs)


FORMAT = Format(name="torch.export", suffixes=(".pt2",), load=load, package="torch")
