# SPDX-License-Identifier: Apache-2.0
"""relax.transform.Gradient applied two and three times: against float64 numpy, symmetry, and PyTorch in float64.

T(x, w, dy) = <conv(x, w), dy> is trilinear, so that its derivatives in directions u and v are sums of T with places
exchanged, and the gradient of the second one, the third application, is, bit for bit on small integers,

    in x:  dgrad(dy=v, w=u) + dgrad(dy=u, w=v)    in w:  wgrad(v, u) + wgrad(u, v)    in dy:  conv(u, v) + conv(v, u)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from tvm import relax

from relax_ops.program import direction_call
from relax_ops.single_run import quick_machine
from tests.cases.load import ABSENT, FOLDER, cases, small_problems
from tests.core.strategies import problems
from tests.relax.programs import tensor
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import FORWARD
from tvm_convgrad.core.problem import ConvProblem

Array = np.ndarray[Any, Any]
Loss = Callable[[Any, Any, Any, Any], Any]
TENSORS = ("data", "weight", "grad")

PROBLEMS = [
    "mb2ic2ih5oc3kh3ph2",
    "g2mb2ic4ih6iw5oc4kh3kw2sh2sw1ph1pw0dh1dw0",
    "mb2ic3iw9oc2kw3sw2dw1pw1",
    "g3mb1ic3id4oc6kd2sd2",
]


def derived(problem: ConvProblem, loss: Loss, order: int, name: str = "main") -> Any:
    """An IRModule with `name`: the gradients in data, weight and grad of the (order - 1)-th derivative of `loss`.

    `loss(builder, data, weight, grad)` gives a scalar. The derivatives are in the directions of the further parameters,
    three for each; Gradient is applied `order` times.
    """
    parameters = [tensor(n, *problem.tensors[n]) for n in TENSORS]
    directions: list[Any] = []
    builder = relax.BlockBuilder()
    with builder.function(name):
        with builder.dataflow():
            value = builder.emit_output(loss(builder, *parameters))
        builder.emit_func_output(value, parameters)
    module = builder.get()
    for step in range(order):
        module = relax.transform.Gradient(name, require_grads=list(module[name].params)[:3])(module)
        adjoint = module[f"{name}_adjoint"]
        if step == order - 1:
            return tvm.IRModule({name: adjoint.with_attr("global_symbol", name)})
        directions = [tensor(f"{n}{step}", *problem.tensors[n]) for n in TENSORS]
        builder = relax.BlockBuilder()
        with builder.function(name):
            with builder.dataflow():
                for binding in adjoint.body.blocks[0].bindings:
                    builder.emit_normalized(binding)
                gradients = adjoint.body.body.fields[1].fields
                value = None
                for gradient, direction in zip(gradients, directions, strict=True):
                    term = builder.emit(relax.op.sum(relax.op.multiply(gradient, direction)))
                    value = term if value is None else builder.emit(relax.op.add(value, term))
                value = builder.emit_output(value)
            builder.emit_func_output(value, [*adjoint.params, *directions])
        module = builder.get()
    raise AssertionError("order is at least 1")


def trilinear(problem: ConvProblem) -> Loss:
    def loss(builder: Any, data: Any, weight: Any, grad: Any) -> Any:
        result = builder.emit(direction_call(builder, FORWARD, problem, data, weight))
        return relax.op.sum(relax.op.multiply(result, grad))

    return loss


def numbers(problem: ConvProblem, order: int, dtype: str | None = None) -> list[Array]:
    """The parameters of `derived`."""
    rng = np.random.default_rng(order)
    return [
        rng.integers(-2, 3, [int(e) for e in problem.tensors[n][0]]).astype(dtype or problem.tensors[n][1])
        for _ in range(order)
        for n in TENSORS
    ]


def third(problem: ConvProblem, arrays: Sequence[Array]) -> list[Array]:
    """The gradients of the second derivative of the trilinear form."""
    u, v = (dict(zip(TENSORS, arrays[start : start + 3], strict=True)) for start in (3, 6))
    return [
        sum(reference.backward_data(problem, a["grad"], b["weight"]) for a, b in ((u, v), (v, u))),
        sum(reference.backward_weight(problem, a["grad"], b["data"]) for a, b in ((u, v), (v, u))),
        sum(reference.forward(problem, a["data"], b["weight"]) for a, b in ((u, v), (v, u))),
    ]


def check_third(drawn: Sequence[ConvProblem]) -> None:
    module = tvm.IRModule()
    for i, problem in enumerate(drawn):
        module.update(derived(problem, trilinear(problem), 3, f"f{i}"))
    machine = quick_machine(module)
    for i, problem in enumerate(drawn):
        arrays = numbers(problem, 3)
        found = machine[f"f{i}"](*(tvm.runtime.tensor(array) for array in arrays))[1]
        for gradient, want in zip(found, third(problem, arrays), strict=True):
            np.testing.assert_array_equal(gradient.numpy(), want, err_msg=problem.descriptor)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(problems(dtypes=("float32", "float64")))
def test_the_third_gradient_of_random_problems(problem: ConvProblem) -> None:
    check_third([problem.with_dtypes(*[problem.data_dtype] * 3)])


@pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)
def test_the_third_gradient_of_pytorch_s_and_jax_s_cases() -> None:
    """Of PyTorch's double-backward cases and JAX's grids (of order 2 there), some without elements; each so many-th."""
    pytorch = [p for place, p in cases("pytorch_conv") if place.startswith("/double_backward/")][::3]
    jax = small_problems("jax_conv_grad_grids")[::60]
    assert (len(pytorch), len(jax)) == (4, 8)
    check_third([p for p in (*pytorch, *jax) if isinstance(p, ConvProblem)])


@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_second_derivatives_are_symmetric(descriptor: str) -> None:
    """<H u, v> = <u, H v> for the Hessian H of a form that is quadratic in the result."""
    problem = ConvProblem.from_descriptor(descriptor).with_dtypes(*["float64"] * 3)
    machine = quick_machine(derived(problem, quadratic(problem), 2))
    point, u, v = (numbers(problem, 3)[start : start + 3] for start in (0, 3, 6))
    products = [
        [g.numpy() for g in machine["main"](*(tvm.runtime.tensor(a) for a in (*point, *direction)))[1]]
        for direction in (u, v)
    ]
    pairs = [sum(float((a * b).sum()) for a, b in zip(*ab, strict=True)) for ab in ((products[0], v), (u, products[1]))]
    assert pairs[0] == pairs[1] != 0


def quadratic(problem: ConvProblem) -> Loss:
    def loss(builder: Any, data: Any, weight: Any, grad: Any) -> Any:
        y = builder.emit(direction_call(builder, FORWARD, problem, data, weight))
        return relax.op.sum(relax.op.multiply(builder.emit(relax.op.multiply(y, y)), grad))

    return loss


def transposed(problem: ConvProblem) -> Loss:
    """As `quadratic`, of the stock transposed convolution from the problem's grad to its data."""

    def loss(builder: Any, data: Any, weight: Any, grad: Any) -> Any:
        operator = (relax.op.nn.conv1d_transpose, relax.op.nn.conv2d_transpose, relax.op.nn.conv3d_transpose)
        y = builder.emit(
            operator[problem.rank - 1](
                grad,
                weight,
                strides=list(problem.strides),
                padding=[low for low, _ in problem.padding] * 2,
                dilation=list(problem.dilation),
                groups=problem.groups,
            )
        )
        return relax.op.sum(relax.op.multiply(builder.emit(relax.op.multiply(y, y)), data))

    return loss


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_equals_pytorch_in_float64(descriptor: str, order: int) -> None:
    torch = pytest.importorskip("torch")
    problem = ConvProblem.from_descriptor(descriptor).with_dtypes(*["float64"] * 3)
    functions = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
    function = functions[problem.rank - 1]
    padding = [low for low, _ in problem.padding]

    def loss(x: Any, w: Any, dy: Any) -> Any:
        y = function(x, w, None, problem.strides, padding, problem.dilation, problem.groups)
        return (y * y * dy).sum()

    _against_torch(torch, problem, quadratic(problem), loss, order)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("descriptor", ["mb2ic2ih5oc3kh3sh2ph1", "mb2ic3iw7oc2kw3dw1pw1"])
