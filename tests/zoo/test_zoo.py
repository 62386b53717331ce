# SPDX-License-Identifier: Apache-2.0
"""A slice of the zoo (benchmarks/zoo): models of other libraries, each exported, built, and beside PyTorch.

Those of this project ("own") are compiled as users compile, the others without LLVM's optimiser, which would be most of
the time: what they test is the import, the gradients and the choice of kernels.
"""

from __future__ import annotations

import json

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
    from tvm.target import Target

    from benchmarks.zoo.architectures import named
    from benchmarks.zoo.case import REWRITTEN, RIGHT, run_case
    from tvm_convgrad.codegen.hardware import native_target

    target = native_target()
    if not name.startswith("own:"):
        target = Target({**json.loads(str(target)), "opt-level": 0})
    outcome = run_case(named(name), form, "compare", 2, 0.0, target)
    folded = (name, form) in FOLDED
    assert outcome.result == (REWRITTEN if folded else RIGHT), outcome.reason
    assert ("parameters are in the module or in the step only" in outcome.reason) == folded
