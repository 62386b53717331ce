# SPDX-License-Identifier: Apache-2.0
"""Bias, relu, sums in place and bias gradients as parts of one kernel: the same numbers, fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.ir import dtype_of
from relax_ops.lowering import recorded_choices
from relax_ops.passes.fusion import fuse_epilogues
from relax_ops.single_run import quick_machine
from tests.relax.net import Net, module_of
from tests.relax.programs import tensor
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core import reference
from tvm_convgrad.core.geometry import flat_padding
from tvm_convgrad.core.problem import ConvProblem

PROBLEM = ConvProblem.from_descriptor("mb3ic24ih9iw7oc40kh3kw3ph1pw1")
STRIDED = ConvProblem.from_descriptor("mb2ic17ih9iw7oc33kh3kw2sh2sw2ph1pw0")
LAST = PROBLEM.with_layouts("NHWC", "OHWI", "NHWC")
DEPTHWISE = ConvProblem.from_descriptor("g24mb3ic24ih9iw7oc24kh3kw3ph1pw1")
PROBLEMS = {"plain": PROBLEM, "strided": STRIDED, "channels last": LAST, "depthwise": DEPTHWISE}


def calls_of(module: Any) -> list[str]:
    """What `main` calls, in order: operators, and kernels as "kernel" or "kernel in place"."""
    names = []
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, tvm.ir.Call):
                name = str(binding.value.op.name).removeprefix("relax.")
                kernels = {"call_tir": "kernel", "call_tir_inplace": "kernel in place"}
                names.append(kernels.get(name, name.removeprefix("nn.")))
    return names


def check(
    problem: ConvProblem, body: Callable[[Net], list[Any]], calls: list[str], fused: list[tuple[str, ...]]
) -> None:
    module, params = module_of(problem, body)
    with native_target(), recorded_choices() as record:
        after = fuse_epilogues(module)
    assert calls_of(after) == calls
    assert [entry.fused for entry in record] == fused
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, [int(e) for e in param.ty.shape]).astype("float32") for param in params]
    results = []
    for program in (after, module):
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        results.append([value.numpy() for value in quick_machine(program, "native")["main"](*tensors)])
        for given, used in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(used.numpy(), given)  # parameters stay as they were
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(found, wanted)


def relu(net: Net, value: Any) -> Any:
    return net.emit(relax.op.nn.relu(value))


@pytest.mark.parametrize("name", PROBLEMS)
def test_bias_and_relu(name: str) -> None:
    def body(net: Net) -> list[Any]:
        return [relu(net, net.biased(net.forward()))]

    # The reshape of the bias is dead afterwards.
    check(PROBLEMS[name], body, ["kernel"], [("bias", "relu")])


def test_bias_alone_and_relu_alone() -> None:
    check(PROBLEM, lambda net: [net.biased(net.forward())], ["kernel"], [("bias",)])
    check(PROBLEM, lambda net: [relu(net, net.forward())], ["kernel"], [("relu",)])


def test_relu6() -> None:
    """A clip between 0 and 6, and no other one."""

    def clipped(low: float, high: float) -> Callable[[Net], list[Any]]:
        return lambda net: [net.emit(relax.op.clip(net.biased(net.forward()), low, high))]

    check(PROBLEM, clipped(0, 6), ["kernel"], [("bias", "relu6")])
    check(PROBLEM, clipped(0, 5), ["kernel", "clip"], [("bias",)])
    check(PROBLEM, clipped(-6, 6), ["kernel", "clip"], [("bias",)])


def test_what_is_read_elsewhere_is_left_alone() -> None:
    def body(net: Net) -> list[Any]:
        y = net.forward()
        z = net.biased(y)
        return [y, relu(net, z), z]

    check(PROBLEM, body, ["conv2d", "reshape", "add", "relu"], [])


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_data_gradients_are_summed_in_place(name: str) -> None:
    def body(net: Net) -> list[Any]:
        twice = net.emit(relax.op.add(net.grad, net.grad))
        return [net.emit(relax.op.add(net.dgrad(), net.dgrad(twice)))]

    check(PROBLEMS[name], body, ["add", "conv2d_backward_data", "kernel in place"], [("accumulate",)])


def test_two_weight_gradients_are_summed_in_place() -> None:
    def body(net: Net) -> list[Any]:
        twice = net.emit(relax.op.add(net.data, net.data))
        return [net.emit(relax.op.add(net.wgrad(), net.wgrad(data=twice)))]

    check(PROBLEM, body, ["add", "conv2d_backward_weight", "kernel in place"], [("accumulate",)])


@pytest.mark.parametrize("name", PROBLEMS)
def test_residual_sum_bias_and_relu(name: str) -> None:
    def body(net: Net) -> list[Any]:
        branch = net.forward(net.emit(relax.op.multiply(net.data, net.data)))
        return [relu(net, net.emit(relax.op.add(net.biased(net.forward()), branch)))]

    check(PROBLEMS[name], body, ["multiply", "conv2d", "kernel in place"], [("bias", "relu", "accumulate")])


def test_places_that_others_may_read_are_not_written() -> None:
    plain = ["conv2d_backward_data", "add"]
    check(PROBLEM, lambda net: [net.emit(relax.op.add(net.other, net.dgrad()))], plain, [])  # a parameter

    def read_later(net: Net) -> list[Any]:
        acc = net.emit(relax.op.multiply(net.other, net.other))
        return [net.emit(relax.op.add(acc, net.dgrad())), acc]

    check(PROBLEM, read_later, ["multiply", *plain], [])

    def read_by_what_moves(net: Net) -> list[Any]:
        acc = net.emit(relax.op.multiply(net.other, net.other))
        seen = net.emit(relax.op.nn.relu(acc))
        return [net.emit(relax.op.add(acc, net.dgrad())), seen]

    check(PROBLEM, read_by_what_moves, ["multiply", "relu", *plain], [])

    def view(net: Net) -> list[Any]:
        flat = net.emit(relax.op.reshape(net.other, [PROBLEM.data_shape[0], -1]))
        acc = net.emit(relax.op.reshape(flat, PROBLEM.data_shape))
        return [net.emit(relax.op.add(acc, net.dgrad()))]

    check(PROBLEM, view, ["reshape", "reshape", *plain], [])

    def constant(net: Net) -> list[Any]:
        one = relax.const(np.ones(PROBLEM.data_shape, "float32"))
        return [net.emit(relax.op.add(net.emit(relax.op.add(one, one)), net.dgrad()))]

    check(PROBLEM, constant, ["add", *plain], [])


def test_its_own_operand_is_not_written() -> None:
    square = ConvProblem.from_descriptor("mb2ic24ih7oc24kh3ph1")

    def body(net: Net) -> list[Any]:
        grad = net.emit(relax.op.multiply(net.grad, net.grad))
        return [net.emit(relax.op.add(grad, net.dgrad(grad)))]

    check(square, body, ["multiply", "conv2d_backward_data", "add"], [])


@pytest.mark.parametrize("first", ["sum", "wgrad"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_bias_gradient(name: str, first: str) -> None:
    def body(net: Net) -> list[Any]:
        grad = net.emit(relax.op.multiply(net.grad, net.grad))
        if first == "sum":
            db = net.bias_gradient(grad)
            return [net.wgrad(grad), db]
        dw = net.wgrad(grad)
        return [dw, net.bias_gradient(grad)]

    check(PROBLEMS[name], body, ["multiply", "kernel"], [("bias_grad",)])


def _collapsed(net: Net, grad: Any) -> Any:
    """What TVM's own gradient of a broadcast gives: of a bias (1, C, 1, 1), or (C,) if channels are last."""
    letters = net.problem.grad_layout
    last = letters[-1] == "C"
    shape = [e if letter == "C" else 1 for letter, e in zip(letters, net.problem.grad_shape, strict=True)]
    total = net.emit(relax.op.collapse_sum_to(grad, relax.ShapeExpr(shape[-1:] if last else shape)))
    return net.emit(relax.op.reshape(total, [net.problem.out_channels]))


