# SPDX-License-Identifier: Apache-2.0
"""Relay programs of TVM up to 0.19: text, JSON, archives of TVMC."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.registry import Format, Request

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.program import TrainingProgram


def load(request: Request) -> Model | TrainingProgram:
    """The model or training program of a Relay file."""
    from tvm_convgrad.training.frontends.relay import load_relay  # here: it loads TVM

    return load_relay(request.path, request.batch, request.params, request.outputs)


def is_relay_json(path: Path) -> bool:
    """Whether a .json file is of Relay; the others are of Relax."""
    from tvm_convgrad.importer.sources import looks_like_relay  # here: it loads TVM

    return path.suffix.lower() != ".json" or looks_like_relay(path)


FORMAT = Format(
    name="Relay",
    suffixes=(".relay", ".ir", ".tar", ".gz", ".json"),
    load=load,
    is_of=is_relay_json,
    takes_params=True,
)
