# SPDX-License-Identifier: Apache-2.0
"""tvm_convgrad.batching.vmap_rule on Relax, compiled: every operator and combination of batched operands is a loop."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relax_ops.backward import bias_gradient
from tests.batching.programs import Vmapped, batched, calls_in, ints, looped, module_of, run
from tests.core.strategies import problems
from tests.threads import run_with_threads
from tvm_convgrad.batching import vmap_rule
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import DIRECTIONS, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import evaluate
from tvm_convgrad.training.autodiff.differentiate import emit_with_gradients

DIRECTION_OF: dict[str, Any] = {
    "forward": reference.forward,
    "backward_weight": reference.backward_weight,
    "backward_data": reference.backward_data,
}
PAIRS = [(0, None), (None, 0), (0, 0), (-1, -1), (2, 1)]
CONVOLUTIONS = ("relax.nn.conv", "relax.matmul")


def attributes_of(problem: ConvProblem, direction: str) -> dict[str, Any]:
    """The attributes of a call to a direction of the problem."""
    own = {"backward_weight": {"kernel_size": problem.kernel}, "backward_data": {"data_shape": problem.data_shape}}
    names = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "grad_layout")
    result_dtype = problem.tensors[DIRECTIONS[direction].result][1]
    return {name: getattr(problem, name) for name in names} | own.get(direction, {}) | {"out_dtype": result_dtype}


def case_of(
    direction: str, problem: ConvProblem, levels: list[tuple[Any, ...]], size: int = 3, seed: int = 0
) -> Vmapped:
    """A case with operands of small integers; `levels` outermost first, their sizes `size`, `size - 1`, …"""
    rule: Any = OpEntry(DIRECTIONS[direction], problem.rank).name
    rng = np.random.default_rng(seed)
    shapes = [list(problem.tensors[name][0]) for name in DIRECTIONS[direction].operands]
    for depth, dims in reversed(list(enumerate(levels))):
        shapes = [batched(shape, size - depth, dim) for shape, dim in zip(shapes, dims, strict=True)]
        rule = vmap_rule(rule, dims)
    types = [problem.tensors[name][1] for name in DIRECTIONS[direction].operands]
    operands = [ints(rng, shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    return Vmapped(rule, operands, attributes_of(problem, direction))


def check(cases: list[tuple[str, ConvProblem, Vmapped]]) -> None:
    """Each case equals the loop over float64 references, rounded once."""
    for (direction, problem, case), found in zip(cases, run([case for *_, case in cases]), strict=True):
        operands = [array.astype("float64") for array in case.operands]
        want = looped(lambda *a, f=direction, p=problem: DIRECTION_OF[f](p, *a), case.rule.levels, operands)
        np.testing.assert_array_equal(found, want.astype(found.dtype), err_msg=f"{case.rule} {problem.descriptor}")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_operator_and_combination(direction: str, rank: int) -> None:
    cases = []
    for groups, dims in product((1, 2, 4), PAIRS):
        problem = ConvProblem.from_shapes(
            (2, 4, 5, 6, 4)[: rank + 2],
            (8, 4 // groups, 3, 2, 2)[: rank + 2],
            strides=(2, 1, 2)[:rank],
            padding=((1, 0),) * rank,
            dilation=(1, 2, 1)[:rank],
            groups=groups,
        )
        cases.append((direction, problem, case_of(direction, problem, [dims])))
    check(cases)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nested(direction: str) -> None:
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 2, 3, 2), strides=2, padding=1, groups=2)
    choices = [(0, None), (None, -1), (1, 0)]
    check([(direction, problem, case_of(direction, problem, list(levels))) for levels in product(choices, repeat=2)])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_channels_last(direction: str) -> None:
    layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO", "grad_layout": "NHWC"}
    problem = ConvProblem.from_shapes((2, 5, 6, 4), (3, 2, 2, 6), padding="SAME", groups=2, **layouts)
    check([(direction, problem, case_of(direction, problem, [dims])) for dims in PAIRS])


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_problems(data: Any) -> None:
    cases = []
    for _ in range(8):
        problem, direction = data.draw(problems()), data.draw(st.sampled_from(list(DIRECTIONS)))
        dims = data.draw(st.sampled_from(PAIRS))
        cases.append((direction, problem, case_of(direction, problem, [dims], size=data.draw(st.integers(1, 3)))))
    check(cases)


def test_one_convolution_whatever_the_batch() -> None:
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 2, 3, 2), groups=2)
    cases = [case_of(direction, problem, [dims], size=7) for direction, dims in product(DIRECTIONS, PAIRS)]
    module = module_of(cases)
    for number, case in enumerate(cases):
        names = [name for name in calls_in(module, f"case_{number}") if name.startswith(CONVOLUTIONS)]
        assert names == [f"relax.nn.{case.rule.op}"]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed(rank: int) -> None:
    """conv_transpose is dgrad with its operands' roles renamed; output padding, groups, and a weight in IO order."""
    cases, want = [], []
    rng = np.random.default_rng(rank)
    for groups, dims in product((1, 2), PAIRS):
        strides, extra = (2, 3, 1)[:rank], (1, 2, 0)[:rank]
        data, weight = (2, 4, *(3, 4, 3)[:rank]), (4, 6 // groups, *(3, 2, 2)[:rank])
        operands = [ints(rng, batched(shape, 3, dim)) for shape, dim in zip((data, weight), dims, strict=True)]
        attributes = {"strides": strides, "padding": 1, "output_padding": extra, "groups": groups}
        cases.append(Vmapped(vmap_rule(f"conv{rank}d_transpose", dims), operands, attributes))
        extents = [
            (x - 1) * s + k - 2 + more for x, s, k, more in zip(data[2:], strides, weight[2:], extra, strict=True)
        ]
        problem = ConvProblem.from_shapes((2, 6, *extents), weight, strides=strides, padding=1, groups=groups)
        want.append(looped(lambda *a, p=problem: reference.backward_data(p, *a), cases[-1].rule.levels, operands))
    for found, expected in zip(run(cases), want, strict=True):
        np.testing.assert_array_equal(found, expected)


def backward_reference(problem: ConvProblem, transposed: bool) -> Any:
    """All three gradients of one (transposed) convolution; the problem is the one whose dgrad it is, if transposed."""

    def gradients(grad: Any, data: Any, weight: Any) -> tuple[Any, Any, Any]:
        bias = grad.sum((0, *range(2, grad.ndim)))
        if transposed:
            return reference.forward(problem, grad, weight), reference.backward_weight(problem, data, grad), bias
        return reference.backward_data(problem, grad, weight), reference.backward_weight(problem, grad, data), bias

    return gradients


TRIPLES = [dims for dims in product((None, 0), repeat=3) if any(d is not None for d in dims)] + [
    (-1, -1, -1),
    (-1, -1, None),
    (-1, None, -1),
    (-1, None, None),
    (None, -1, -1),
    (None, -1, None),
    (None, None, -1),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_all_gradients_at_once(transposed: bool, groups: int) -> None:
    """Three operands, every combination; what no batched operand reaches is the same in each entry."""
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 4 // groups, 3, 2), strides=2, padding=1, groups=groups)
    shapes = [problem.grad_shape, problem.data_shape, problem.weight_shape]
    if transposed:
        shapes[:2] = [shapes[1], shapes[0]]
    op = "conv2d_transpose_backward" if transposed else "conv2d_backward"
    rng = np.random.default_rng(groups)
    cases = []
    for dims in TRIPLES:
        operands = [ints(rng, batched(shape, 2, dim)) for shape, dim in zip(shapes, dims, strict=True)]
        attributes = {"strides": 2, "padding": 1, "groups": groups}
        cases.append(Vmapped(vmap_rule(op, dims), operands, attributes))
    nested = vmap_rule(vmap_rule(op, (0, 0, None)), (None, -1, 1))
    operands = [
        ints(rng, batched(batched(shape, 2, inner), 3, outer))
        for shape, inner, outer in zip(shapes, (0, 0, None), (None, -1, 1), strict=True)
    ]
    cases.append(Vmapped(nested, operands, {"strides": 2, "padding": 1, "groups": groups}))
    for case, found in zip(cases, run(cases), strict=True):
        want = looped(backward_reference(problem, transposed), case.rule.levels, case.operands)
        for part, expected in zip(found, want, strict=True):
            np.testing.assert_array_equal(part, expected, err_msg=str(case.rule))


@pytest.mark.parametrize(
    ("strides", "dilation", "padding", "output_padding"),
    [(2, 1, 1, 1), (1, 3, 0, 2), (2, 4, 1, 3), ((2, 1), (1, 2), 0, (1, 1)), (2, 3, (1, 0), 2)],
)
def test_output_padding_of_a_transposed_convolution(
    strides: Any, dilation: Any, padding: Any, output_padding: Any
) -> None:
    """Less than a stride, or more with dilation: what no product is written to takes part in the bias gradient only."""
    rng = np.random.default_rng(3)
    attributes = {"strides": strides, "dilation": dilation, "padding": padding, "output_padding": output_padding}
    x, w = ints(rng, (2, 2, 4, 3, 5)), ints(rng, (4, 3, 2, 2))
    each = [(value,) * 2 if isinstance(value, int) else value for value in attributes.values()]
    y = [
        (extent - 1) * stride + step + 1 - 2 * pad + more
        for extent, stride, step, pad, more in zip((3, 5), *each, strict=True)
    ]
    dy = ints(rng, (2, 2, 3, *y))
    cases = [Vmapped(vmap_rule("conv2d_transpose_backward", (0, 0, None)), [dy, x, w], attributes)]
    (found,) = run(cases)
    named = {"stride": strides, "dilation": dilation, "padding": padding, "output_padding": output_padding}
    want = [evaluate("convolution_backward", dy[i], x[i], w, transposed=True, **named) for i in range(2)]
    for part, expected in zip(found, zip(*want, strict=True), strict=True):
        np.testing.assert_array_equal(part, np.stack(expected))


@pytest.mark.parametrize("dims", [(0, 0), (1, None), (None, 0)])
def test_no_samples(dims: tuple[int | None, int | None]) -> None:
    """An N of 0: dW is zero, the others are empty."""
    shapes = {"data": (0, 4, 5, 6), "weight": (6, 2, 3, 2), "grad": (0, 6, 3, 5)}
    extra = {"conv2d": {}, "conv2d_backward_weight": {"kernel_size": (3, 2)}, "conv2d_backward_data": {}}
    extra["conv2d_backward_data"] = {"data_shape": shapes["data"]}
    results = {"conv2d": "grad", "conv2d_backward_weight": "weight", "conv2d_backward_data": "data"}
    cases = []
    for op, attributes in extra.items():
        rule = vmap_rule(op, dims)
        batched = [[*shapes[name]] for name in rule.operands]
        for shape, dim in zip(batched, dims, strict=True):
            if dim is not None:
                shape.insert(dim, 2)
        operands = [np.ones(shape, "float32") for shape in batched]
        cases.append(Vmapped(rule, operands, {"groups": 2, **attributes}))
    for found, wanted in zip(run(cases), results.values(), strict=True):
        np.testing.assert_array_equal(found, np.zeros((2, *shapes[wanted])))


def test_the_mask_leaves_gradients_away() -> None:
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 4, 3, 2))
    operands = [np.zeros((2, *shape), "float32") for shape in (problem.grad_shape, problem.data_shape)]
    operands.append(np.zeros(problem.weight_shape, "float32"))
    case = Vmapped(vmap_rule("conv2d_backward", (0, 0, None)), operands, {"output_mask": (False, True, False)})
    names = calls_in(module_of([case]), "case_0")
    assert [name for name in names if "conv" in name or "sum" in name] == ["relax.nn.conv2d_backward_weight"]