def _in_two_steps(net: Net, grad: Any) -> Any:
    """The gradient of a bias (C, 1, 1): pixels, then samples."""
    pixels = [axis for axis, letter in enumerate(net.problem.grad_layout) if letter not in "NC"]
    total = net.emit(relax.op.sum(grad, pixels, keepdims=True))
    total = net.emit(relax.op.sum(total, [0]))
    return net.emit(relax.op.reshape(total, [net.problem.out_channels]))


@pytest.mark.parametrize("form", [_collapsed, _in_two_steps])
@pytest.mark.parametrize("name", PROBLEMS)
def test_forms_of_the_bias_gradient(name: str, form: Callable[[Net, Any], Any]) -> None:
    def body(net: Net) -> list[Any]:
        grad = net.emit(relax.op.multiply(net.grad, net.grad))
        return [net.wgrad(grad), form(net, grad)]

    check(PROBLEMS[name], body, ["multiply", "kernel"], [("bias_grad",)])


ALL = ("accumulate", "bias_grad", "bias_accumulate")


@pytest.mark.parametrize("name", PROBLEMS)
def test_weight_and_bias_gradients_are_added_in_place(name: str) -> None:
    """Three times the gradients of both: one kernel each, that adds both from the second on."""
    kept = name in ("plain", "channels last")  # in the bias's shape, (1, C, 1, 1), else as vectors

    def bias_gradient(net: Net, grad: Any) -> Any:
        axes = [axis for axis, letter in enumerate(net.problem.grad_layout) if letter != "C"]
        return net.emit(relax.op.sum(grad, axes, keepdims=True)) if kept else net.bias_gradient(grad)

    def body(net: Net) -> list[Any]:
        dw, db = net.wgrad(), bias_gradient(net, net.grad)
        for _ in range(2):
            grad = net.emit(relax.op.multiply(net.grad, net.more))
            if kept:  # as the gradient pass has it: the sum is there before wgrad
                more, dw_more = bias_gradient(net, grad), net.wgrad(grad)
            else:
                dw_more, more = net.wgrad(grad), bias_gradient(net, grad)
            dw, db = net.emit(relax.op.add(dw, dw_more)), net.emit(relax.op.add(db, more))
        return [dw, db]

    one = ["kernel", *["multiply", "kernel in place"] * 2, *["reshape"] * kept]
    check(PROBLEMS[name], body, one, [("bias_grad",), ALL, ALL])


