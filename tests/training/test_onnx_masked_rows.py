# SPDX-License-Identifier: Apache-2.0
"""Attention in ONNX whose rows are masked altogether: its softmax is 0 there, and so is its gradient.

PyTorch's attention is 0 in such rows and gives them the gradient 0; the definition of a softmax gives NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from tests.training.harness import Runner  # noqa: E402
from tests.training.onnx_graphs import SHAPE, Graph, model  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.ir.graph import calls_of, operator_name  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

Array = np.ndarray[Any, Any]

MASK = np.array([[0, -np.inf, 0, 0], [-np.inf] * 4, [0, 0, -np.inf, -np.inf], [0] * 4])
"""What is added to scores: row 1 is masked altogether."""
WEIGHT = np.sin(np.arange(16.0).reshape(4, 4) * 1.7 + 0.3)


def masked(g: Graph, x: str) -> str:
    return g("Add", x, MASK)


def where_nan(g: Graph, x: str) -> str:
    """As PyTorch's exporters write it."""
    weights = g("Softmax", masked(g, x), axis=-1)
    return g("Where", g("IsNaN", weights), 0.0, weights)


def where_not_nan_of_another_axis(g: Graph, x: str) -> str:
    """Along an axis inside, with the branches exchanged and two casts behind the softmax."""
    scores = g("Transpose", masked(g, x), perm=[0, 1, 3, 2])
    weights = g("Cast", g("Cast", g("Softmax", scores, axis=2), to=onnx.TensorProto.DOUBLE), to=onnx.TensorProto.FLOAT)
    kept = g("Not", g("Equal", g("ReduceMax", scores, [2], keepdims=1), -np.inf))
    return g("Transpose", g("Where", kept, weights, 0.0), perm=[0, 1, 3, 2])


def where_row(g: Graph, x: str) -> str:
    """As the definition of Attention writes it: the mask decides."""
    rows = g("Equal", g("ReduceMax", g.constant(MASK), [1], keepdims=1), -np.inf)
    return g("Where", rows, 0.0, g("Softmax", masked(g, x), axis=3))


def where_single(g: Graph, x: str) -> str:
    """Single weights are replaced: the condition is no row's."""
    weights = g("Softmax", x, axis=-1)
    return g("Where", g("Less", weights, 0.2), 0.0, weights)


def attention(g: Graph, x: str) -> str:
    """The operator, whose values are the identity."""
    keys, values = (g.constant(np.broadcast_to(each, SHAPE)) for each in (WEIGHT, np.eye(4)))
    return g("Attention", x, keys, values, MASK == 0)


def softmax(scores: Array) -> Array:
    """The softmax that is 0 in masked rows."""
    powers = np.exp(scores)
    sums = powers.sum(-1, keepdims=True)
    return powers / np.where(sums == 0, 1.0, sums)


CASES = {
    # the nodes, the matrix that x is multiplied by for its scores, and the mask
    "where_nan": (where_nan, np.eye(4), MASK),
    "where_not_nan_of_another_axis": (where_not_nan_of_another_axis, np.eye(4), MASK),
    "where_row": (where_row, np.eye(4), MASK),
    "where_single": (where_single, np.eye(4), 0 * np.eye(4)),
    "attention": (attention, WEIGHT.T / 2, MASK),
}


def test_attention_without_a_mask_selects_nothing() -> None:
    loaded = from_onnx(model({"plain": lambda g, x: g("Attention", x, x, x)}, 24, "float32"))
    called = [operator_name(call) for call in calls_of(loaded.module[loaded.function])]
    assert called.count("relax.nn.softmax") == 1
    assert not {"relax.where", "relax.isnan", "relax.max"} & set(called)


def test_masked_rows_are_zero_and_so_are_their_gradients() -> None:
    proto = model({name: nodes for name, (nodes, *_) in CASES.items()}, 24, "float32")
    runner = Runner(build_step(from_onnx(proto), loss="mse", lr=1.0))
    rng = np.random.default_rng(3)
    x, target = (rng.normal(size=shape).astype("float32") for shape in (SHAPE, (2, 64 * len(CASES))))
    _, found = runner.step(x, target, lr=float(target.size))
    after = runner.named("parameter")
    for number, (name, (_, matrix, mask)) in enumerate(CASES.items()):
        own = slice(number * 64, (number + 1) * 64)
        weights = softmax(x.astype("float64") @ matrix + mask)
        kept = weights >= 0.2 if name == "where_single" else np.ones_like(weights)
        np.testing.assert_allclose(found[:, own], (weights * kept).reshape(2, 64), atol=1e-6, err_msg=name)
        grad = 2 * (weights * kept - target[:, own].reshape(SHAPE)) * kept
        slope = (weights * (grad - (weights * grad).sum(-1, keepdims=True))) @ matrix.T
        np.testing.assert_allclose(-after[f"offsets.{name}"], slope.sum(0), atol=2e-5, err_msg=name)
