# SPDX-License-Identifier: Apache-2.0
"""PyTorch's wrong inputs for convolutions: each that concerns the gradients is refused here too, by a sentence."""

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
    "non-positive stride is not supported": "strides",
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