def test_a_bias_gradient_by_itself_beside_a_sum_of_weight_gradients() -> None:
    def body(net: Net) -> list[Any]:
        dw, db = net.wgrad(), net.bias_gradient(net.grad)
        grad = net.emit(relax.op.multiply(net.grad, net.more))
        return [net.emit(relax.op.add(net.wgrad(grad), dw)), db, net.bias_gradient(grad)]

    check(PROBLEM, body, ["kernel", "multiply", "kernel in place"], [("bias_grad",), ALL[:2]])

    def too_early(net: Net) -> list[Any]:
        grad = net.emit(relax.op.multiply(net.grad, net.more))
        db = net.bias_gradient(grad)  # where the other summand is not there yet
        used = net.emit(relax.op.multiply(net.data, net.data))
        dw = net.wgrad(data=used)
        return [db, net.emit(relax.op.add(dw, net.wgrad(grad)))]

    left = ["multiply", "sum", "reshape", "multiply", "conv2d_backward_weight", "kernel in place"]
    check(PROBLEM, too_early, left, [("accumulate",)])

    def read_twice(net: Net) -> list[Any]:
        dw, db = net.wgrad(), net.bias_gradient(net.grad)
        grad = net.emit(relax.op.multiply(net.grad, net.more))
        more = net.bias_gradient(grad)
        return [net.emit(relax.op.add(dw, net.wgrad(grad))), net.emit(relax.op.add(db, more)), db]

    check(PROBLEM, read_twice, ["kernel", "multiply", "kernel in place", "add"], [("bias_grad",), ALL[:2]])


