# SPDX-License-Identifier: Apache-2.0
"""Convolutions with what follows them, as Relay patterns: bias, a summand, relu, in the orders that programs have.

A form is the chain behind a convolution, from the inside out; `Match` is what an expression of such a form computes.
"""

from __future__ import annotations

from typing import NamedTuple

import tvm
from tvm import relay
from tvm.relay.dataflow_pattern import DFPattern, is_op, wildcard

from relay_ops.ir import PREFIX, entry_of, problem_of, transposed_problem_of, types_of
from tvm_convgrad.core.catalogue import BACKWARD_DATA, FORWARD, NEW_OPS, Direction
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.core.problem import ConvProblem

Form = tuple[str, ...]

FORMS: dict[str, tuple[Form, ...]] = {
    FORWARD.name: (
        ("bias", "accumulate", "relu"),
        ("accumulate", "bias", "relu"),
        ("bias", "relu"),
        ("accumulate", "relu"),
        ("bias", "accumulate"),
        ("accumulate", "bias"),
        ("relu",),
        ("bias",),
        ("accumulate",),
        (),
    ),
    **{entry.direction.name: (("accumulate",), ()) for entry in NEW_OPS},
}
"""The forms of each direction, the longest first."""

_TRANSPOSED = "d_transpose"
_BROADCAST = 1
"""TVM's kBroadcast: operations up to it are one pass over their elements, which TVM fuses with a sum."""

FORWARD_OPS = tuple(f"{PREFIX}conv{rank}d{kind}" for kind in ("", "_transpose") for rank in SPATIAL)
"""The stock convolutions; a transposed one is a dgrad."""

OPS = (*(PREFIX + entry.name for entry in NEW_OPS), *FORWARD_OPS)
"""Every operator that a region may hold."""


class Match(NamedTuple):
    """A convolution with what follows it.

    Attributes:
        call: of the convolution.
        direction, problem, epilogue: what it computes.
        operands: the convolution's two, the bias, the summand: in the order of the runtimes of libraries.
    """

    call: relay.Call
    direction: Direction
    problem: ConvProblem
    epilogue: Epilogue
    operands: tuple[relay.Expr, ...]


def direction_of(name: str) -> Direction:
    """The direction that an operator of OPS computes."""
    return BACKWARD_DATA if name.endswith(_TRANSPOSED) else entry_of(relay.op.get(name)).direction


def pattern_of(name: str, form: Form) -> DFPattern:
    """The pattern of an operator of OPS with a form."""
    pattern = is_op(name)(wildcard(), wildcard())
    for part in form:
        if part == "relu":
            pattern = is_op("nn.relu")(pattern)
        elif part == "bias":
            pattern = is_op("nn.bias_add")(pattern, wildcard())
        else:
            pattern = is_op("add")(pattern, wildcard())
    return pattern


def label_of(name: str, form: Form) -> str:
    """A pattern's name without its compiler's, such as "conv2d_bias_relu"."""
    return "_".join([name.removeprefix(PREFIX), *form])


LABELS = {
    label_of(name, form): (name, form)
    for name in OPS
    for form in FORMS[direction_of(name).name if name not in FORWARD_OPS else FORWARD.name]
}
"""Operator and form by label."""


def match_of(expr: relay.Call, name: str, form: Form) -> Match | str:
    """What an expression of a form computes, or why a region cannot have it.

    Args:
        expr: typed, and matched by `pattern_of(name, form)`.
        name: the convolution's operator.
        form: what follows it.

    Raises:
        ConvGradError: its convolution is not one of this package's.
    """
    value, bias, summand, axis = expr, None, None, 0
    chain = []
    for number in reversed(range(len(form))):
        part, inner = form[number], form[:number]
        if part == "bias":
            axis = int(value.attrs.axis) % len(value.checked_type.shape)
            value, bias = value.args
        elif part == "accumulate":
            place = next(i for i, each in enumerate(value.args) if _fits(each, name, inner))
            value, summand = value.args[place], value.args[1 - place]
        else:
            value = value.args[0]
        chain.append(value)
    problem = problem_of_call(value)
    direction = direction_of(name)
    layout = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}[
        direction.result
    ]
    if bias is not None and axis != layout.index("C"):
        return f"the bias is added along axis {axis}, and the channels are axis {layout.index('C')}"
    if summand is not None:
        if any(summand.same_as(each) for each in chain):
            return "the convolution is its own summand"
        reason = _summand_refusal(summand, value)
        if reason:
            return reason
    operands = (*value.args, *(each for each in (bias, summand) if each is not None))
    return Match(value, direction, problem, Epilogue(**dict.fromkeys(form, True)), operands)


def problem_of_call(call: relay.Call) -> ConvProblem:
    """The problem of a call of OPS.

    Raises:
        ConvGradError: see `problem_of`.
    """
    find = transposed_problem_of if call.op.name.endswith(_TRANSPOSED) else problem_of
    return find(call.op, call.attrs, types_of(call))


def matched(call: relay.Call) -> Match:
    """What a call in a region computes: of a composite function of this package's, or of an operator itself.

    Raises:
        UnsupportedError: it is neither.
    """
    name, body = "", call
    form: Form = ()
    if isinstance(call.op, relay.Function):
        body = call.op.body
        name, form = LABELS.get(str(call.op.attrs["Composite"]).partition(".")[2], ("", ()))
    elif isinstance(call.op, tvm.ir.Op):
        name = str(call.op.name)
    found = match_of(body, name, form) if name in OPS else f"{name or call.op} is not a convolution"
    if isinstance(found, str):
        raise UnsupportedError(f"a region of tvm_convgrad: {found}; make regions with relay_ops.partition.partition")
    if body is call:
        return found
    given = dict(zip(call.op.params, call.args, strict=True))
    return found._replace(operands=tuple(given[operand] for operand in found.operands))


def _fits(expr: relay.Expr, name: str, form: Form) -> bool:
    """Whether an expression has the operators of a form."""
    if not isinstance(expr, relay.Call) or not isinstance(expr.op, tvm.ir.Op):
        return False
    if not form:
        return expr.op.name == name
    wanted = {"relu": "nn.relu", "bias": "nn.bias_add", "accumulate": "add"}[form[-1]]
    sides = expr.args if form[-1] == "accumulate" else expr.args[:1]
    return expr.op.name == wanted and any(_fits(each, name, form[:-1]) for each in sides)


def _summand_refusal(summand: relay.Expr, call: relay.Call) -> str:
    if not tvm.ir.structural_equal(summand.checked_type, call.checked_type):
        return "the summand is not of the result's shape and type"
    if isinstance(summand, relay.Call) and isinstance(summand.op, tvm.ir.Op):
        kind = summand.op.get_attr("TOpPattern")
        if kind is not None and int(kind) <= _BROADCAST:
            return "elementwise operations make the summand: one pass with the sum, which TVM fuses"
    return ""


__all__ = [
    "FORMS",
    "FORWARD_OPS",
    "LABELS",
    "OPS",
    "Form",
    "Match",
    "direction_of",
    "label_of",
    "match_of",
    "matched",
    "pattern_of",
    "problem_of_call",
]
