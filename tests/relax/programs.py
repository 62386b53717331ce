# SPDX-License-Identifier: Apache-2.0
"""Small Relax programs around the operators, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_convgrad import op as ops
from tvm_convgrad.core.catalogue import BY_NAME


def tensor(name: str, shape: tuple[Any, ...] | list[Any], dtype: str = "float32") -> Any:
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def typed(expr: Any) -> Any:
    """The type that Relax infers for a call."""
    return relax.BlockBuilder().normalize(expr).ty


def call(name: str, *operands: Any, **attributes: Any) -> Any:
    return getattr(ops, name)(*operands, **attributes)


def module(expr_of: Any, params: list[Any]) -> Any:
    """IRModule with one dataflow block in `main(*params)` that returns `expr_of(builder)`."""
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(expr_of(builder))
        builder.emit_func_output(result)
    return builder.get()


def operands_of(name: str, rank: int, symbolic: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Parameters and attributes of a call to operator `name`, with everything away from its default."""
    n: Any = tvm.tirx.Var("n", "int64") if symbolic else 2
    w: Any = tvm.tirx.Var("w", "int64") if symbolic else 8
    spatial = {1: [w], 2: [7, w], 3: [6, 7, w]}[rank]
    padding, strides, dilation = ((1, 0),) * rank, tuple(range(1, rank + 1)), (1,) * (rank - 1) + (2,)
    kernel = (2,) * rank
    out = [
        (x + low + high - d * (k - 1) - 1) // s + 1
        for x, (low, high), d, k, s in zip(spatial, padding, dilation, kernel, strides, strict=True)
    ]
    grad = tensor("grad", [n, *out, 6])
    attributes: dict[str, Any] = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": 2,
        "grad_layout": "N" + "DHW"[3 - rank :] + "C",
        "data_layout": "NC" + "DHW"[3 - rank :],
        "kernel_layout": "DHW"[3 - rank :] + "IO",
        "out_dtype": "float64",
    }
    if "weight" in name:
        return [grad, tensor("data", [n, 4, *spatial])], {**attributes, "kernel_size": kernel}
    parameters = [grad, tensor("weight", [*kernel, 2, 6])]
    return parameters, {**attributes, "data_shape": [n, 4, *spatial]}


def sizes(attributes: dict[str, Any]) -> list[Any]:
    """A parameter that binds the symbolic extents of `data_shape`, which grad's extents have only inside formulas."""
    free = [extent for extent in attributes.get("data_shape", ()) if isinstance(extent, tvm.tirx.Var)]
    return [relax.Var("sizes", relax.ShapeType(free))] if free else []


NAMES = tuple(name for name in BY_NAME if "backward" in name)
