# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own cases for convolution_backward, and its wrong inputs for convolutions.

Each wrong input that concerns the gradients is refused here too, by a sentence.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.cases.load import ABSENT, FOLDER, read
from tests.core.test_catalogue import attributes_of
from tvm_convgrad import ConvGradError, evaluate
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import NumberProver, TensorSpec, infer_backward_data
from tvm_convgrad.verify.operators import check_problems

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)

# PyTorch's promise -> what our sentence must speak of. Biases are not operands of the family.
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


STRIDED_SAME = "padding='same' is not supported for strided convolutions"
"""No error here: "SAME" with strides is TensorFlow's, which PyTorch does not have."""


def _entries() -> list[dict[str, Any]]:
    return list(read("pytorch_conv")["error_inputs"]) if FOLDER.is_dir() else []


def _errors() -> list[dict[str, Any]]:
    """All but those of a bias's type, which is not an operand of the gradients, and the one that is none here."""
    return [e for e in _entries() if e["bias"]["dtype"] != "complex128" and e["error_regex"] != STRIDED_SAME]


def test_every_error_is_accounted_for() -> None:
    assert {entry["error_regex"] for entry in _errors()} == set(CAUSES)
    left = [(e["ndim"], e["error_regex"]) for e in _entries() if e not in _errors()]
    assert sorted(left) == [
        *((rank, "should be the same") for rank in (1, 2)),
        (3, STRIDED_SAME),
        (3, "should be the same"),
    ]
    (entry,) = (e for e in _entries() if e["error_regex"] == STRIDED_SAME)
    x, stride = entry["x"]["shape"], entry["kwargs"]["stride"]
    problem = ConvProblem.from_shapes(x, entry["w"]["shape"], strides=stride, padding="SAME", groups=3)
    assert problem.grad_extents == tuple(-(-extent // stride) for extent in x[2:])


def test_what_pytorch_checks_by_relations() -> None:
    """test_nn's shapes of channels last, groups, strided depthwise layers and uneven SAME padding, exact."""
    file = read("pytorch_conv")
    related, nhwc = file["metamorphic"], file["nhwc"]["test_conv_cudnn_nhwc"]
    problems = []
    for entry in nhwc:
        groups, out, kernel = entry["groups"], entry["out_channels"], entry["kernel"]
        x = [*entry["x_shape"][:2], *(min(e, 8) for e in entry["x_shape"][2:])]
        plain = ConvProblem.from_shapes(x, (out, x[1] // groups, kernel, kernel), groups=groups)
        problems.append(plain.with_layouts("NHWC", "OHWI", "NHWC"))
    for name in ("test_Conv2d_naive_groups", "test_Conv2d_backward_depthwise", "test_noncontig_conv_grad"):
        entry = related[name]
        geometry = {
            "strides": entry.get("strides", 1),
            "padding": entry.get("pads", 0),
            "groups": entry.get("groups", 1),
        }
        problems.append(ConvProblem.from_shapes(entry["x_shape"], entry["w_shape"], **geometry))
        assert tuple(entry.get("dy_shape", problems[-1].grad_shape)) == problems[-1].grad_shape
    for entry in related["same_padding_backward"]:
        same = ConvProblem.from_shapes(entry["x_shape"], entry["w_shape"], dilation=entry["dilations"], padding="SAME")
        stated = entry.get("equivalent_pads") or json.loads(entry["equivalent"].rsplit("pads ", 1)[1])
        assert same.padding == tuple(map(tuple, stated))
        problems.append(same)
    assert len(problems) == 11
    assert {verdict.status for verdict in check_problems(problems)} == {"right"}


def test_output_sizes_of_a_transposed_convolution() -> None:
    """test_nn's table of sizes that a transposed convolution may be asked for: those whose remainder a stride hides."""
    entry = read("pytorch_conv")["metamorphic"]["ConvTranspose2d_output_size"]
    conv, (n, into, *extents) = entry["conv"], entry["x_shape"]
    kernel = (into, conv["out_ch"], conv["kernel"], conv["kernel"])
    grad, weight = (TensorSpec(tuple(shape), 4, "float32") for shape in (entry["x_shape"], kernel))
    table = entry["table_h_w_ok"]
    assert sum(accepted for *_, accepted in table) == 9
    for height, width, accepted in table:
        shape = (n, conv["out_ch"], height, width)
        smallest = ConvProblem.from_shapes((n, conv["out_ch"], 18, 18), kernel, strides=conv["stride"])
        assert list(smallest.grad_extents) == extents
        arguments = attributes_of(smallest, "conv2d_backward_data"), grad, weight, shape, NumberProver()
        if accepted:
            assert infer_backward_data(*arguments).shape == shape
        else:
            with pytest.raises(ProblemError, match=r"axis [HW]"):
                infer_backward_data(*arguments)


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
    if cause != "axes":  # a weight of the wrong rank is not an operand of wgrad
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
