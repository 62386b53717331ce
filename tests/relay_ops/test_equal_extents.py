# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose extents coincide, so that no axis, operand or layout can be told by an extent.

Small integers are compared with float64, every element. The problems of one rank are compiled together, as compiling
is what costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.differentiate import value_and_gradients
from relay_ops.ir import call_of, multiplied_problem_of, problem_of, types_of
from relay_ops.partition import NAME, partition
from relay_ops.region_source import source_of
from tests.relay_ops.harness import assert_equal, calls, execute, integers, run, typed, variables
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Direction
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, flat_padding, hidden_extent

CONVOLUTIONS = {1: relay.nn.conv1d, 2: relay.nn.conv2d, 3: relay.nn.conv3d}
TRANSPOSED = {1: relay.nn.conv1d_transpose, 2: relay.nn.conv2d_transpose, 3: relay.nn.conv3d_transpose}
DIRECTIONS = (FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA)


def coinciding(rank: int) -> dict[str, ConvProblem]:
    """Problems in canonical layouts. All extents of X, dY and W are equal, but where the name says otherwise."""

    def cubic(
        batch: int, channels: tuple[int, int], extent: int, kernel: int, pad: tuple[int, int] = (0, 0), **rest: int
    ) -> ConvProblem:
        return ConvProblem(
            batch,
            *channels,
            (extent,) * rank,
            (kernel,) * rank,
            (rest.get("stride", 1),) * rank,
            (pad,) * rank,
            (rest.get("dilation", 1),) * rank,
            groups=rest.get("groups", 1),
        )

    return {
        "dense": cubic(3, (3, 3), 3, 3, (1, 1)),
        "ones": cubic(1, (1, 1), 1, 1),
        "one element, three taps": cubic(1, (1, 1), 1, 3, (1, 1)),
        "even kernel": cubic(4, (4, 4), 4, 4, (2, 1)),
        "one output": cubic(4, (4, 4), 4, 4),
        "stride": cubic(3, (3, 3), 3, 3, (2, 2), stride=2),
        "dilation": cubic(3, (3, 3), 3, 3, (2, 2), dilation=2),
        "one tap, stride": cubic(4, (4, 4), 4, 1, (1, 2), stride=2),
        "one tap, stride, depthwise": cubic(4, (4, 4), 4, 1, (1, 2), stride=2, groups=4),
        "depthwise": cubic(3, (3, 3), 3, 3, (1, 1), groups=3),
        "groups": cubic(2, (4, 4), 2, 2, (1, 0), groups=2),
        "one output channel a group": cubic(2, (4, 2), 2, 2, (0, 1), groups=2),
        "one input channel a group": cubic(2, (2, 4), 2, 2, (0, 1), groups=2),
    }


