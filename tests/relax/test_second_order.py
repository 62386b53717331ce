# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients: relax.transform.Gradient applied to its own result, against the table and PyTorch.

Of the loss L = <dx, u> + <dw, v>, where dx and dw are the gradients of <conv(x, w), dy>, the gradients are again
convolutions of the family (PyTorch's double backward):

    in dy: conv(u, w) + conv(x, v)        in x: dgrad(dy, v)        in w: wgrad(dy, u)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.program import direction_call
from relax_ops.single_run import quick_machine
from tests.cases.load import ABSENT, FOLDER, cases
from tests.relax.programs import tensor
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.geometry import flat_padding
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.operators import random_problems

Array = np.ndarray[Any, Any]

PROBLEMS = [
    "mb2ic2ih5oc3kh3ph2",
    "mb1ic2ih5oc3kh3ph2dh1",
    "g2mb2ic4ih6iw5oc4kh3kw2sh2sw1ph1pw0",
    "mb2ic3iw9oc2kw3sw2dw1pw1",
    "g3mb1ic3id4oc6kd2sd2",
    "mb2ic2ih7oc3kh3sh2ph1_lay=NHWC:HWIO:NHWC",
]


def twice(problem: ConvProblem) -> Any:
    """The second-order adjoint: its gradients are in x, w and dy, for parameters x, w, dy, u, v."""
    x, w, dy = (tensor(name, *problem.tensors[name]) for name in ("data", "weight", "grad"))
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            y = builder.emit(_stock(problem, x, w))
            loss = builder.emit_output(relax.op.sum(relax.op.multiply(y, dy)))
        builder.emit_func_output(loss, [x, w, dy])
    first = relax.transform.Gradient("main", require_grads=[x, w])(builder.get())["main_adjoint"]
    u, v = tensor("u", *problem.tensors["data"]), tensor("v", *problem.tensors["weight"])
    again = relax.BlockBuilder()
    with again.function("main"):
        with again.dataflow():
            for binding in first.body.blocks[0].bindings:
                again.emit_normalized(binding)
            dx, dw = first.body.body.fields[1].fields
            terms = [again.emit(relax.op.sum(relax.op.multiply(a, b))) for a, b in ((dx, u), (dw, v))]
            loss = again.emit_output(relax.op.add(*terms))
        again.emit_func_output(loss, [*first.params, u, v])
    return relax.transform.Gradient("main", require_grads=list(first.params))(again.get())


def _stock(problem: ConvProblem, x: Any, w: Any) -> Any:
    function = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[problem.rank - 1]
    return function(
        x,
        w,
        strides=list(problem.strides),
        padding=list(flat_padding(problem.padding)),
        dilation=list(problem.dilation),
        groups=problem.groups,
        data_layout=problem.data_layout,
        kernel_layout=problem.kernel_layout,
    )


def numbers(problem: ConvProblem) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    shapes = {name: shape for name, (shape, _) in problem.tensors.items()}
    shapes.update(u=problem.data_shape, v=problem.weight_shape)
    return {name: rng.integers(-2, 3, [int(e) for e in shape]).astype("float32") for name, shape in shapes.items()}


def second_gradients(problem: ConvProblem, arrays: dict[str, Array]) -> list[Array]:
    machine = quick_machine(twice(problem))
    order = ("data", "weight", "grad", "u", "v")
    return [g.numpy() for g in machine["main_adjoint"](*(tvm.runtime.tensor(arrays[n]) for n in order))[1]]


def expected(problem: ConvProblem, arrays: dict[str, Array]) -> list[Array]:
    x, w, dy, u, v = (arrays[name] for name in ("data", "weight", "grad", "u", "v"))
    return [
        reference.backward_data(problem, dy, v),
        reference.backward_weight(problem, dy, u),
        reference.forward(problem, u, w) + reference.forward(problem, x, v),
    ]


@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_gradient_of_gradient(descriptor: str) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    arrays = numbers(problem)
    for found, want in zip(second_gradients(problem, arrays), expected(problem, arrays), strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("descriptor", PROBLEMS[:5])
def test_equals_pytorch_s_double_backward(descriptor: str) -> None:
    _against_torch(ConvProblem.from_descriptor(descriptor))


@pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)
def test_pytorch_s_own_cases() -> None:
    pytest.importorskip("torch")
    problems = [p for place, p in cases("pytorch_conv") if place.startswith("/double_backward/")]
    assert len(problems) == 11
    for problem in problems:
        assert isinstance(problem, ConvProblem)
        _against_torch(problem)


def _against_torch(problem: ConvProblem) -> None:
    torch = pytest.importorskip("torch")
    arrays = numbers(problem)
    x, w, dy = (torch.tensor(arrays[n].astype("float64"), requires_grad=True) for n in ("data", "weight", "grad"))
    u, v = (torch.tensor(arrays[n].astype("float64")) for n in "uv")
    function = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[problem.rank - 1]
    y = function(
        x,
        w,
        stride=problem.strides,
        padding=[low for low, _ in problem.padding],
        dilation=problem.dilation,
        groups=problem.groups,
    )
    dx, dw = torch.autograd.grad((y * dy).sum(), (x, w), create_graph=True)
    wanted = torch.autograd.grad((dx * u).sum() + (dw * v).sum(), (x, w, dy))
    for found, want in zip(second_gradients(problem, arrays), wanted, strict=True):
        np.testing.assert_array_equal(found, want.numpy())


@pytest.mark.parametrize("direction", [name for name in DIRECTIONS if name != "forward"])
def test_each_operator_s_own_gradient_on_random_problems(direction: str) -> None:
    """The table of directions, one at a time, with every layout, group, dilation and mixed element types."""
    drawn = [p for p in random_problems(200, 41) if "bfloat16" not in (p.data_dtype, p.kernel_dtype, p.grad_dtype)]
    mod = tvm.IRModule()
    for i, problem in enumerate(drawn[:12]):
        builder = relax.BlockBuilder()
        operands = [tensor(name, *problem.tensors[name]) for name in DIRECTIONS[direction].operands]
        upstream = tensor("upstream", *problem.tensors[DIRECTIONS[direction].result])
        with builder.function(f"f{i}"):
            with builder.dataflow():
                result = builder.emit(direction_call(builder, DIRECTIONS[direction], problem, *operands))
                loss = builder.emit_output(relax.op.sum(relax.op.multiply(result, upstream)))
            builder.emit_func_output(loss, [*operands, upstream])
        made = relax.transform.Gradient(f"f{i}", require_grads=operands)(builder.get())
        mod[f"f{i}_adjoint"] = made[f"f{i}_adjoint"]
    machine = quick_machine(mod)
    rng = np.random.default_rng(2)
    for i, problem in enumerate(drawn[:12]):
        arrays = {
            name: rng.integers(-1, 2, [int(e) for e in shape]).astype(dtype)
            for name, (shape, dtype) in problem.tensors.items()
        }
        order = (*DIRECTIONS[direction].operands, DIRECTIONS[direction].result)
        gradients = machine[f"f{i}_adjoint"](*(tvm.runtime.tensor(arrays[name]) for name in order))[1]
        for operand, found in zip(DIRECTIONS[direction].operands, gradients, strict=True):
            rest = [arrays[name] for name in DIRECTIONS[_direction_of(operand)].operands]
            want = reference.DIRECTIONS[_direction_of(operand)](problem, *rest).astype(arrays[operand].dtype)
            assert str(found.dtype) == problem.tensors[operand][1]
            np.testing.assert_array_equal(found.numpy(), want, err_msg=f"{operand} {problem}")


def _direction_of(result: str) -> str:
    return next(name for name, direction in DIRECTIONS.items() if direction.result == result)
