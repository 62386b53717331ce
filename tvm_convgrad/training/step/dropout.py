# SPDX-License-Identifier: Apache-2.0
"""Dropout in a training step: a seeded mask that changes with each step, or the identity."""

from __future__ import annotations

from itertools import count

from tvm import relax

from relax_ops.dropout import dropout
from tvm_convgrad.training.ir.graph import Environment, Rewrite

OP = "relax.nn.dropout"


def identity(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    """Dropout when predicting: the data, and a mask of ones."""
    return relax.Tuple([call.args[0], builder.emit(relax.op.ones_like(call.args[0]))])


def seeded(seed: int, step: relax.Expr) -> Rewrite:
    """A rewrite that gives each dropout its own mask, drawn from the seed and the number of the step.

    Args:
        seed: of the whole run.
        step: an int64 scalar, the number of steps done.
    """
    streams = count()

    def rewrite(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        rate = float(call.attrs.rate)
        return relax.Tuple(list(dropout(builder, call.args[0], step, rate=rate, seed=seed, stream=next(streams))))

    return rewrite
