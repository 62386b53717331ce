# SPDX-License-Identifier: Apache-2.0
"""FLegalize of the family: a generated CPU kernel where the plan has one for the target, else stock operations.

What is taken can be forced for the length of a `with forced_forms(...)` block, and is recorded, with the reasons
against what was not taken, by `with recorded_choices()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import tvm
from tvm import relax

from legalize.forms import DATA_FORMS, WEIGHT_FORMS, compose_backward_data, compose_backward_weight
from relax_ops.builder import RelaxBuilder, checked_view
from relax_ops.compat import Constant, array_of
from relax_ops.ir import (
    PREFIX,
    TRANSPOSED,
    AnalyzerProver,
    attributes_of,
    entry_of,
    is_part,
    problem_of,
    shape_values,
    spec_of,
    transposed_problem_of,
)
from tvm_convgrad.codegen.hardware import Machine, machine_of
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD, NEW_OPS
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.switches import KERNELS, VARIABLE, disabled
from tvm_convgrad.core.type_relation import expected_grad_shape, unproven_axes
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import COMPOSITION, Choice
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import forms_of

KERNEL = "kernel"
"""Forces the generated kernel; legalization raises where it refuses."""

COMPOSITIONS: dict[str, tuple[str, ...]] = {
    "forward": (COMPOSITION,),
    "backward_weight": (COMPOSITION, *WEIGHT_FORMS),
    "backward_data": (COMPOSITION, *DATA_FORMS),
}
"""The compositions that can be forced for each direction; "composition" is the default one."""

_OWN = frozenset(entry.name for entry in NEW_OPS)
"""The family's operators, which have compositions."""

_forced: ContextVar[dict[str, str] | None] = ContextVar("tvm_convgrad_forms", default=None)


class Lowered(NamedTuple):
    """What was taken for one convolution.

    Attributes:
        op: the operator's name without `relax.nn.`.
        direction: the direction of `problem` that it is.
        choice: of the plan, with its reasons.
        machine: of the target in scope, if kernels are made for it.
        form: the kernel's kind, "composition:" with the name of one, or "stock" for TVM's own convolution.
        fused: what the kernel does besides, by the names of Epilogue's fields.
        place: of a fused one, the function and the number of the convolution among its convolutions.
    """

    op: str
    direction: str
    problem: ConvProblem
    choice: Choice
    machine: Machine | None
    form: str
    fused: tuple[str, ...] = ()
    place: tuple[str, int] | None = None


_record: ContextVar[list[Lowered] | None] = ContextVar("tvm_convgrad_log", default=None)
_seconds: ContextVar[dict[str, float] | None] = ContextVar("tvm_convgrad_seconds", default=None)
_listener: ContextVar[Callable[[tvm.tirx.PrimFunc, str], None] | None] = ContextVar(
    "tvm_convgrad_listener", default=None
)


@contextmanager
def forced_forms(
    *, backward_weight: str | None = None, backward_data: str | None = None, forward: str | None = None
) -> Iterator[None]:
    """Legalize with these forms inside the block; None leaves the choice to the plan.

    Args:
        backward_weight: "kernel", a kernel such as "kernel:implicit-gemm", "composition", "swapped" or "tiled".
        backward_data: "kernel", a kernel, "composition", "transposed" or "dilated".
        forward: "kernel", a kernel, or "composition" for TVM's own convolution; of transposed convolutions too.

    Raises:
        UnsupportedError: a name is unknown. A form that refuses a problem raises when that problem is legalized.
    """
    chosen = dict(_forced.get() or {})
    for direction, form in (
        ("backward_weight", backward_weight),
        ("backward_data", backward_data),
        ("forward", forward),
    ):
        if form is None:
            continue
        known = (KERNEL, *forms_of(direction), *COMPOSITIONS[direction])
        if form not in known:
            raise UnsupportedError(f"{direction}: there is no form {form!r}; there are {', '.join(known)}")
        chosen[direction] = form
    token = _forced.set(chosen)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def recorded_choices() -> Iterator[list[Lowered]]:
    """A list that grows by one entry for every convolution that is legalized inside the block."""
    record: list[Lowered] = []
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@contextmanager
def recorded_seconds() -> Iterator[dict[str, float]]:
    """A dict that gets, for every kernel that is generated inside the block, its estimated seconds by its name."""
    seconds: dict[str, float] = {}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


