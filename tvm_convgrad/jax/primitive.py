# SPDX-License-Identifier: Apache-2.0
"""The primitive of JAX that is a direction of a convolution: its gradients, forward and reverse, are directions again.

A direction is bilinear, so that JAX derives forward mode from the direction itself and reverse mode from the two
transposes that the catalogue's closure names; both any number of times. vmap is one call by the batching table. (A
`jax.custom_vjp` would give up forward mode, and with it Hessian-vector products by jvp of grad.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from legalize.batching import UnbatchedCall, vmap
from legalize.builder import Builder
from legalize.rearrange import rearrange
from tvm_convgrad.core.catalogue import BACKWARD_DATA, DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.geometry import SPATIAL, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.jax.signature import Served


@dataclass(frozen=True)
class Policy:
    """How it is chosen who computes.

    Attributes:
        always: take every kernel there is, without measuring.
        folder: of compiled kernels; None is the default one.
    """

    always: bool = False
    folder: Path | None = None


@dataclass(frozen=True)
class Call:
    """What of a call of the primitive is not data.

    Attributes:
        problem: the convolution.
        direction: a key of the catalogue's DIRECTIONS.
        precision: JAX's, which matters where XLA computes; kernels multiply and add in float32.
        policy: who computes.
    """

    problem: ConvProblem
    direction: str
    precision: object
    policy: Policy

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Shape and type of the result."""
        shape, dtype = self.problem.tensors[DIRECTIONS[self.direction].result]
        return jax.ShapeDtypeStruct(tuple(map(int, shape)), numpy_dtype(dtype))

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the operands."""
        found = [self.problem.tensors[name] for name in DIRECTIONS[self.direction].operands]
        return tuple(jax.ShapeDtypeStruct(tuple(map(int, shape)), numpy_dtype(dtype)) for shape, dtype in found)


convolution_p = Primitive("convgrad_convolution")
"""A direction of a convolution, of two operands; its parameter is `call`."""


def bind(served: Served, lhs: jax.Array, rhs: jax.Array, precision: object, policy: Policy) -> jax.Array:
    """A convolution of JAX by the primitive.

    Args:
        served: what it is.
        lhs, rhs: its operands.
        precision: JAX's parameter.
        policy: who computes.
    """
    call = Call(served.problem, served.direction, precision, policy)
    return cast(jax.Array, convolution_p.bind(lhs, _weight(served, rhs) if served.transposed else rhs, call=call))


class _Builder:
    """The operations of `legalize.builder.Builder` that move elements."""

    def shape(self, value: jax.Array) -> tuple[int, ...]:
        return tuple(value.shape)

    def transpose(self, value: jax.Array, permutation: Sequence[int]) -> jax.Array:
        return value if list(permutation) == list(range(value.ndim)) else jax.lax.transpose(value, tuple(permutation))

    def reshape(self, value: jax.Array, shape: Sequence[int]) -> jax.Array:
        return jax.lax.reshape(value, tuple(shape))


_BUILDER = cast(Builder, _Builder())


def _weight(served: Served, rhs: jax.Array) -> jax.Array:
    """The weight of the convolution whose dgrad has this rhs."""
    letters, problem = served.rhs_layout, served.problem
    weight = jax.lax.rev(rhs, [axis for axis, letter in enumerate(letters) if letter in SPATIAL[problem.rank]])
    if problem.groups == 1:  # the layout alone says that input and output channels change places
        return weight
    canonical = kernel_layout_of(problem.rank)
    weight = _BUILDER.transpose(weight, [letters.index(letter) for letter in canonical])
    pattern = "(g i) o ... -> (g o) i ..."
    return cast(jax.Array, rearrange(_BUILDER, weight, pattern, g=problem.groups))


def _abstract(first: jax.core.ShapedArray, second: jax.core.ShapedArray, *, call: Call) -> jax.core.ShapedArray:
    assert (first.shape, second.shape) == tuple(each.shape for each in call.operands), call
    weak = first.weak_type and second.weak_type  # as of JAX's own, on which the types of later results depend
    return jax.core.ShapedArray(call.result.shape, call.result.dtype, weak_type=weak)


def _transpose(number: int) -> Callable[..., jax.Array]:
    """The gradient of an operand from that of the result, by the closure."""

    def rule(cotangent: jax.Array, first: jax.Array, second: jax.Array, *, call: Call) -> jax.Array:
        direction = DIRECTIONS[call.direction]
        name, operands = direction.gradients[number]
        named = dict(zip((*direction.operands, "result"), (first, second, cotangent), strict=True))
        return convolution_p.bind(*(named[operand] for operand in operands), call=replace(call, direction=name))

    return rule


def _batch(values: Sequence[jax.Array], dims: Sequence[int | None], *, call: Call) -> tuple[jax.Array, int]:
    """vmap: one call of the same direction; zeros of no entries for a batch of none, which no call can have."""
    if any(dim is not None and value.shape[dim] == 0 for value, dim in zip(values, dims, strict=True)):
        return jax.lax.full((0, *call.result.shape), 0, call.result.dtype), 0
    direction, problem = DIRECTIONS[call.direction], call.problem
    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}

    def unbatched(found: UnbatchedCall) -> jax.Array:
        shapes = dict(zip(direction.operands, (each.shape for each in found.operands), strict=True))
        if found.data_shape is not None:
            shapes["data"] = tuple(found.data_shape)
        extents = {name: dict(zip(layouts[name], shape, strict=True)) for name, shape in shapes.items()}
        larger = replace(
            problem,
            batch=extents["data" if "data" in extents else "grad"]["N"],
            in_channels=extents["data"]["C"],
            out_channels=extents["grad"]["C"] if "grad" in extents else extents["weight"]["O"],
            groups=found.groups,
        )
        return convolution_p.bind(*found.operands, call=replace(call, problem=larger))

    result = vmap(
        _BUILDER,
        direction,
        [dict(zip(direction.operands, dims, strict=True))],
        dict(zip(direction.operands, values, strict=True)),
        layouts,
        problem.groups,
        problem.data_shape if direction is BACKWARD_DATA else None,
        unbatched,
    )
    return result, 0


@lru_cache(maxsize=4096)
def _compiled(call: Call) -> Callable[..., jax.Array]:
    def computed(first: jax.Array, second: jax.Array) -> jax.Array:
        return convolution_p.bind(first, second, call=call)

    # JAX's marks of a function that is one primitive: with jax_debug_nans a NaN in its result is told by this name, and
    # not looked for by calling the function again without jit, which would call this one.
    computed.__name__ = computed.__qualname__ = jax.lax.conv_general_dilated_p.name
    computed._apply_primitive = True  # type: ignore[attr-defined]
    return cast("Callable[..., jax.Array]", jax.jit(computed))


def _eager(first: jax.Array, second: jax.Array, *, call: Call) -> jax.Array:
    with jax.disable_jit(False):  # XLA computes it in any case
        return _compiled(call)(first, second)


convolution_p.def_abstract_eval(_abstract)
convolution_p.def_impl(_eager)
ad.defbilinear(convolution_p, _transpose(0), _transpose(1))
batching.primitive_batchers[convolution_p] = _batch
# JAX's rule of products, which scales terms of the series in another way in some versions.
jet.jet_rules[convolution_p] = partial(jet.jet_rules[jax.lax.conv_general_dilated_p].func, convolution_p)

__all__ = ["Call", "Policy", "bind", "convolution_p"]
