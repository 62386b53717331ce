# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own cases for convolution_backward, and its wrong inputs for convolutions.

Each wrong input that concerns the gradients is refused here too, by a sentence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.load import ABSENT, FOLDER, read
from tvm_convgrad import ConvGradError, evaluate
from tvm_convgrad.geometry import SPATIAL

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)

# PyTorch's promise -> what our sentence must speak of. Biases are no operand of the family.
CAUSES = {
    "should be the same": "int64",
    "non-positive stride is not supported": "stride",
    "negative padding is not supported": "negative",
    "dilation should be greater than zero": "dilation",
    "weight should have at least three dimensions": "axes",
    "Expected 3-dimensional input for 3-dimensional weight": "axes",
    "Expected 4-dimensional input for 4-dimensional weight": "axes",
    "expected weight to be at least 3 at dimension 0": "groups=3",
    "non-positive groups is not supported": "groups",
}


def _errors() -> list[dict[str, Any]]:
    if not FOLDER.is_dir():
        return []
    entries = read("pytorch_conv")["error_inputs"]
    # Here "SAME" with strides is TensorFlow's, which PyTorch does not have.
    return [e for e in entries if e["bias"]["dtype"] != "complex128" and "strided" not in e["error_regex"]]


def test_the_cases_are_there() -> None:
    assert len(_errors()) >= 25
    assert {entry["error_regex"] for entry in _errors()} <= set(CAUSES)


@pytest.mark.parametrize("entry", _errors(), ids=lambda entry: f"{entry['ndim']}d {entry['error_regex']}")
def test_wrong_input(entry: dict[str, Any]) -> None:
    rank = entry["ndim"]
    data, weight = (np.ones(entry[name]["shape"], entry[name]["dtype"]) for name in ("x", "w"))
    if data.ndim == rank + 1:  # PyTorch's form without a batch
        data = data[None]
    names = {"stride": "strides", "padding": "padding", "dilation": "dilation", "groups": "groups"}
    attributes = {names[name]: value for name, value in entry["kwargs"].items()}
    grad = np.ones((data.shape[0], weight.shape[0], *data.shape[2:]), data.dtype)
    cause = CAUSES[entry["error_regex"]]
    kernel = (*weight.shape[2:], 1, 1)[: len(SPATIAL[rank])]
    if cause != "axes":  # a weight of the wrong rank is no operand of wgrad
        with pytest.raises(ConvGradError, match=cause):
            evaluate(f"conv{rank}d_backward_weight", grad, data, kernel_size=kernel, **attributes)
    with pytest.raises(ConvGradError, match=cause):
        evaluate(f"conv{rank}d_backward_data", grad, weight, data_shape=data.shape, **attributes)
    with pytest.raises(ConvGradError):
        evaluate(f"conv{rank}d", data, weight, **attributes)
    stride = {"stride" if name == "strides" else name: value for name, value in attributes.items()}
    with pytest.raises(ConvGradError, match=cause):
        evaluate("convolution_backward", grad, data, weight, **stride)


def _samples() -> list[tuple[str, dict[str, Any]]]:
    if not FOLDER.is_dir():
        return []
    samples = read("pytorch_conv")["opinfo_samples"]
    # Uneven padding ("same" of even kernels) PyTorch puts on before the convolution; its convolution_backward has none.
    return [
        (name, entry)
        for name, entries in samples.items()
        for entry in entries
        if all(low == high for low, high in entry.get("pads", ()))
    ]


def test_the_samples_are_there() -> None:
    assert len(_samples()) == 43


@pytest.mark.parametrize(("name", "entry"), _samples())
def test_convolution_backward_of_pytorch_s_samples(name: str, entry: dict[str, Any]) -> None:
    """Output padding beyond the stride, which dilation allows, is among them."""
    torch = pytest.importorskip("torch")
    transposed, rng = "transpose" in name, np.random.default_rng(0)
    shapes = entry["y_shape" if transposed else "dy_shape"], entry["x_shape"], entry["w_shape"]
    grad, data, weight = (rng.integers(-2, 3, shape).astype("float32") for shape in shapes)
    rank = data.ndim - 2
    arguments: dict[str, Any] = {
        "stride": entry["strides"],
        "padding": entry["padding"] if transposed else [low for low, _ in entry["pads"]],
        "dilation": entry["dilations"],
        "transposed": transposed,
        "output_padding": entry.get("output_padding", [0] * rank),
        "groups": entry["groups"],
    }
    bias = [grad.shape[1]] if entry["bias"] else [0]
    mask = (True, True, bool(entry["bias"]))
    found = evaluate("convolution_backward", grad, data, weight, bias_sizes=bias, output_mask=mask, **arguments)
    tensors = (torch.tensor(array.astype("float64")) for array in (grad, data, weight))
    wanted = torch.ops.aten.convolution_backward(*tensors, bias, *arguments.values(), mask)
    for gradient, want in zip(found, wanted, strict=True):
        assert (gradient is None) == (want is None)
        if gradient is not None:
            np.testing.assert_array_equal(gradient, want.numpy())