@contextmanager
def generated_kernels_told(listener: Callable[[tvm.tirx.PrimFunc, str], None]) -> Iterator[None]:
    """Inside the block `listener` is called with each kernel that is generated for a module, and its name there."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def chosen_form(direction: str) -> str:
    """The composition that legalization takes for a direction, where it takes one: the forced one, or the default."""
    forms = WEIGHT_FORMS if direction == BACKWARD_WEIGHT.name else DATA_FORMS
    forced = (_forced.get() or {}).get(direction)
    return forced if forced in forms else next(iter(forms))


def choose(op: str, direction: str, problem: ConvProblem) -> tuple[Choice, Machine | None]:
    """As `decide`, recorded.

    Raises:
        UnsupportedError: the kernel is forced and refuses.
    """
    choice, machine = decide(op, direction, problem)
    forced = (_forced.get() or {}).get(FORWARD.name if op in TRANSPOSED else direction)
    if (forced == KERNEL or forced in forms_of(direction)) and not choice.is_kernel:
        raise UnsupportedError(f"{op} of {problem.descriptor}: {forced} refuses it: {choice.reason}; use impl='auto'")
    form = "stock" if op not in _OWN else f"{COMPOSITION}:{chosen_form(direction)}"
    record_lowered(Lowered(op, direction, problem, choice, machine, choice.name if choice.is_kernel else form))
    return choice, machine


def record_lowered(entry: Lowered) -> None:
    """Add an entry to the record, if there is one."""
    record = _record.get()
    if record is not None:
        record.append(entry)


def decide(op: str, direction: str, problem: ConvProblem) -> tuple[Choice, Machine | None]:
    """What the target in scope gets for an operator that is a direction of a problem, what is forced considered."""
    forced = (_forced.get() or {}).get(FORWARD.name if op in TRANSPOSED else direction)
    target = tvm.target.Target.current(allow_none=True)
    machine = machine_of(target)
    if forced in COMPOSITIONS[direction]:
        choice = Choice(COMPOSITION, f"{forced} is forced")
    elif disabled(KERNELS):
        choice = Choice(COMPOSITION, f"{VARIABLE}={KERNELS} turns generated kernels off")
    elif target is None:
        choice = Choice(COMPOSITION, "no target is in scope, and kernels are made for one")
    else:
        choice = chooser.choose(problem, direction, machine, forms_of(direction).get(forced or ""))
    return choice, machine


def call_kernel(
    block_builder: relax.BlockBuilder,
    direction: str,
    problem: ConvProblem,
    choice: Choice,
    machine: Machine,
    operands: list[relax.Expr],
) -> Any:
    """A call of the chosen kernel; one function a module for equal problems."""
    result = result_type(direction, problem, operands)
    variable, operands = add_kernel(block_builder, direction, problem, choice, machine, operands)
    return relax.op.call_tir(variable, operands, result)


def add_kernel(
    block_builder: relax.BlockBuilder,
    direction: str,
    problem: ConvProblem,
    choice: Choice,
    machine: Machine,
    operands: list[relax.Expr],
    epilogue: Epilogue = NO_EPILOGUE,
) -> tuple[Any, list[relax.Expr]]:
    """The variable of the chosen kernel in the builder's module, and what it is called with.

    The module has one function for equal problems. A weight that is a constant is packed here, if the kernel would pack
    it in each call.
    """
    packed = packed_constant(direction, problem, choice, machine, operands[1])
    function = chooser.build(problem, direction, machine, choice, "", epilogue, packed is not None)
    name = f"conv{problem.rank}d_{direction}_kernel"
    variable = add_generated(block_builder, function, name, choice.estimate)
    return variable, operands if packed is None else [operands[0], packed]


def packed_constant(direction: str, problem: ConvProblem, choice: Choice, machine: Machine, weight: relax.Expr) -> Any:
    """The constant in the place of a weight that is one, for `chooser.build(packed=True)`; None: it stays."""
    if not isinstance(weight, Constant):
        return None
    packed = chooser.packed_weight(problem, direction, machine, choice, array_of(weight))
    return None if packed is None else relax.const(packed, str(packed.dtype))


def add_generated(block_builder: relax.BlockBuilder, function: tvm.tirx.PrimFunc, name: str, seconds: float) -> Any:
    """The variable of a generated kernel in the builder's module, where it has a name that begins with `name`.

    Args:
        seconds: the estimate of a call.
    """
    variable, listener, estimates = block_builder.add_func(function, name), _listener.get(), _seconds.get()
    if estimates is not None:
        estimates[variable.name_hint] = seconds
    if listener is not None:
        listener(function, variable.name_hint)
    return variable


def result_type(direction: str, problem: ConvProblem, operands: list[relax.Expr]) -> relax.Expr:
    """The type of a direction's result; a batch known only at run time is that of the first operand."""
    shape, dtype = problem.tensors[DIRECTIONS[direction].result]
    layout = {"data": problem.data_layout, "grad": problem.grad_layout}[DIRECTIONS[direction].operands[0]]
    first = spec_of(operands[0], "operand", direction).shape
    assert first is not None  # problem_of has made sure
    batch = first[layout.index("N")]
    return relax.TensorType([extent if isinstance(extent, int) else batch for extent in shape], dtype)


