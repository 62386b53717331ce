# SPDX-License-Identifier: Apache-2.0
"""A slice of the zoo (benchmarks/zoo): models of other libraries, each exported, built, and beside PyTorch."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.zoo

CASES = {
    "own:drop_flavours": "train",
    "own:unet3d": "train",
    "own:crnn": "onnx",
    "own:diffusion_unet": "eval",
    "smp:PSPNet": "eval",
    "timm:test_convnext": "train",
    "timm:test_efficientnet": "train",
    "timm:test_nfnet": "eval",
    "timm:starnet_s050": "train",
    "torchvision:mobilenet_v2": "onnx",
    "torchvision:shufflenet_v2_x0_5": "train",
    "torchvision:squeezenet1_1": "onnx",
}

FOLDED = {("own:crnn", "onnx"), ("torchvision:mobilenet_v2", "onnx")}
"""Files in which PyTorch's exporter has folded batch norms into convolutions, of which the import warns."""


@pytest.mark.parametrize(("name", "form"), CASES.items())
def test_a_step_is_that_of_pytorch(name: str, form: str) -> None:
    from benchmarks.zoo.architectures import named
    from benchmarks.zoo.case import REWRITTEN, RIGHT, run_case

    outcome = run_case(named(name), form, "compare", 2, 0.0)
    folded = (name, form) in FOLDED
    assert outcome.result == (REWRITTEN if folded else RIGHT), outcome.reason
    assert ("parameters are in the module or in the step only" in outcome.reason) == folded