def symbolic(case: Vmapped, spatial: bool, batch: bool, samples: bool) -> Vmapped:
    """The case with names for its batch, its N and its last spatial extent."""
    b, n, w = (tvm.tirx.Var(name, "int64") for name in ("b", "n", "w"))
    (dims,) = case.rule.levels
    op = case.rule.op
    letters = {"data": "nchw", "grad": "nchw", "weight": "oihw"}
    types = []
    for name, dim, array in zip(case.rule.operands, dims, case.operands, strict=True):
        axes = list(letters[name])
        if dim is not None:
            axes.insert(dim, "b")
        shape: list[Any] = list(array.shape)
        if batch and "b" in axes:
            shape[axes.index("b")] = b
        if samples and "n" in axes:
            shape[axes.index("n")] = n
        if spatial and name != "weight":
            # stride 1, padding (1, 0), kernel 2: Y is as wide as X
            shape[-1 if axes[-1] == "w" else axes.index("w")] = w
        types.append(shape)
    attributes = dict(case.attributes)
    if op.endswith("data"):
        shape = list(attributes["data_shape"])
        attributes["data_shape"] = [n if samples else shape[0], *shape[1:3], w if spatial else shape[3]]
    return Vmapped(case.rule, case.operands, attributes, types)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("groups", [1, 2])
