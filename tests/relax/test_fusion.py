# SPDX-License-Identifier: Apache-2.0
"""Bias, relu, sums in place and bias gradients as parts of one kernel: the same numbers, fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.fusion import fuse_epilogues
from relax_ops.lowering import recorded_choices
from tests.relax.net import Net, module_of
from tvm_convgrad.bulk import native_target, quick_machine
from tvm_convgrad.problem import ConvProblem

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

    check(PROBLEMS[name], body, ["multiply", "kernel", "reshape", "reshape"], [("bias_grad",)])


def test_a_sum_with_what_elementwise_operations_make_for_it_is_left_to_them() -> None:
    def decayed(net: Net) -> list[Any]:
        acc = net.emit(relax.op.multiply(net.weight, net.weight))
        return [net.emit(relax.op.add(acc, net.wgrad()))]

    check(PROBLEM, decayed, ["multiply", "conv2d_backward_weight", "add"], [])
