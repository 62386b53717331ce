# SPDX-License-Identifier: Apache-2.0
"""Relax modules in TVM's JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.registry import Format, Request

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import Model


def load(request: Request) -> Model:
    """The model of a .json file that tvm.ir.save_json wrote."""
    from tvm_convgrad.training.frontends.relax_json import load_json  # here: it loads TVM

    return load_json(request.path, request.batch, request.outputs)


FORMAT = Format(name="Relax JSON", suffixes=(".json",), load=load)