def test_symbolic_extents(direction: str, groups: int) -> None:
    """A batch known at run time only: folded into N, or, where it would be channels or groups, matrix products."""
    problem = ConvProblem.from_shapes(
        (2, 4, 5, 6), (6, 4 // groups, 3, 2), strides=(2, 1), padding=((1, 1), (1, 0)), dilation=(1, 1), groups=groups
    )
    cases = []
    for dims in [(0, None), (None, 0), (0, 0), (1, 2)]:
        made = case_of(direction, problem, [dims])
        cases += [symbolic(made, False, True, False), symbolic(made, False, False, True)]
        cases += [symbolic(made, True, True, True)]
    check([(direction, problem, case) for case in cases])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nested_with_a_symbolic_batch(direction: str) -> None:
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 2, 3, 2), groups=2, strides=2, padding=1, dilation=2)
    b = tvm.tirx.Var("b", "int64")
    cases = []
    for outer, inner in product([(0, None), (None, 0), (0, 0)], repeat=2):
        case = case_of(direction, problem, [outer, inner])
        types = [
            [b, *array.shape[1:]] if dim is not None else list(array.shape)
            for array, dim in zip(case.operands, outer, strict=True)
        ]
        cases.append((direction, problem, Vmapped(case.rule, case.operands, case.attributes, types)))
    check(cases)


