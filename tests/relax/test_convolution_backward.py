# SPDX-License-Identifier: Apache-2.0
"""convolution_backward: all gradients of forward and transposed convolutions, of every rank, layout and mask.

Small integers, so that equality is exact. The oracle is float64 numpy: a transposed convolution is dgrad of a problem,
so that its gradients are that problem's forward direction and wgrad.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from tvm import relax

import tvm_convgrad
from relax_ops.ir import AnalyzerProver
from relax_ops.lowering import recorded_choices
from relax_ops.passes.fusion import fuse_epilogues
from relax_ops.single_run import quick_machine
from tests.core.strategies import problems
from tests.relax.programs import tensor
from tvm_convgrad import evaluate
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core import reference
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ConvGradError, DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import hidden_extent
from tvm_convgrad.core.problem import ConvProblem

Array = np.ndarray[Any, Any]
PROBLEM = ConvProblem.from_descriptor("g2mb2ic4ih6iw5oc4kh3kw2sh2sw1ph1pw0_lay=NHWC:HWIO:NHWC")
MASKS = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]


def numbers(problem: ConvProblem) -> dict[str, Array]:
    """Arrays of the problem's grad, data and weight."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(-2, 3, [int(e) for e in shape]).astype(numpy_dtype(dtype))
        for name, (shape, dtype) in problem.tensors.items()
    }


def arguments_of(problem: ConvProblem, transposed: bool) -> dict[str, Any]:
    """The arguments that make `problem` of a call; of a transposed one, the problem whose dgrad it is."""
    made: dict[str, Any] = {
        "stride": problem.strides,
        "padding": problem.padding,
        "dilation": problem.dilation,
        "groups": problem.groups,
        "transposed": transposed,
        "grad_layout": problem.data_layout if transposed else problem.grad_layout,
        "data_layout": problem.grad_layout if transposed else problem.data_layout,
        "kernel_layout": problem.kernel_layout,
    }
    if transposed:
        columns = zip(problem.data_extents, problem.kernel, problem.strides, problem.dilation, strict=True)
        made["output_padding"] = tuple(
            hidden_extent(int(x), k, s, d, *pads) for (x, k, s, d), pads in zip(columns, problem.padding, strict=True)
        )
        made["kernel_layout"] = problem.kernel_layout.translate(str.maketrans("IO", "OI"))
    return made


def operands_of(problem: ConvProblem, transposed: bool) -> list[Array]:
    """grad, data, weight of a call."""
    arrays = numbers(problem)
    return [arrays[name] for name in (("data", "grad", "weight") if transposed else ("grad", "data", "weight"))]


def expected(problem: ConvProblem, transposed: bool) -> list[Array]:
    grad, data, weight = operands_of(problem, transposed)
    layout = problem.data_layout if transposed else problem.grad_layout
    bias = grad.astype("float64").sum(axis=tuple(i for i, letter in enumerate(layout) if letter != "C"))
    if transposed:
        return [reference.forward(problem, grad, weight), reference.backward_weight(problem, data, grad), bias]
    return [reference.backward_data(problem, grad, weight), reference.backward_weight(problem, grad, data), bias]


def check(found: Any, problem: ConvProblem, transposed: bool) -> None:
    _, data, weight = operands_of(problem, transposed)
    for gradient, want, like in zip(found, expected(problem, transposed), (data, weight, weight), strict=True):
        assert gradient.dtype == like.dtype
        np.testing.assert_array_equal(gradient, want.astype(like.dtype), err_msg=problem.descriptor)


def expressions(problem: ConvProblem, transposed: bool, mask: tuple[bool, ...] = (True, True, True)) -> Any:
    """An IRModule that returns the wanted gradients."""
    operands = operands_of(problem, transposed)
    parameters = [tensor(n, a.shape, str(a.dtype)) for n, a in zip(("grad", "data", "weight"), operands, strict=True)]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            made = tvm_convgrad.convolution_backward(*parameters, output_mask=mask, **arguments_of(problem, transposed))
            result = builder.emit_output(relax.Tuple([builder.emit(e) for e in made if e is not None]))
        builder.emit_func_output(result)
    return builder.get()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problems(dtypes=("float32", "float64", "float16")))
