# SPDX-License-Identifier: Apache-2.0
"""Gradients of ONNX's own tests of single operators, beside central differences of onnx's evaluator in float64.

One case in `EVERY` runs, and those that once failed; with CONVGRAD_ALL_NODES=1 all of them, in some ten minutes. Of
each, every operand of floats is the input in turn, and the others are constants.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm

onnx = pytest.importorskip("onnx")

from onnx import numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from tests.linked import quick_step  # noqa: E402
from tests.training.test_onnx_nodes import drawn_cases, is_drawn, with_one_input  # noqa: E402
from tvm_convgrad.core.errors import ConvGradError  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

Array = np.ndarray[Any, Any]

EVERY = 1 if os.environ.get("CONVGRAD_ALL_NODES") else 256
MENDED = ("test_rotary_embedding_no_position_ids", "test_attention_causal_boolmask_nan_robustness")
OTHERWISE = {
    "batchnorm": "a step takes the statistics of the batch",
    "dropout": "masks are random",
    "gelu_default": "the evaluator's Erf has six digits",
    "gridsample": "the evaluator computes it in float32",
    "l1normalization": "the evaluator sums x for |x|",
    "resize_downsample_scales_cubic_align_corners": "the result's extent is a whole number, as in ONNX Runtime",
    "resize_downsample_scales_linear_align_corners": "the result's extent is a whole number, as in ONNX Runtime",
    "rnn_seq_length": "its tanh is saturated: 1 - y * y has two digits in float32",
    "simple_rnn_bidirectional": "its tanh is saturated: 1 - y * y has two digits in float32",
}
"""Parts of names of cases whose differences are others, and why."""
PLACES = 6
"""Elements of an operand whose differences are taken."""


def cases() -> Iterator[tuple[Any, int]]:
    """Each case with a tensor of floats, and its number."""

    def drawn(name: str) -> bool:
        return (is_drawn(name, EVERY) or name in MENDED) and not any(part in name for part in OTHERWISE)

    for case, numbers in drawn_cases(drawn):
        for number in numbers[:1] if case.name in MENDED and EVERY > 1 else numbers:
            yield case, number


def in_float64(graph: Any) -> None:
    """Make all floats of a graph double."""
    single, double = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
    tensors = list(graph.initializer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = double
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t] if attribute.HasField("t") else []
            if attribute.HasField("g"):
                in_float64(attribute.g)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == single:
                attribute.i = double
    for tensor in tensors:
        if tensor.data_type == single:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float64"), tensor.name))


def gradient(model: Any, x: Array, target: Array) -> tuple[float, Array] | None:
    """The loss of a step and its gradient by the parameter that is added to the input; None where it is refused."""
    try:
        step = build_step(from_onnx(model), loss="mse", split=True)
    except ConvGradError:
        return None
    machine = quick_step(step)
    loss, _, flat, _ = machine["gradients"](*map(tvm.runtime.tensor, (x, target)), machine["init"]())
    assert step.flat is not None
    found = step.flat.views(flat.numpy()).get("a parameter")
    return float(loss.numpy()), np.zeros(x.shape, "float32") if found is None else found  # None: nothing depends on it


def wrong(model: Any, x: Array, target: Array, loss: float, found: Array) -> str:
    """What is wrong with a gradient, or nothing; where the evaluator has no float64, or a kink, nothing is known."""
    in_float64(model.graph)
    evaluator = ReferenceEvaluator(model)

    def value(data: Array) -> float:
        (result,) = evaluator.run(None, {"the input": data})
        if result.dtype != np.float64:
            raise TypeError(result.dtype)
        return float(np.mean((result - target) ** 2))

    data = x.astype("float64")
    try:
        known = value(data)
    except Exception:  # of every kind: the evaluator lacks operators, or types of them
        return ""
    if not np.isfinite(known):
        return ""
    if not abs(loss - known) <= 1e-4 * max(1.0, known):
        return f"its loss is {loss}, not {known}"
    scale = max(float(np.abs(found).max(where=np.isfinite(found), initial=0.0)), 1e-6)
    for place in np.random.default_rng(1).permutation(x.size)[:PLACES]:
        index = np.unravel_index(place, x.shape)

        def slope(width: float, index: Any = index) -> float:
            above, below = data.copy(), data.copy()
            above[index] += width
            below[index] -= width
            return (value(above) - value(below)) / (2 * width)

        width = 1e-6 * max(1.0, abs(data[index]))
        wanted, nearer = slope(width), slope(width / 4)
        is_smooth = abs(wanted - nearer) <= 1e-5 * max(scale, abs(wanted), 1e-3)
        if is_smooth and not abs(found[index] - wanted) <= 2e-3 * max(scale, abs(wanted)):
            return f"the gradient at {index} is {found[index]}, not {wanted}"
    return ""


def test_gradients_are_central_differences() -> None:
    taken, faults = 0, {}
    for case, number in (found := list(cases())):
        operands, (result, *_) = case.data_sets[0]
        rng = np.random.default_rng(0)
        # Beside the whole numbers that many cases have, where some operators have kinks.
        x = (operands[number] * 0.999 + rng.uniform(-1e-3, 1e-3, operands[number].shape)).astype("float32")
        target = rng.normal(size=result.shape).astype("float32")
        model = with_one_input(case, number, full=True)
        try:
            computed = gradient(model, x, target)
            if computed is None:
                continue
            taken += 1
            fault = wrong(model, x, target, *computed)
        except Exception as error:  # of every kind: all of them are reported
            fault = f"{type(error).__name__}: {error}"
        if fault:
            faults[f"{case.name}, operand {number}"] = fault
    assert faults == {}
    assert taken > 0.4 * len(found) > 5