@pytest.mark.parametrize("dtypes", [("float16",) * 3, ("bfloat16",) * 3, ("bfloat16", "float16", "float32")])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_narrow_types_are_summed_in_float32(direction: str, dtypes: tuple[str, str, str]) -> None:
    """Sums of some 300 products of about 50 are beyond what float16 counts one by one: only float32 is exact."""
    problem = ConvProblem.from_shapes((4, 64, 9, 9), (64, 32, 3, 3), padding=1, groups=2, dtypes=dtypes)
    cases = [case_of(direction, problem, [dims], size=2) for dims in [(0, None), (None, 0), (0, 0)]]
    for case in cases:
        case.operands = [abs(array.astype("float32") * 5).astype(array.dtype) for array in case.operands]
    check([(direction, problem, case) for case in cases])


def test_gradients_of_a_vmap() -> None:
    """What a rule emits has gradients: those of the vmap are the vmaps of the gradients."""
    problem = ConvProblem.from_shapes((2, 4, 5, 6), (6, 2, 3, 2), padding=1, groups=2)
    case = case_of("forward", problem, [(0, 0)])
    data, weight = (
        relax.Var(n, relax.TensorType(a.shape, "float32")) for n, a in zip("xw", case.operands, strict=True)
    )
    builder = relax.BlockBuilder()
    with builder.function("loss", [data, weight]):
        with builder.dataflow():
            y = case.rule(builder, data, weight, **case.attributes)
            total = builder.emit_output(relax.op.sum(relax.op.multiply(y, y)))
            y = builder.emit_output(y)
        builder.emit_func_output(relax.Tuple([total, y]))
    function = builder.get()["loss"]
    builder = relax.BlockBuilder()
    x, w = (relax.Var(str(v.name), v.ty) for v in (data, weight))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            results, gradients = emit_with_gradients(builder, function, [x, w], [0, 1], "test")
            output = builder.emit_output(relax.Tuple([results[1], *gradients]))
        builder.emit_func_output(output)
    machine = relax.VirtualMachine(tvm.compile(builder.get(), "llvm"), tvm.cpu())
    y, dx, dw = (part.numpy() for part in machine["main"](*map(tvm.runtime.tensor, case.operands)))
    pairs = zip(2 * y, *case.operands, strict=True)
    want = [(reference.backward_data(problem, g, k), reference.backward_weight(problem, g, x)) for g, x, k in pairs]
    np.testing.assert_array_equal(dx, np.stack([a for a, _ in want]))
    np.testing.assert_array_equal(dw, np.stack([b for _, b in want]))