def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """FLegalize of the six operators.

    Extents of grad that could be neither proven nor disproven when types were inferred are checked when the program
    runs, by a match_cast.
    """
    entry, problem = entry_of(call), problem_of(call)
    attributes = attributes_of(call)
    grad, other = call.args[0], call.args[1]
    data_shape = (
        spec_of(other, "data", entry.name).shape if entry.direction is BACKWARD_WEIGHT else shape_values(call.args[2])
    )
    assert data_shape is not None  # problem_of has made sure
    grad_shape = spec_of(grad, "grad", entry.name).shape
    assert grad_shape is not None
    if unproven_axes(attributes, grad_shape, data_shape, problem.kernel, AnalyzerProver()):
        shape = expected_grad_shape(attributes, grad_shape, data_shape, problem.kernel)
        grad = checked_view(block_builder, grad, shape)
    choice, machine = choose(entry.name, entry.direction.name, problem)
    if choice.is_kernel and machine is not None:
        return call_kernel(block_builder, entry.direction.name, problem, choice, machine, [grad, other])
    builder = RelaxBuilder(block_builder)
    form = chosen_form(entry.direction.name)
    if entry.direction is BACKWARD_WEIGHT:
        return compose_backward_weight(builder, problem, grad, other, form)
    return compose_backward_data(builder, problem, grad, other, data_shape, form)


def with_kernels(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """FLegalize of a stock convolution: our kernel where one covers it, else what `stock` does.

    A transposed convolution is dgrad of the convolution that it transposes. Packed layouts, integer types, symbolic
    kernels and unknown shapes are not ConvProblems; they go to `stock`, and so does what a composition is made of.
    """

    def legalize_stock(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        op = str(call.op.name).removeprefix(PREFIX)
        weight = spec_of(call.args[1], "weight", op).shape
        if is_part(call) or weight is None or not all(isinstance(extent, int) for extent in weight):
            return stock(block_builder, call)
        try:
            problem = transposed_problem_of(call) if op in TRANSPOSED else problem_of(call)
        except (ProblemError, DTypeError, UnsupportedError):
            return stock(block_builder, call)
        direction = BACKWARD_DATA.name if op in TRANSPOSED else FORWARD.name
        choice, machine = choose(op, direction, problem)
        if choice.is_kernel and machine is not None:
            return call_kernel(block_builder, direction, problem, choice, machine, list(call.args))
        return stock(block_builder, call)

    return legalize_stock