def layouts(rank: int) -> dict[str, tuple[str, str, str]]:
    axes = SPATIAL[rank]
    return {
        "NC": (f"NC{axes}", f"OI{axes}", f"NC{axes}"),
        "last": (f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        "any": (f"CN{axes}", f"I{axes}O", f"{axes}NC"),
    }


def problems(rank: int, layout: str = "NC") -> list[ConvProblem]:
    return [problem.with_layouts(*layouts(rank)[layout]) for problem in coinciding(rank).values()]


Case = tuple[Any, Sequence[Any], dict[str, Any], list[Any]]
"""An expression (or a list of them), its variables, their values, and the wanted results."""


def together(cases: Sequence[Case]) -> tuple[Any, dict[str, Any], list[Any]]:
    """All cases as one program: the module, values by parameter name, wanted results."""
    renamed: list[Any] = []
    values: dict[str, Any] = {}
    results: list[Any] = []
    wanted: list[Any] = []
    for number, (made, operands, arrays, expected) in enumerate(cases):
        new = [relay.var(f"p{number}_{v.name_hint}", type_annotation=v.type_annotation) for v in operands]
        body = relay.Tuple(made) if isinstance(made, list) else relay.Tuple([made])
        bound = relay.bind(body, dict(zip(operands, new, strict=True)))
        renamed += new
        results += list(bound.fields)
        values |= {f"p{number}_{v.name_hint}": arrays[v.name_hint] for v in operands}
        wanted += expected
    return typed(relay.Function(renamed, relay.Tuple(results))), values, wanted


def gradient_cases(
    rank: int,
    layout: str,
    directions: Sequence[Direction] = (BACKWARD_WEIGHT, BACKWARD_DATA),
    names: Sequence[str] = (),
) -> Iterator[Case]:
    for name, problem in zip(coinciding(rank), problems(rank, layout), strict=True):
        if names and name not in names:
            continue
        arrays = integers(problem)
        for direction in directions:
            operands = variables(problem, *direction.operands)
            want = reference.DIRECTIONS[direction.name](problem, *(arrays[operand] for operand in direction.operands))
            yield call_of(direction, problem, *operands), operands, arrays, [want]


def compare(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for have, want in zip(found, wanted, strict=True):
        assert_equal(have, want)


def differentiated(expr: Any, operands: list[Any], upstream: Any) -> list[Any]:
    """The partials of <expr, upstream> in the operands by the rule of the operator, on the same variables."""
    (call,) = calls(typed(relay.Function(operands, expr)), expr.op.name)
    rule: Callable[[Any, Any], Any] = call.op.get_attr("FPrimalGradient")
    main = typed(relay.Function([*call.args, upstream], relay.Tuple(list(rule(call, upstream)))))["main"]
    assert [ty.concrete_shape for ty in main.ret_type.fields] == [v.checked_type.concrete_shape for v in call.args]
    return list(relay.bind(main.body, dict(zip(main.params, [*operands, upstream], strict=True))).fields)


@pytest.mark.parametrize("layout", ["NC", "last", "any"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_types_and_texts(rank: int, layout: str) -> None:
    for problem in problems(rank, layout):
        for direction in DIRECTIONS:
            if direction is FORWARD and layout == "any":
                continue  # Relay has no type for nn.conv in such layouts
            operands = variables(problem, *direction.operands)
            module = typed(relay.Function(operands, call_of(direction, problem, *operands)))
            assert module["main"].ret_type.concrete_shape == problem.tensors[direction.result][0]
            again = relay.parse(module.astext())
            tvm.ir.assert_structural_equal(module, again)
            call = again["main"].body
            assert problem_of(call.op, call.attrs, types_of(call)) == problem


BUILT = ("one tap, stride, depthwise", "one output channel a group", "one input channel a group")
"""The problems that Relay itself builds: those of which its rules tell something by extents, as building takes long."""


@pytest.mark.parametrize(("opt_level", "layout"), [(0, "any"), (3, "NC")], ids=["strategy", "legalized"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_are_right(rank: int, opt_level: int, layout: str) -> None:
    module, values, wanted = together(list(gradient_cases(rank, layout, names=BUILT)))
    compare(run(module, values, opt_level), wanted)


@pytest.mark.parametrize("layout", ["NC", "last", "any"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_are_calls_on_the_right_operands(rank: int, layout: str) -> None:
    """Identities are compared, as extents do not say which operand is which."""
    for problem in problems(rank, layout):
        for direction in DIRECTIONS:
            if direction is FORWARD and layout == "any":
                continue
            operands = variables(problem, *direction.operands)
            check_partials(direction, problem, call_of(direction, problem, *operands), operands)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_of_transposed_convolutions(rank: int) -> None:
    for problem in problems(rank):
        if problem.groups > 1 and rank != 2:
            continue  # Relay types grouped transposed convolutions in two dimensions only
        operands = variables(problem, "grad", "weight")
        geometry = zip(
            problem.data_extents, problem.kernel, problem.strides, problem.dilation, problem.padding, strict=True
        )
        stock = TRANSPOSED[rank](
            *operands,
            strides=problem.strides,
            dilation=problem.dilation,
            padding=flat_padding(problem.padding),
            output_padding=tuple(hidden_extent(int(x), k, s, d, *pad) for x, k, s, d, pad in geometry),
            groups=problem.groups,
            channels=problem.in_channels,
            kernel_size=problem.kernel,
        )
        check_partials(BACKWARD_DATA, problem, stock, operands)


def check_partials(direction: Direction, problem: ConvProblem, expr: Any, operands: list[Any]) -> None:
    """The rule's partials are the catalogue's operators of the same problem on the very operands."""
    upstream = relay.var("upstream", shape=problem.tensors[direction.result][0])
    found = differentiated(expr, operands, upstream)
    named = {**dict(zip(direction.operands, operands, strict=True)), "result": upstream}
    typed_partials = typed(relay.Function([*operands, upstream], relay.Tuple(found)))["main"].body.fields
    for partial, checked, (name, of) in zip(found, typed_partials, direction.gradients, strict=True):
        assert all(have.same_as(named[want]) for have, want in zip(partial.args, of, strict=True))
        assert partial.op.name.removeprefix(f"nn.conv{problem.rank}d") == ("" if name == "forward" else f"_{name}")
        assert problem_of(partial.op, partial.attrs, types_of(checked)) == problem


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_c_loops_are_right(rank: int, tmp_path: Any) -> None:
    """One library of all regions; ranks take turns with the layouts."""
    wanted: dict[str, tuple[Case, Any]] = {}
    sources: list[str] = []
    for layout in {1: ("any",), 2: ("NC", "last"), 3: ("any",)}[rank]:
        for case in gradient_cases(rank, layout, DIRECTIONS if layout != "any" else DIRECTIONS[1:]):
            made, operands, _, _ = case
            module = partition(typed(relay.Function(operands, made)), ["c"], forward=True)
            (region,) = (f for f in module.functions.values() if f.attrs and "Compiler" in f.attrs)
            symbol = f"case{len(wanted)}"
            wanted[symbol] = case, region.ret_type
            sources.append(source_of(region, symbol))
    head = sources[0][: sources[0].index("struct case0")]
    text = head + "".join(source.removeprefix(head) for source in sources)
    text = text.replace('#pragma GCC optimize("O3")', '#pragma GCC optimize("O1")')
    path = str(tmp_path / "library.so")
    tvm.get_global_func("runtime.CSourceModuleCreate")(text, "cc", list(wanted), []).export_library(path)
    library = tvm.runtime.load_module(path)
    for symbol, ((_, operands, arrays, (want,)), ty) in wanted.items():
        out = tvm.nd.array(np.full(ty.concrete_shape, np.nan, "float32"))
        library[symbol](*(tvm.nd.array(arrays[v.name_hint]) for v in operands), out)
        assert_equal(out.numpy(), want)


def check_library(program: tuple[Any, dict[str, Any], list[Any]], folder: Any) -> None:
    """Partition, export, load and run: no gradient may be left to Relay."""
    module, values, wanted = program
    module = partition(module, ["c"])
    main = tvm.IRModule.from_expr(module["main"])
    assert not calls(main, *(f"nn.conv{rank}d_backward_{kind}" for rank in SPATIAL for kind in ("weight", "data")))
    path = str(folder / "library.so")
    with tvm.transform.PassContext(opt_level=3):
        relay.build(module, "llvm").export_library(path)
    compare(execute(tvm.runtime.load_module(path), values), wanted)


def test_gradient_pass_and_partition(tmp_path: Any) -> None:
    problem = coinciding(2)["one tap, stride, depthwise"]
    names = ("data", "weight", "grad")
    x, w, upstream = operands = variables(problem, *names)
    body = relay.multiply(call_of(FORWARD, problem, x, w), upstream)
    module = value_and_gradients(relay.Function(operands, body))
    arrays = integers(problem)
    y = reference.forward(problem, arrays["data"], arrays["weight"])
    dx = reference.backward_data(problem, arrays["grad"], arrays["weight"])
    dw = reference.backward_weight(problem, arrays["grad"], arrays["data"])
    check_library((module, arrays, [y * arrays["grad"], dx, dw, y]), tmp_path)


@pytest.mark.parametrize(("rank", "start"), [(1, "any"), (2, "NC"), (2, "last"), (3, "any")])
def test_layouts_are_converted(rank: int, start: str, tmp_path: Any) -> None:
    """From each layout to another one: transposes that no extent can tell from none."""
    axes = SPATIAL[rank]
    goal = (f"NC{axes}", f"OI{axes}") if start == "last" else (f"N{axes}C", f"O{axes}I")
    module, values, wanted = together(list(gradient_cases(rank, start, names=("depthwise",))))
    desired = {f"nn.conv{rank}d_backward_{direction}": list(goal) for direction in ("weight", "data")}
    with tvm.transform.PassContext(opt_level=3):
        converted = relay.transform.ConvertLayout(desired)(module)
    for call in calls(converted, f"nn.conv{rank}d_backward_data"):
        assert (call.attrs.data_layout, call.attrs.kernel_layout) == goal
    for call in calls(converted, f"nn.conv{rank}d_backward_weight"):
        assert (call.attrs.data_layout, call.attrs.kernel_layout, call.attrs.out_layout) == (goal[0], *goal)
    check_library((converted, values, wanted), tmp_path)


# Relay types a depthwise convolution by its extents: where groups, the channels of the data and the weight's O axis are
# equal, the weight's I axis is the number of results of each channel. nn.conv1d has no such weights.
MULTIPLIED = [
    ("NCHW", "OIHW", 2, 2),  # every extent of the weight is 2
    ("NHWC", "HWIO", 2, 2),
    ("NDHWC", "DHWOI", 2, 3),
]


def multiplied(
    data_layout: str, kernel_layout: str, channels: int, multiplier: int
) -> tuple[ConvProblem, Any, list[Any]]:
    """The problem with one input channel a group, and the stock call with its variables."""
    rank = len(data_layout) - 2
    problem = ConvProblem(2, channels, channels * multiplier, (2,) * rank, (2,) * rank, padding=((1, 0),) * rank)
    problem = ConvProblem.from_shapes(
        problem.data_shape,
        (channels * multiplier, 1, *problem.kernel),
        padding=problem.padding,
        groups=channels,
    ).with_layouts(data_layout, None, data_layout)
    extents = {"O": channels, "I": multiplier} | dict.fromkeys(SPATIAL[rank], 2)
    operands = [
        relay.var("data", shape=problem.data_shape),
        relay.var("weight", shape=[extents[letter] for letter in kernel_layout]),
    ]
    call = CONVOLUTIONS[rank](
        *operands,
        padding=(1,) * rank + (0,) * rank,
        groups=channels,
        channels=channels * multiplier,
        kernel_size=(2,) * rank,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    )
    return problem, call, operands


def as_given(weight: Any, kernel_layout: str, channels: int, multiplier: int) -> Any:
    """A canonical weight of O = channels * multiplier in Relay's form."""
    apart = weight.reshape(channels, multiplier, *weight.shape[2:])
    return np.ascontiguousarray(np.transpose(apart, [f"OI{SPATIAL[apart.ndim - 2]}".index(x) for x in kernel_layout]))


def test_gradients_of_depthwise_convolutions_with_a_multiplier(tmp_path: Any) -> None:
    cases: list[Case] = []
    forwards: list[Case] = []
    for data_layout, kernel_layout, channels, multiplier in MULTIPLIED:
        problem, call, operands = multiplied(data_layout, kernel_layout, channels, multiplier)
        upstream = relay.var("upstream", shape=problem.grad_shape)
        found = differentiated(call, operands, upstream)
        arrays = integers(problem)
        given = {**arrays, "weight": as_given(arrays["weight"], kernel_layout, channels, multiplier)}
        dx = reference.backward_data(problem, arrays["grad"], arrays["weight"])
        dw = reference.backward_weight(problem, arrays["grad"], arrays["data"])
        wanted = [dx, as_given(dw, kernel_layout, channels, multiplier)]
        cases.append((found, [*operands, upstream], {**given, "upstream": arrays["grad"]}, wanted))
        if kernel_layout == "HWIO":  # Relay builds them in two dimensions only
            forwards.append((call, operands, given, [reference.forward(problem, arrays["data"], arrays["weight"])]))
    check_library(together(cases), tmp_path)
    module, values, wanted = together(forwards)
    compare(run(partition(module, ["c"], forward=True), values), wanted)


def test_a_multiplier_is_told_from_input_channels() -> None:
    _, call, operands = multiplied("NHWC", "HWIO", 2, 2)
    (made,) = calls(typed(relay.Function(operands, call)), "nn.conv2d")
    with pytest.raises(UnsupportedError, match=r"I axis is the channel multiplier 2 .* reshape the weight to O=4, I=1"):
        problem_of(made.op, made.attrs, types_of(made))
    problem = multiplied_problem_of(made.op, made.attrs, types_of(made))
    assert problem is not None
    assert (problem.kernel_layout, problem.weight_shape, problem.groups) == ("HWOI", (2, 2, 4, 1), 2)
    for plain in coinciding(2).values():
        operands = variables(plain, "data", "weight")
        (made,) = calls(typed(relay.Function(operands, call_of(FORWARD, plain, *operands))), "nn.conv2d")
        assert multiplied_problem_of(made.op, made.attrs, types_of(made)) is None


@pytest.mark.parametrize("reshaped", [(4, 2, 3, 2), (24, 2), (4, 2, 2, 3)], ids=str)
def test_regions_refuse_tensors_of_as_many_elements(reshaped: tuple[int, ...], tmp_path: Any) -> None:
    problem = ConvProblem(2, 4, 4, (2, 3), (1, 1))
    operands = variables(problem, "grad", "weight")
    module = partition(typed(relay.Function(operands, call_of(BACKWARD_DATA, problem, *operands))), ["c"])
    ((symbol, region),) = ((v.name_hint, f) for v, f in module.functions.items() if f.attrs and "Compiler" in f.attrs)
    make: Callable[[Any], Any] = tvm.get_global_func(f"relay.ext.{NAME}")
    path = str(tmp_path / "region.so")
    make(region).export_library(path)
    function = tvm.runtime.load_module(path)[symbol]
    arrays = integers(problem)
    grad, weight = arrays["grad"], tvm.nd.array(arrays["weight"])
    out = tvm.nd.array(np.full(problem.data_shape, np.nan, "float32"))
    function(tvm.nd.array(grad), weight, out)
    assert_equal(out.numpy(), reference.backward_data(problem, grad, arrays["weight"]))
    with pytest.raises(tvm.error.TVMError, match="tensor 0 is not a compact one"):
        function(tvm.nd.array(grad.reshape(reshaped)), weight, out)