def test_transposed_convolutions_equal_pytorch_in_float64(descriptor: str, order: int) -> None:
    torch = pytest.importorskip("torch")
    problem = ConvProblem.from_descriptor(descriptor).with_dtypes(*["float64"] * 3)
    functions = (torch.nn.functional.conv_transpose1d, torch.nn.functional.conv_transpose2d)
    function = functions[problem.rank - 1]
    padding = [low for low, _ in problem.padding]

    def loss(x: Any, w: Any, dy: Any) -> Any:
        y = function(dy, w, None, problem.strides, padding, 0, problem.groups, problem.dilation)
        return (y * y * x).sum()

    _against_torch(torch, problem, transposed(problem), loss, order)


def _against_torch(torch: Any, problem: ConvProblem, ours: Loss, theirs: Any, order: int) -> None:
    arrays = numbers(problem, order)
    point = [torch.tensor(array, requires_grad=True) for array in arrays[:3]]
    value = theirs(*point)
    for step in range(order - 1):
        gradients = torch.autograd.grad(value, point, create_graph=True)
        directions = map(torch.tensor, arrays[3 * step + 3 : 3 * step + 6])
        value = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True))
    wanted = torch.autograd.grad(value, point)
    machine = quick_machine(derived(problem, ours, order))
    found = machine["main"](*(tvm.runtime.tensor(array) for array in arrays))[1]
    for gradient, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(gradient.numpy(), want.numpy())
