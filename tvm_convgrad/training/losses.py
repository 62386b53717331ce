# SPDX-License-Identifier: Apache-2.0
"""Loss functions on predictions and targets, each the mean over its elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvm_convgrad.errors import ModelError, UnsupportedError
from tvm_convgrad.training.counting import count_of, scaled_sum
from tvm_convgrad.training.graph import element_type, static_shape


@dataclass(frozen=True)
class Loss:
    """How to name and type the target of some predictions, and the loss of both."""

    name: str
    target_type: Callable[[Any], Any]
    value: Callable[[Any, Any, Any], Any]


def _class_target(predictions: Any) -> Any:
    shape = static_shape(predictions)
    if len(shape) < 2 or not isinstance(shape[1], int):
        raise ModelError(
            "cross_entropy needs predictions of the shape [batch, classes, ...] with a fixed number of classes, "
            f"but the model's are {list(map(str, shape))}; use loss='mse', or return class scores."
        )
    return relax.TensorType([shape[0], *shape[2:]], "int64")


def cross_entropy(builder: Any, predictions: Any, target: Any) -> Any:
    """-mean(log_softmax(predictions)[target]) over classes in axis 1, as torch.nn.functional.cross_entropy.

    A label outside 0..classes-1 adds nothing to the sum (no memory is read out of bounds); whoever feeds the step
    should refuse such labels.
    """
    shape = static_shape(predictions)
    logarithms = builder.emit(relax.op.nn.log_softmax(predictions, axis=1))
    dtype = element_type(predictions)
    chosen = relax.op.one_hot(
        target,
        relax.prim_value(1.0, dtype),
        relax.prim_value(0.0, dtype),
        depth=int(shape[1]),
        axis=1 if len(shape) > 2 else -1,
    )
    chosen = builder.emit(relax.op.grad.no_grad(builder.emit(chosen)))
    axes = list(range(len(shape)))
    count = count_of(builder, predictions, [axis for axis in axes if axis != 1])
    weighted = builder.emit(relax.op.multiply(logarithms, chosen))
    return builder.emit(relax.op.negative(scaled_sum(builder, weighted, axes, count)))


def mean_squared_error(builder: Any, predictions: Any, target: Any) -> Any:
    """mean((predictions - target)^2), as torch.nn.functional.mse_loss."""
    difference = builder.emit(relax.op.subtract(predictions, target))
    axes = list(range(len(static_shape(predictions))))
    squares = builder.emit(relax.op.multiply(difference, difference))
    return scaled_sum(builder, squares, axes, count_of(builder, predictions, axes))


LOSSES = {
    "cross_entropy": Loss("cross_entropy", _class_target, cross_entropy),
    "mse": Loss("mse", lambda predictions: predictions.ty, mean_squared_error),
}


def find_loss(name: str) -> Loss:
    """The loss of that name.

    Raises:
        UnsupportedError: there is none.
    """
    if name not in LOSSES:
        raise UnsupportedError(f"build_step: loss {name!r} is unknown; choose one of {', '.join(LOSSES)}.")
    return LOSSES[name]
