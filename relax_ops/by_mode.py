# SPDX-License-Identifier: Apache-2.0
"""nn.by_mode: one tensor while a model is trained, and another when it predicts.

Models of frontends hold it, such as for an instance norm with running statistics; steps and predictors replace it by
one of its operands before they are differentiated or compiled.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relax_ops.declaration import declare_operator
from tvm_convgrad.core.errors import DTypeError, ProblemError

BY_MODE = "relax.nn.by_mode"


def by_mode(training: relax.Expr, predicting: relax.Expr) -> relax.Call:
    """The first tensor in training, the second in prediction; both have one shape and dtype.

    Example:
        `by_mode(normalised_by_instance, normalised_by_running_statistics)`
    """
    return relax.Call(tvm.ir.Op.get(BY_MODE), [training, predicting])


def infer_type(call: relax.Call, _block_builder: relax.BlockBuilder) -> relax.TensorType:
    """FInferType: that of both operands."""
    training, predicting = (argument.ty for argument in call.args)
    if not isinstance(training, relax.TensorType) or str(training.dtype) != str(predicting.dtype):
        raise DTypeError(f"nn.by_mode: both operands must be tensors of one dtype, but are {training} and {predicting}")
    if training.ndim != predicting.ndim:
        raise ProblemError(
            f"nn.by_mode: both operands must have one rank, but have {training.ndim} and {predicting.ndim}"
        )
    return training


def declare() -> None:
    """Register nn.by_mode; repeating is harmless."""
    declare_operator(BY_MODE, "One tensor in training, another in prediction", infer_type)


__all__ = ["BY_MODE", "by_mode", "declare"]
