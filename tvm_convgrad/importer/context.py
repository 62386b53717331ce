# SPDX-License-Identifier: Apache-2.0
"""The context of a converter: it emits Relax, and gives the extents, type and origin of every value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from relax_ops.compat import Constant, array_of
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.attributes import MAX_INTEGER
from tvm_convgrad.importer.tensors import Array, numpy_dtype
from tvm_convgrad.training.ir.graph import Extent, Shape, element_type, static_shape

MAX_ELEMENTS = 2**40
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Context:
    """The function under construction.

    Attributes:
        builder: Relax's block builder, inside the function.
        lifted: a sentence for each gradient that was recognised.
        annotation: the type that the program states for the result of the call, or None.
    """

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self.builder = builder
        self.lifted: list[str] = []
        self.annotation: Any = None
        self._made: dict[Any, Any] = {}

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression. Its type is inferred and its extents are checked.

        Raises:
            ModelError: its extents are negative or absurdly large.
        """
        var = self.builder.emit(expr)
        if isinstance(var.ty, relax.TensorType):
            self.check(var)
        self._made[var] = expr
        return var

    def check(self, value: relax.Expr) -> None:
        """Refuse tensors that cannot be."""
        extents = [extent for extent in self.shape(value) if isinstance(extent, int)]
        if any(extent < 0 for extent in extents) or math.prod(extents) > MAX_ELEMENTS:
            raise ModelError(f"the result would have the extents {extents}, which no tensor can have")

    def fields(self, expr: relax.Expr, count: int) -> list[relax.Var]:
        """Bind an expression of several results, and each of them."""
        var = self.builder.emit(expr)
        values = [self.builder.emit(relax.TupleGetItem(var, index)) for index in range(count)]
        for value in values:
            self.check(value)
        return values

    def origin(self, value: relax.Expr) -> relax.Call | None:
        """The call that made a value, or None."""
        made = self._made.get(value) if isinstance(value, relax.Var) else None
        return made if isinstance(made, tvm.ir.Call) else None

    def shape(self, value: relax.Expr) -> Shape:
        """Extents: ints, or symbolic expressions."""
        return static_shape(value)

    def rank(self, value: relax.Expr) -> int:
        """The number of axes."""
        return len(self.shape(value))

    def static(self, value: relax.Expr, what: str) -> tuple[int, ...]:
        """Extents that are all known.

        Raises:
            ModelError: some are not; `what` needs them.
        """
        shape = self.shape(value)
        if not all(isinstance(extent, int) for extent in shape):
            raise ModelError(f"{what} needs known extents, but its operand has {list(map(str, shape))}")
        return shape

    def dtype(self, value: relax.Expr) -> str:
        """The element type."""
        return element_type(value)

    def is_float(self, value: relax.Expr) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.dtype(value) in FLOATS

    def constant(self, value: relax.Expr) -> Array | None:
        """What a constant holds, or None if the value is not constant."""
        return array_of(value) if isinstance(value, Constant) else None

    def const(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """A constant tensor.

        Raises:
            ModelError: the element type cannot hold the value.
        """
        with np.errstate(all="ignore"):
            try:
                array = np.asarray(value).astype(numpy_dtype(dtype))
            except (OverflowError, ValueError, TypeError) as error:
                raise ModelError(f"{str(value)[:60]} is not of type {dtype}") from error
        return relax.const(array, dtype)

    def scalar_like(self, value: float, like: relax.Expr) -> relax.Expr:
        """A constant scalar of the element type of `like`."""
        return self.const(value, self.dtype(like))

    def reshape(self, value: relax.Expr, shape: Sequence[Extent]) -> relax.Expr:
        """The same elements with other extents; nothing is emitted if they are the same already."""
        if same_extents(self.shape(value), shape):
            return value
        before, after = self.shape(value), tuple(shape)
        if all(isinstance(extent, int) for extent in (*before, *after)) and math.prod(before) != math.prod(after):
            raise ModelError(f"{list(before)} cannot become {list(after)}: other numbers of elements")
        return self.emit(relax.op.reshape(value, relax.ShapeExpr(list(after))))

    def permute(self, value: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """The axes in another order."""
        if sorted(axes) != list(range(self.rank(value))):
            raise ModelError(f"{list(axes)} is not an order of {self.rank(value)} axes")
        return value if list(axes) == sorted(axes) else self.emit(relax.op.permute_dims(value, list(axes)))

    def cast(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """Another element type; an empty name leaves it as it is."""
        if not dtype or dtype == self.dtype(value):
            return value
        numpy_dtype(dtype)
        return self.emit(relax.op.astype(value, dtype))

    def slice(
        self, value: relax.Expr, axes: Sequence[int], begin: Sequence[Extent], end: Sequence[Extent]
    ) -> relax.Expr:
        """A part with step 1."""
        return self.emit(relax.op.strided_slice(value, [int(a) for a in axes], list(begin), list(end), [1] * len(axes)))


def same_extents(first: Sequence[Extent], second: Sequence[Extent]) -> bool:
    """Whether two shapes are surely equal."""
    return len(first) == len(second) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else a is b or tvm_ffi.structural_equal(a, b)
        for a, b in zip(first, second, strict=True)
        if not (isinstance(a, int) and isinstance(b, int) and a == b)
    )


def extent_product(extents: Sequence[Extent]) -> Extent:
    """The product of extents, of which some may be symbolic."""
    product: Any = 1
    for extent in extents:
        product = product * extent
    if isinstance(product, int) and abs(product) > MAX_INTEGER:
        raise ModelError(f"{product} elements are too many")
    return product