THREADS = """
import numpy as np, tvm
from tests.batching.programs import module_of
from tests.batching.test_vmap import PAIRS, case_of
from tests.threads import check_same_bits
from relax_ops.single_run import quick_machine
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
problem = ConvProblem.from_shapes((4, 8, 10, 10), (16, 8, 3, 3), padding=1)
cases = [case_of(direction, problem, [dims], size=4) for direction, dims in zip(DIRECTIONS, PAIRS)]
machine = quick_machine(module_of(cases))
rng = np.random.default_rng(0)
for number, case in enumerate(cases):
    operands = [tvm.runtime.tensor(rng.standard_normal(a.shape).astype("float32")) for a in case.operands]
    def run():
        runs = [machine[f"case_{number}"](*operands).numpy() for _ in range(2)]
        assert np.array_equal(*runs)
        return runs
    check_same_bits(run)
"""


def test_the_same_bits_on_any_number_of_threads() -> None:
    run_with_threads(THREADS, checks=3)


X, W = (
    relax.Var("x", relax.TensorType((3, 2, 4, 5, 5), "float32")),
    relax.Var("w", relax.TensorType((6, 4, 3, 3), "float32")),
)


@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (lambda: vmap_rule("conv4d", (0, 0)), UnsupportedError, "no operator 'conv4d'; there are conv1d"),
        (lambda: vmap_rule("conv2d", (0,)), ProblemError, "conv2d has 2 operands, data, weight"),
        (lambda: vmap_rule("conv2d", (None, None)), ProblemError, "batches no operand of conv2d"),
        (
            lambda: vmap_rule("conv2d", (5, None)),
            ProblemError,
            "data of conv2d has 5 axes with this batch; there is no",
        ),
    ],
)
def test_rules_that_cannot_be(make: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        make()


@pytest.mark.parametrize(
    ("op", "dims", "operands", "attributes", "part"),
    [
        ("conv2d", (0, 0), (X, W), {}, r"weight has 4 axes; with the batch axes \[0\] it has 5"),
        ("conv2d", (0, None), (X,), {}, "1 operands were given; it takes 2: data, weight"),
        ("conv2d", (0, None), (X, W), {"groups": 2}, "the weight's I axis is 4, but 4 channels in 2 groups need 2"),
        ("conv2d_backward_data", (0, None), (X, W), {}, "data_shape is missing; it is the shape of one result"),
        (
            "conv2d_transpose",
            (0, None),
            (X, W),
            {"output_padding": 1},
            "output_padding 1 of axis H is not below its str",
        ),
    ],
)
def test_wrong_calls(op: str, dims: Any, operands: Any, attributes: dict[str, Any], part: str) -> None:
    builder = relax.BlockBuilder()
    with builder.function("main", [X, W]):
        with builder.dataflow():
            with pytest.raises(ProblemError, match=part):
                vmap_rule(op, dims)(builder, *operands, **attributes)
            result = builder.emit_output(X)
        builder.emit_func_output(result)


def test_a_dozen_levels_stay_in_their_order() -> None:
    """Batch axes are numbers: as text, the tenth came before the second."""
    extents = list(range(2, 14))
    grad = relax.Var("grad", relax.TensorType([1, 5, 1, *extents], "float32"))
    levels = [3] * len(extents)  # each the first one behind N, C and W, once those outside are taken away
    builder = relax.BlockBuilder()
    with builder.function("main", [grad]):
        with builder.dataflow():
            found = builder.emit_output(bias_gradient(builder, grad, "NCW", "float32", levels))
        builder.emit_func_output(found)
    assert [int(extent) for extent in found.ty.shape.values] == [*extents, 5]