@pytest.mark.parametrize("transposed", [False, True])
def test_random_problems(transposed: bool, problem: ConvProblem) -> None:
    if transposed and problem.is_empty:
        return  # floor division hides more than a stride there, which no output padding says
    operands = [tvm.runtime.tensor(array) for array in operands_of(problem, transposed)]
    found = quick_machine(expressions(problem, transposed))["main"](*operands)
    check([gradient.numpy() for gradient in found], problem, transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(transposed: bool, mask: tuple[bool, bool, bool]) -> None:
    found = evaluate(
        "convolution_backward",
        *operands_of(PROBLEM, transposed),
        output_mask=mask,
        bias_sizes=[4] if mask[2] else [0],
        **arguments_of(PROBLEM, transposed),
    )
    assert [gradient is not None for gradient in found] == list(mask)
    for gradient, want in zip(found, expected(PROBLEM, transposed), strict=True):
        if gradient is not None:
            np.testing.assert_array_equal(gradient, want)


@pytest.mark.parametrize("impl", ["kernel", "composition"])
def test_implementations(impl: str) -> None:
    found = evaluate("convolution_backward", *operands_of(PROBLEM, False), impl=impl, **arguments_of(PROBLEM, False))
    check(found, PROBLEM, False)


@pytest.mark.parametrize("descriptor", ["mb0ic3ih5oc4kh3", "mb2ic3ih2oc4kh3oh0", "mb2ic3ih5oc0kh3"])
def test_empty_tensors(descriptor: str) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    check(evaluate("convolution_backward", *operands_of(problem, False)), problem, False)


def test_an_empty_transposed_convolution() -> None:
    problem = ConvProblem.from_descriptor("mb0ic3ih5oc4kh3")
    check(evaluate("convolution_backward", *operands_of(problem, True), transposed=True), problem, True)


def test_numbers_mean_the_same_for_every_axis_and_padding_has_its_forms() -> None:
    problem = ConvProblem.from_descriptor("mb2ic3ih7oc2kh3sh2ph1")
    operands = operands_of(problem, False)
    for padding in (1, [1, 1], (1, 1, 1, 1), ((1, 1), (1, 1)), "SAME"):
        check(evaluate("convolution_backward", *operands, stride=[2], padding=padding), problem, False)


@pytest.mark.parametrize("layouts", [("NCHW", "OIHW"), ("NHWC", "OHWI")])
def test_two_together_cost_no_more_than_one_by_one(layouts: tuple[str, str]) -> None:
    """Weight and bias come from one kernel, which reads grad once; beside data's gradient that makes two."""
    data, kernel = layouts
    problem = ConvProblem.from_descriptor("mb3ic24ih9iw7oc40kh3kw3ph1pw1").with_layouts(data, kernel, data)
    for mask, kernels in (((True, True, True), 2), ((False, True, True), 1), ((True, True, False), 2)):
        with native_target(), recorded_choices() as record:
            module = relax.transform.LegalizeOps()(fuse_epilogues(expressions(problem, False, mask)))
        fused = [entry for entry in record if entry.fused == ("bias_grad",)]
        assert len(fused) == int(mask[2])
        assert len(record) == kernels
        bound = [b.value for block in module["main"].body.blocks for b in block.bindings]
        names = [str(value.op.name) for value in bound if isinstance(value, tvm.ir.Call)]
        assert names == ["relax.call_tir"] * kernels
    found = evaluate(
        "convolution_backward", *operands_of(problem, False), target=native_target(), **arguments_of(problem, False)
    )
    check(found, problem, False)


def test_symbolic_extents() -> None:
    n, h = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("h", "int64")
    grad, data, weight = tensor("grad", [n, 4, h - 2, 3]), tensor("data", [n, 3, h, 5]), tensor("weight", [4, 3, 3, 3])
    for found, likes in (
        (tvm_convgrad.convolution_backward(grad, data, weight, [4]), (data, weight)),
        (tvm_convgrad.convolution_backward(data, grad, weight, [3], transposed=True), (grad, weight)),
    ):
        for gradient, like in zip(found, likes, strict=False):
            shape = relax.BlockBuilder().normalize(gradient).ty.shape.values
            assert all(AnalyzerProver().equal(a, b) for a, b in zip(shape, like.ty.shape.values, strict=True))
    with pytest.raises(ProblemError, match=r"axis H: .* gives h, but grad has h - 2"):
        tvm_convgrad.convolution_backward(grad, data, weight, padding=1)


def test_the_gradient_of_convolution_backward() -> None:
    """Its results are made of the family, so that Gradient takes them: of <dw, v> in grad, conv(data, v)."""
    problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3")
    grad, data, weight = (tensor(name, problem.tensors[name][0]) for name in ("grad", "data", "weight"))
    v = tensor("v", problem.weight_shape)
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            _, dw, _ = tvm_convgrad.convolution_backward(grad, data, weight, output_mask=(False, True, False))
            loss = builder.emit_output(relax.op.sum(relax.op.multiply(builder.emit(dw), v)))
        builder.emit_func_output(loss, [grad, data, weight, v])
    module = relax.transform.Gradient("main", require_grads=[grad, data])(builder.get())
    arrays = numbers(problem)
    upstream = arrays["weight"][::-1].copy()
    operands = [tvm.runtime.tensor(a) for a in (*(arrays[n] for n in ("grad", "data", "weight")), upstream)]
    in_grad, in_data = quick_machine(module)["main_adjoint"](*operands)[1]
    np.testing.assert_array_equal(in_grad.numpy(), reference.forward(problem, arrays["data"], upstream))
    np.testing.assert_array_equal(in_data.numpy(), reference.backward_data(problem, arrays["grad"], upstream))


OK = ((2, 4, 5, 5), (2, 3, 5, 5), (4, 3, 3, 3))
WRONG: list[tuple[tuple[tuple[int, ...], ...], dict[str, Any], str]] = [
    (OK, {}, r"axis H: a convolution of data extent 5 with kernel 3, .* gives 3, but grad has 5"),
    (OK, {"padding": 1, "bias_sizes": [3]}, r"bias_sizes=\(3,\), but grad has 4 channels: give \(4,\)"),
    (OK, {"padding": 1, "output_mask": (True, True)}, "output_mask=.* has 2 entries"),
    (OK, {"padding": 1, "output_padding": 1}, "output_padding=.* belongs to transposed"),
    (OK, {"padding": -1}, "negative"),
    (OK, {"padding": 1, "stride": 0}, "stride=.* at least 1"),
    (OK, {"padding": 1, "dilation": (1, 0)}, "axis W is 0; it must be at least 1"),
    (OK, {"padding": 1, "groups": 3}, "4 output channels are not divisible by groups=3"),
    (OK, {"padding": 1, "groups": 0}, "groups=0"),
    (OK, {"padding": 1, "kernel_layout": "HWOI"}, "grad has 4 channels, but the weight's O axis is 3"),
    (OK, {"padding": 1, "grad_layout": "NHW"}, "grad_layout='NHW' is not a permutation"),
    (((3, 4, 5, 5), *OK[1:]), {"padding": 1}, "grad's batch is 3, the data's is 2"),
    (((4, 5, 5), *OK[1:]), {"padding": 1}, "grad has 3, data has 4, weight has 4; add the missing axes"),
    (
        ((2, 3, 5, 5), (2, 3, 5, 5), (3, 3, 3, 3)),
        {"transposed": True, "padding": "SAME"},
        "no meaning for a transposed",
    ),
    (
        ((2, 3, 6, 6), (2, 3, 5, 5), (3, 3, 3, 3)),
        {"transposed": True, "padding": 1, "output_padding": 1},
        "smaller than",
    ),
    (
        ((2, 3, 7, 8), (2, 3, 5, 5), (3, 3, 3, 3)),
        {"transposed": True},
        "axis W: a transposed .* gives 7, but grad has 8",
    ),
    (
        ((2, 3, 7, 7), (2, 4, 5, 5), (3, 3, 3, 3)),
        {"transposed": True},
        "data has 4 channels, but the weight's I axis is 3",
    ),
    (OK, {"padding": 1, "strides": 1}, "strides unknown; it takes bias_sizes, stride"),
]


@pytest.mark.parametrize(("shapes", "arguments", "part"), WRONG, ids=[part for _, _, part in WRONG])
def test_wrong_calls(shapes: Any, arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ProblemError, match=part) as caught:
        evaluate("convolution_backward", *(np.ones(shape, "float32") for shape in shapes), **arguments)
    assert str(caught.value).startswith("convolution_backward: ")


def test_wrong_operands() -> None:
    grad, data, weight = (np.ones(shape, "float32") for shape in OK)
    with pytest.raises(ProblemError, match="2 arrays were given; it takes three"):
        evaluate("convolution_backward", grad, data)
    with pytest.raises(DTypeError, match="data has dtype 'int64'"):
        evaluate("convolution_backward", grad, data.astype("int64"), weight, padding=1)
    with pytest.raises(UnsupportedError, match=r"not ndarray; for numpy arrays there is tvm_convgrad\.evaluate"):
        tvm_convgrad.convolution_backward(grad, data, weight, padding=1)
    variables = [tensor(name, shape) for name, shape in zip(("grad", "data", "weight"), OK, strict=True)]
    with pytest.raises(UnsupportedError, match="shape or dtype of grad is not known; emit the expression first"):
        tvm_convgrad.convolution_backward(relax.op.nn.relu(variables[0]), *variables[1:], padding=1)
    with pytest.raises(ConvGradError, match="no implementation 'fast'"):
        evaluate("convolution_backward", grad, data, weight, padding=1, impl="fast")