def test_one_of_two_kernels_takes_a_bias_gradient() -> None:
    def body(net: Net) -> list[Any]:
        used = net.emit(relax.op.multiply(net.data, net.data))
        return [net.wgrad(), net.wgrad(data=used), net.bias_gradient(net.grad)]

    check(PROBLEM, body, ["multiply", "kernel", "conv2d_backward_weight"], [("bias_grad",)])


def test_what_is_no_bias_gradient_is_left_alone() -> None:
    def too_few(net: Net) -> list[Any]:
        return [net.wgrad(), net.emit(relax.op.sum(net.grad, [0, 2]))]

    check(PROBLEM, too_few, ["conv2d_backward_weight", "sum"], [])

    def read_between(net: Net) -> list[Any]:
        pixels = net.emit(relax.op.sum(net.grad, [2, 3]))
        return [net.wgrad(), net.emit(relax.op.sum(pixels, [0])), pixels]

    check(PROBLEM, read_between, ["sum", "conv2d_backward_weight", "sum"], [])

    def rounded(net: Net) -> list[Any]:
        short = net.emit(relax.op.astype(net.grad, "float16"))
        return [net.wgrad(), net.emit(relax.op.sum(net.emit(relax.op.astype(short, "float32")), [0, 2, 3]))]

    check(PROBLEM, rounded, ["astype", "conv2d_backward_weight", "astype", "sum"], [])


STOCK = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}
BIASED = [
    "mb2ic3iw9oc16kw3pw1",
    "mb2ic3iw9oc16kw3pw1_lay=NWC:WIO:NWC",
    "mb2ic3ih6oc16kh3ph1",
    "mb2ic3ih6oc16kh3ph1_lay=NHWC:HWIO:NHWC",
    "mb2ic3ih6oc16kh3ph1_dt=f16:f16:f16",
    "mb2ic3id5oc16kd3pd1",
    "mb2ic3id5oc16kd3pd1_lay=NDHWC:DHWIO:NDHWC",
]


@pytest.mark.parametrize("descriptor", BIASED)
def test_the_gradient_pass_gives_one_kernel_for_weight_and_bias(descriptor: str) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    data, weight, more = (tensor(name, *problem.tensors[name]) for name in ("data", "weight", "grad"))
    wide = [problem.out_channels if letter == "C" else 1 for letter in problem.grad_layout]
    bias = tensor("bias", wide[-1:] if problem.grad_layout[-1] == "C" else wide, problem.kernel_dtype)
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            attributes = {"padding": list(flat_padding(problem.padding)), "data_layout": problem.data_layout}
            y = STOCK[problem.rank](data, weight, kernel_layout=problem.kernel_layout, **attributes)
            y = builder.emit(relax.op.add(builder.emit(y), bias))
            loss = builder.emit_output(relax.op.sum(relax.op.multiply(y, more)))
        builder.emit_func_output(loss, [data, weight, bias, more])
    module = relax.transform.Gradient("main", require_grads=[weight, bias])(builder.get())
    with native_target(), recorded_choices() as record:
        fused = fuse_epilogues(module)
    assert ("bias_grad",) in [entry.fused for entry in record]
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(-2, 3, [int(e) for e in p.ty.shape]).astype(dtype_of(p.ty)) for p in (data, weight, bias, more)
    ]
    dw, db = quick_machine(fused, "native")["main_adjoint"](*map(tvm.runtime.tensor, arrays))[1]
    np.testing.assert_array_equal(dw.numpy(), reference.backward_weight(problem, arrays[3], arrays[0]).astype(dw.dtype))
    axes = tuple(axis for axis, letter in enumerate(problem.grad_layout) if letter != "C")
    np.testing.assert_array_equal(db.numpy().ravel(), arrays[3].astype("float64").sum(axes).astype(db.dtype))


def test_a_sum_with_what_elementwise_operations_make_for_it_is_left_to_them() -> None:
    def decayed(net: Net) -> list[Any]:
        acc = net.emit(relax.op.multiply(net.weight, net.weight))
        return [net.emit(relax.op.add(acc, net.wgrad()))]

    check(PROBLEM, decayed, ["multiply", "conv2d_backward_weight", "add"], [])
