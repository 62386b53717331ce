# SPDX-License-Identifier: Apache-2.0
"""Gradients of single operators that torch.export writes, against PyTorch in float64; a topic is one compiled step."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from tests.training.harness import Runner  # noqa: E402
from tests.training.torch_operators import TOPICS  # noqa: E402
from tests.training.torch_topics import SHAPE, Topic  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

MEANS = {"group_norm_far_from_zero": 1000, "instance_norm_far_from_zero": 3000}
"""Of operators that normalise data far from zero: the mean, up to its sign."""

UNIT = 2.0**-24


@cache
def gradients(topic):
    """By name of an operator: the gradient of its parameter in a step of the whole topic, and PyTorch's in float64.

    The loss is a sum of squares, and the learning rate 1, so that a parameter's change is its gradient.
    """
    torch.manual_seed(0)
    network = Topic(TOPICS[topic])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    reference = copy.deepcopy(network).double()
    torch.set_default_dtype(torch.float64)
    try:
        outputs = reference(x.double())
        target = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        ((outputs - target) ** 2).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    step = build_step(from_exported_program(torch.export.export(network, (x,))), loss="mse", lr=1.0)
    runner = Runner(step)
    before = runner.named("parameter")
    runner.step(x.numpy(), target.float().numpy(), lr=float(target.numel()))
    after = runner.named("parameter")
    wanted = {name: value.grad.numpy() for name, value in reference.named_parameters()}
    return {name: (before[name].astype("float64") - after[name], value) for name, value in wanted.items()}


@pytest.mark.parametrize(("topic", "name"), [(topic, name) for topic, names in TOPICS.items() for name in names])
def test_gradient_is_that_of_pytorch(topic, name):
    """To rounding: some hundred terms of a few elementary functions each.

    Of data far from zero the mean is rounded, by UNIT * mean at most, which is that much of a deviation of 4 in result
    and gradient.
    """
    found, wanted = gradients(topic)[f"offsets.{name}"]
    scale = max(float(np.abs(wanted).max()), 1.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=(400 + 2 * MEANS.get(name, 0) / 4) * UNIT * scale)
