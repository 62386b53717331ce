# SPDX-License-Identifier: Apache-2.0
"""Random masks that torch.onnx.export writes in train mode are dropout: seeded in a step, the identity in `predict`."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import numpy_helper  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

KEPT = 0.75
SHAPE = (6, 8, 4, 4)
MASKS = {
    # each from the tensor `like` and the constant `p` to `mask`
    "less": "u = RandomUniformLike(like)  c = Less(u, p)  mask = Cast<to=1>(c)",
    "less_or_equal": "u = RandomUniformLike<dtype=1>(like)  c = LessOrEqual(u, p)  mask = Cast<to=1>(c)",
    "greater": "u = RandomUniformLike(like)  c = Greater(p, u)  mask = Cast<to=1>(c)",
    "floor": "u = RandomUniformLike(like)  c = Add(p, u)  mask = Floor(c)",
    "bernoulli": "e = Shape(like)  q = Expand(p, e)  mask = Bernoulli(q)",
    "cast_like": "u = RandomUniformLike(like)  q = CastLike(p, u)  c = Less(u, q)  mask = CastLike(c, like)",
    "constant": "u = RandomUniformLike(like)  v = Constant<value_float=0.75>()  c = Less(u, v)  mask = Cast<to=1>(c)",
    "fixed": "u = RandomUniform<shape=[6,1,1,1]>()  c = Less(u, p)  mask = Cast<to=1>(c)",
}
REFUSED = {
    "u = RandomNormalLike(like)  c = Less(u, p)  mask = Cast<to=1>(c)": "its numbers are not uniform",
    "u = RandomUniformLike(like)  c = Less(p, u)  mask = Cast<to=1>(c)": "true where its numbers are above",
    "u = RandomUniformLike<high=2.0>(like)  c = Less(u, p)  mask = Cast<to=1>(c)": "not between 0 and 1",
    "u = RandomUniformLike(like)  c = Less(u, like)  mask = Cast<to=1>(c)": "the probability is not a constant",
    "u = RandomUniformLike(like)  mask = Add(u, p)": "not compared with a probability",
    "u = RandomUniformLike(like)  mask = Mul(u, p)": "not compared with a probability",
    "s = Sigmoid(like)  mask = Bernoulli(s)": "not a single constant",
}


def model(mask: str):
    """(x + b) mask / p, with a mask of samples and channels."""
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
    net (float[6,8,4,4] x) => (float[6,8,4,4] y) {{
        shifted = Add(x, b)
        like = ReduceMean<keepdims=1>(shifted, axes)
        {mask}
        scaled = Div(mask, p)
        y = Mul(shifted, scaled)
    }}"""
    proto = onnx.parser.parse_model("\n".join(text.replace("  u =", "\n u =").replace("  c =", "\n c =").split("\n")))
    values = {"b": np.full(SHAPE[1:], 2, "float32"), "p": np.array(KEPT, "float32"), "axes": np.array([2, 3])}
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return proto


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_is_dropout(mask: str) -> None:
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype="float32")
    runner = Runner(build_step(from_onnx(model(mask)), loss="mse", lr=0.0, seed=3))
    seen = [runner.step(x, np.zeros(SHAPE, "float32"), lr=0.0)[1].copy() for _ in range(4)]
    for predictions in seen:
        factor = predictions / (x + 2)
        np.testing.assert_array_equal(factor.max((2, 3)) > 0.5, factor.min((2, 3)) > 0.5)  # whole channels
        kept = factor > 0.5
        np.testing.assert_allclose(factor[kept], 1 / KEPT, rtol=1e-6)
        assert (factor[~kept] == 0).all()
        assert 0 < kept.mean() < 1
    assert not np.array_equal(seen[0], seen[1])
    runner.reset()
    np.testing.assert_array_equal(runner.step(x, np.zeros(SHAPE, "float32"), lr=0.0)[1], seen[0])
    np.testing.assert_array_equal(runner.predict(x), x + 2)


@pytest.mark.parametrize(("mask", "reason"), REFUSED.items())
def test_other_random_numbers_are_refused(mask: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"{reason}.*Make them an input of the model"):
        from_onnx(model(mask))
