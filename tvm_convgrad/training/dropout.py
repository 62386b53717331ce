# SPDX-License-Identifier: Apache-2.0
"""Dropout in a training step: a seeded mask that changes with each step, or the identity."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.training.graph import Environment, Rewrite

OP = "relax.nn.dropout"


def identity(builder: Any, call: Any, _environment: Environment) -> Any:
    """Dropout when predicting: the data, and a mask of ones."""
    return relax.Tuple([call.args[0], builder.emit(relax.op.ones_like(call.args[0]))])


def seeded(seed: int, counter: Any) -> Rewrite:
    """A rewrite that makes each dropout of a step drop by a mask of (seed, counter, number of the dropout)."""
    raise UnsupportedError("dropout")
