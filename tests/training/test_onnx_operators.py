# SPDX-License-Identifier: Apache-2.0
"""Single operators of ONNX: results and gradients against ONNX's reference in float64; a topic is one compiled step."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx.reference import ReferenceEvaluator  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tests.training.onnx_graphs import SHAPE, model  # noqa: E402
from tests.training.onnx_operators import TOPICS  # noqa: E402
from tests.training.onnx_references import REFERENCES  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

UNIT = 2.0**-24
STEP = 1e-5


def inputs():
    return np.random.default_rng(7).normal(size=SHAPE).astype("float32")


@cache
def forward(topic, name):
    """A function in float64: the reference's."""
    opset, functions = TOPICS[topic]
    evaluator = ReferenceEvaluator(
        model({name: REFERENCES.get(name, functions[name])}, opset, "float64", parameters=False)
    )
    return lambda x: evaluator.run(None, {"x": x})[0]


def reference(topic, name, target):
    """The gradient of the summed squares of the errors, by central differences."""
    function = forward(topic, name)
    x = inputs().astype("float64")
    found = np.zeros(SHAPE[1:])
    for place in np.ndindex(*SHAPE[1:]):
        losses = []
        for sign in (1, -1):
            moved = x.copy()
            moved[(slice(None), *place)] += sign * STEP
            losses.append(float(((function(moved) - target) ** 2).sum()))
        found[place] = (losses[0] - losses[1]) / (2 * STEP)
    return found


def step_of(topic):
    """By name of an operator: its results, its target, and the change of its parameter in a step of the whole topic."""
    opset, functions = TOPICS[topic]
    step = build_step(from_onnx(model(functions, opset, "float32")), loss="mse", lr=1.0)
    runner = Runner(step)
    x = inputs()
    results = runner.predict(x)
    widths = [forward(topic, name)(x.astype("float64")).shape[1] for name in functions]
    assert sum(widths) == results.shape[1]
    ends = np.cumsum(widths)
    target = np.random.default_rng(8).normal(size=results.shape).astype("float32")
    runner.step(x, target, lr=float(target.size))
    after = runner.named("parameter")
    return {
        name: (results[:, end - width : end], target[:, end - width : end], -after[f"offsets.{name}"].astype("float64"))
        for name, width, end in zip(functions, widths, ends, strict=True)
    }


def units(found, wanted):
    """The largest difference in units of float32's rounding of the largest value wanted, and of 1."""
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1.0) / UNIT)


@pytest.mark.parametrize("topic", TOPICS)
def test_results_and_gradients_are_those_of_the_standard(topic):
    """To rounding: some hundred terms of a few elementary functions each."""
    wrong = {}
    for name, (results, target, gradient) in step_of(topic).items():
        value = units(results, forward(topic, name)(inputs().astype("float64")))
        slope = units(gradient, reference(topic, name, target))
        if not (value <= 100 and slope <= 400):
            wrong[name] = (value, slope)
    assert wrong == {}


def cubed(g, x):
    """A scatter that multiplies, which has no gradient."""
    return g("ScatterND", x, np.array([[0], [1]]), x, reduction="mul")


REFUSED = {
    "unsupported": (
        lambda g, x: g("Det", x),
        r"unsupported operators: Det \(1x: 'node_Det_t1', net\.py:7: return x\.det\(\)\)",
    ),
    "extents": (
        lambda g, x: g("CastLike", g("NonZero", x), x),
        r"NonZero 'node_NonZero_t1', net\.py:7: return x\.det\(\): the extents of its result depend on values",
    ),
    "gradient": (cubed, r"relax\.scatter_nd \(ScatterND 'node_ScatterND_t2', net\.py:7: .*\) fails: .* 'mul' has no"),
    "missing gradient": (
        lambda g, x: g("ReduceMax", g("RoiAlign", x, np.zeros((2, 4)) + 0.5, np.array([0, 1])), [1]),
        r"no gradient: relax\.vision\.roi_align \(1x: RoiAlign 'node_RoiAlign_t3', net\.py:7",
    ),
    "refusal": (
        lambda g, x: g("LpNormalization", g("CumProd", x, g("ArgMax", g("Flatten", x, axis=0), keepdims=0))),
        r"CumProd \('node_CumProd_t3', net\.py:7: .*\): its axis must be a constant",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_node_and_the_line(name):
    function, sentence = REFUSED[name]
    proto = model({"refused": function}, 26 if name == "refusal" else 18, "float32")
    for node in proto.graph.node:
        frames = (
            '  File "/home/me/net.py", line 7, in forward\n    return x.det()\n  File "/x/torch/y.py", line 1, in z'
        )
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=frames)
    with pytest.raises(ModelError, match=sentence) as caught:
        build_step(from_onnx(proto), loss="mse", lr=1.0)
    assert "\n" not in str(caught.value)
