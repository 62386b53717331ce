# SPDX-License-Identifier: Apache-2.0
"""The ranges of a model's inputs that are indices as they are, so that wrong ones are refused before a step runs.

An index is followed back to the inputs through operators that only move elements. Which elements it reads is computed
by moving their numbers, so that a slice brings a range for what it reads alone. An index that is computed otherwise
(clip, where, a sum) brings none: `checked_indices` has what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import numpy as np
import tvm
from tvm import relax

from relax_ops.compat import Constant, arithmetic, array_of
from relax_ops.expressions import axis_order, known_shape, same_extent
from relax_ops.ir import extents_of
from tvm_convgrad.core.index_range import Array, IndexRange
from tvm_convgrad.training.ir.graph import Extent, bindings_of, element_type, is_call, operator_name

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_ELSE = -1
_MAX_RANGES = 62


@dataclass(frozen=True)
class _Moved:
    """What elements of inputs a tensor has.

    Attributes:
        numbers: which element is where, or _ELSE for something else; symbolic extents are 1.
        reshaped: whether axes have been joined or divided.
        shifted: what has been added to negative values, to count from the front; None: nothing.
        replaced: a value, and the constant in its place; None: all values are as they were.
    """

    numbers: Array
    reshaped: bool = False
    shifted: int | None = None
    replaced: tuple[int, int] | None = None

    def use(self, taken: IndexRange, numbers: Array | None = None) -> Iterator[_Use]:
        """The use as indices that are in a range, of all the elements or of some; none if the constant is not in it."""
        if self.replaced is not None:
            value, constant = self.replaced
            if constant not in taken:
                return
            taken = taken.with_other(value)
        yield _Use(self.numbers if numbers is None else numbers, taken)


@dataclass(frozen=True)
class _Use:
    """One use of elements as indices: their numbers, and the range that it takes."""

    numbers: Array
    range: IndexRange


def index_ranges(function: relax.Function, inputs: Sequence[relax.Var]) -> dict[relax.Var, IndexRange]:
    """The ranges of those inputs all of whose elements are used as indices.

    Args:
        function: straight-line code; what none of its results is computed from does not count.
        inputs: parameters of it.

    Returns:
        For each such input the values that are in range for all uses of an element. If uses differ from element to
        element, the range has the values of all of them; NaN is the answer to the others.
    """
    tracer = _Tracer(function, inputs)
    uses = [use for call in tracer.live_calls() for use in tracer.uses(call)]
    found: dict[relax.Var, IndexRange] = {}
    for var, (begin, end) in tracer.places.items():
        range_ = _range_of(begin, end, uses)
        if range_ is not None:
            found[var] = range_
    return found


def _range_of(begin: int, end: int, uses: Sequence[_Use]) -> IndexRange | None:
    """The range of the elements from number `begin` to `end`; None if one of them is not used."""
    masks: dict[IndexRange, Array] = {}
    for use in uses:
        inside = use.numbers[(use.numbers >= begin) & (use.numbers < end)]
        if inside.size:
            masks.setdefault(use.range, np.zeros(end - begin, bool))[inside - begin] = True
    if not masks or len(masks) > _MAX_RANGES:
        return None
    bits = sum(mask.astype("int64") << place for place, mask in enumerate(masks.values()))
    kinds = np.unique(bits).tolist()  # which uses an element has
    if 0 in kinds:
        return None
    ranges = list(masks)
    taken = [reduce(and_, (each for place, each in enumerate(ranges) if kind >> place & 1)) for kind in kinds]
    return reduce(IndexRange.hull, taken)


class _Tracer:
    """Follows variables of a function back to its inputs.

    Attributes:
        places: of each input of integers, the numbers of its elements: the first, and one behind the last.
    """

    def __init__(self, function: relax.Function, inputs: Sequence[relax.Var]) -> None:
        self._function = function
        self._values: dict[relax.Var, relax.Expr] = {binding.var: binding.value for binding in bindings_of(function)}
        self._moved: dict[relax.Var, _Moved | None] = {}
        self._rules: Mapping[str, Callable[[relax.Call], _Moved | None]] = {
            "relax.reshape": self._reshape,
            "relax.flatten": self._reshape,
            "relax.expand_dims": self._ones,
            "relax.squeeze": self._ones,
            "relax.permute_dims": self._permute_dims,
            "relax.broadcast_to": self._broadcast_to,
            "relax.astype": self._astype,
            "relax.strided_slice": self._strided_slice,
            "relax.flip": self._flip,
            "relax.concat": self._concat,
            "relax.take": self._take,
            "relax.where": self._where,
        }
        self._analyzer = arithmetic.Analyzer()  # to which symbolic extents are 1
        for extent in relax.analysis.defined_symbolic_vars(function):
            self._analyzer.bind(extent, tvm.tirx.IntImm("int64", 1))
        self.places: dict[relax.Var, tuple[int, int]] = {}
        end = 0
        for var in inputs:
            shape = self._shape(var)
            if shape is not None and element_type(var) in _INTEGERS:
                self.places[var] = (end, end + int(np.prod(shape)))
                end = self.places[var][1]

    def live_calls(self) -> Iterator[relax.Call]:
        """The calls that a result is computed from."""
        queue, seen = list(relax.analysis.free_vars(self._function.body.body)), set()
        while queue:
            variable = queue.pop()
            if variable in seen or variable not in self._values:
                continue
            seen.add(variable)
            value = self._values[variable]
            queue.extend(relax.analysis.free_vars(value))
            if isinstance(value, tvm.ir.Call):
                yield value

    def uses(self, call: relax.Call) -> Iterator[_Use]:
        """The uses of elements of inputs as indices by a call."""
        name = operator_name(call)
        if name in ("relax.gather_nd", "relax.scatter_nd"):
            yield from self._vectors(call, int(call.attrs.batch_dims) if name == "relax.gather_nd" else 0)
        elif name == "relax.index_put":
            for extent, indices in zip(known_shape(call.args[0].ty) or (), call.args[1].fields, strict=False):
                yield from self._rows(indices, extent)
        elif name == "relax.nn.nll_loss":
            scores = known_shape(call.args[0].ty) or ()
            classes = scores[1 if len(scores) > 1 else 0] if scores else None
            moved = self.moved(call.args[1])
            if isinstance(classes, int) and moved is not None and moved.shifted is None:
                yield from moved.use(IndexRange.of_classes(classes, int(call.attrs.ignore_index)))
        elif name in ("relax.gather_elements", "relax.scatter_elements", "relax.take"):
            if name == "relax.take" and call.attrs.mode not in ("fast", "nan"):
                return  # the others take any index
            shape, axis = known_shape(call.args[0].ty), call.attrs.axis
            if shape and (axis is not None or len(shape) == 1):
                yield from self._rows(call.args[1], shape[int(axis or 0)])

    def _rows(self, indices: relax.Expr, extent: Extent) -> Iterator[_Use]:
        """Indices of one axis."""
        moved = self.moved(indices)
        if isinstance(extent, int) and moved is not None and moved.shifted in (None, extent):
            yield from moved.use(IndexRange.of_rows(extent))

    def _vectors(self, call: relax.Call, first: int) -> Iterator[_Use]:
        """Indices whose last axis has one for each axis of the data from `first` on."""
        shape, moved = known_shape(call.args[0].ty), self.moved(call.args[1])
        if shape is None or moved is None or not moved.numbers.ndim:
            return
        for place, extent in enumerate(shape[first : first + moved.numbers.shape[-1]]):
            if isinstance(extent, int) and moved.shifted in (None, extent):
                yield from moved.use(IndexRange.of_rows(extent), moved.numbers[..., place])

    def moved(self, expr: relax.Expr) -> _Moved | None:
        """The elements that an expression has; None if it has none, or computes with them."""
        if not isinstance(expr, relax.Var):
            return None
        if expr not in self._moved:
            found = self._found(expr)
            # What a rule does not understand has another shape than it finds.
            fits = found is not None and found.numbers.shape == self._shape(expr)
            self._moved[expr] = found if fits else None
        return self._moved[expr]

    def _found(self, var: relax.Var) -> _Moved | None:
        if var in self.places:
            begin, end = self.places[var]
            return _Moved(np.arange(begin, end).reshape(self._shape(var) or ()))
        value = self._values.get(var)
        if isinstance(value, tvm.ir.Call):
            rule = self._rules.get(operator_name(value))
            return None if rule is None or self._shape(value) is None else rule(value)
        if isinstance(value, relax.TupleGetItem):
            return self._split(value)
        return self.moved(value) if isinstance(value, relax.Var) else None

    def _reshape(self, call: relax.Call) -> _Moved | None:
        moved, shape = self.moved(call.args[0]), self._shape(call)
        if moved is None or shape is None or np.prod(shape) != moved.numbers.size:
            return None
        return replace(moved, numbers=moved.numbers.reshape(shape), reshaped=True)

    def _ones(self, call: relax.Call) -> _Moved | None:
        moved = self._reshape(call)
        operand = self.moved(call.args[0])
        return None if moved is None or operand is None else replace(moved, reshaped=operand.reshaped)

    def _permute_dims(self, call: relax.Call) -> _Moved | None:
        moved = self.moved(call.args[0])
        return None if moved is None else replace(moved, numbers=moved.numbers.transpose(axis_order(call)))

    def _broadcast_to(self, call: relax.Call) -> _Moved | None:
        moved, shape = self.moved(call.args[0]), self._shape(call)
        if moved is None or shape is None:
            return None
        return replace(moved, numbers=np.broadcast_to(moved.numbers, shape))

    def _astype(self, call: relax.Call) -> _Moved | None:
        """Between types of at least 32 bits with a sign, or to a wider type; others change indices."""
        names = element_type(call.args[0]), element_type(call)
        if not set(names) <= set(_INTEGERS):
            return None
        old, new = map(np.dtype, names)
        kept = np.can_cast(old, new) or new in (np.dtype("int32"), np.dtype("int64"))
        return self.moved(call.args[0]) if kept else None

    def _flip(self, call: relax.Call) -> _Moved | None:
        moved = self.moved(call.args[0])
        return None if moved is None else replace(moved, numbers=np.flip(moved.numbers, int(call.attrs.axis)))

    def _strided_slice(self, call: relax.Call) -> _Moved | None:
        moved, shape = self.moved(call.args[0]), known_shape(call.args[0].ty)
        if moved is None or shape is None:
            return None
        axes, begins, ends = (extents_of(arg.fields) for arg in call.args[1:4])
        strides = extents_of(call.args[4].fields) if len(call.args) > 4 else (1,) * len(axes)
        result = known_shape(call.ty) or ()
        for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
            if not isinstance(axis, int) or not isinstance(stride, int) or stride < 1 or len(result) != len(shape):
                return None
            if stride == 1 and same_extent(result[axis], shape[axis]):
                continue  # all of it, symbolic or not
            least = 0 if call.attrs.assume_inbound else -(2**31)  # negative bounds count from the end
            known = all(isinstance(bound, int) and bound >= least for bound in (begin, end))
            if not known or not self._divides(moved, shape, axis):
                return None
            along = (slice(None),) * (axis % len(shape))
            moved = replace(moved, numbers=moved.numbers[(*along, slice(begin, end, stride))])
        return moved

    def _split(self, item: relax.TupleGetItem) -> _Moved | None:
        call = self._values.get(item.tuple_value)
        if call is None or not is_call(call, "relax.split"):
            return None
        moved, shape = self.moved(call.args[0]), known_shape(call.args[0].ty)
        axis, sections = int(call.attrs.axis), call.attrs.indices_or_sections
        if moved is None or shape is None or not self._divides(moved, shape, axis):
            return None
        if isinstance(sections, tvm.tirx.IntImm):  # all parts but the last have the same extent
            size = -(-int(moved.numbers.shape[axis]) // int(sections))
            bounds = [size * number for number in range(1, int(sections))]
        else:
            bounds = [int(bound) for bound in sections]
        return replace(moved, numbers=np.split(moved.numbers, bounds, axis)[item.index])

    def _concat(self, call: relax.Call) -> _Moved | None:
        """Other operands than elements of inputs may be among them."""
        if not isinstance(call.args[0], relax.Tuple):
            return None
        parts = [self.moved(field) for field in call.args[0].fields]
        known = [part for part in parts if part is not None]
        if not known or len({(part.shifted, part.replaced) for part in known}) > 1:
            return None
        shapes = [self._shape(field) for field in call.args[0].fields]
        arrays = [
            np.full(shape, _ELSE) if part is None else part.numbers
            for part, shape in zip(parts, shapes, strict=True)
            if shape is not None
        ]
        if len(arrays) < len(parts):
            return None
        numbers = np.concatenate(arrays, int(call.attrs.axis or 0))
        return replace(known[0], numbers=numbers, reshaped=any(part.reshaped for part in known))

    def _take(self, call: relax.Call) -> _Moved | None:
        """Of elements of inputs, at constant places."""
        moved, shape = self.moved(call.args[0]), known_shape(call.args[0].ty)
        places = self._constant(call.args[1])
        if moved is None or shape is None or places is None or call.attrs.axis is None:
            return None
        axis = int(call.attrs.axis)
        extent = shape[axis]
        if not self._divides(moved, shape, axis) or not isinstance(extent, int):
            return None
        if places.size and (places.min() < 0 or places.max() >= extent):
            return None
        return replace(moved, numbers=np.take(moved.numbers, places, axis))

    def _where(self, call: relax.Call) -> _Moved | None:
        """where(x < 0, x + extent, x), by which frontends count negative indices from the end, and a value replaced."""
        condition = self._values.get(call.args[0]) if isinstance(call.args[0], relax.Var) else None
        if not isinstance(condition, tvm.ir.Call) or len(condition.args) != 2:
            return None
        name, (x, bound) = operator_name(condition), condition.args
        compared, moved = self._scalar(bound), self.moved(x)
        taken, other = call.args[1:] if name == "relax.not_equal" else reversed(call.args[1:])
        if moved is None or compared is None or moved.shifted is not None or not taken.same_as(x):
            return None
        if name == "relax.less":
            last = self._values.get(other) if isinstance(other, relax.Var) else None
            if compared != 0 or last is None or not is_call(last, "relax.add") or not last.args[0].same_as(x):
                return None
            extent = self._scalar(last.args[1])
            return None if extent is None else replace(moved, shifted=extent)
        constant = self._scalar(other)
        if name not in ("relax.equal", "relax.not_equal") or constant is None or moved.replaced is not None:
            return None
        return replace(moved, replaced=(compared, constant))

    def _constant(self, expr: relax.Expr) -> Array | None:
        """The constant that an expression is, or a variable is bound to."""
        while isinstance(expr, relax.Var) and expr in self._values:
            expr = self._values[expr]
        return array_of(expr) if isinstance(expr, Constant) else None

    def _scalar(self, expr: relax.Expr) -> int | None:
        """The number that an expression is."""
        found = self._constant(expr)
        return int(found.item()) if found is not None and found.size == 1 else None

    def _shape(self, expr: relax.Expr) -> tuple[int, ...] | None:
        """The extents of a tensor whose symbolic ones are 1; None if they are not known."""
        shape = known_shape(expr.ty) if isinstance(expr.ty, relax.TensorType) else None
        if shape is None:
            return None
        found = [extent if isinstance(extent, int) else _number(self._analyzer.simplify(extent)) for extent in shape]
        numbers = [extent for extent in found if extent is not None]
        return tuple(numbers) if len(numbers) == len(found) else None

    def _divides(self, moved: _Moved, shape: Sequence[Extent], axis: int) -> bool:
        """Whether a part along an axis reads the same elements whatever the symbolic extents are."""
        fixed = all(isinstance(extent, int) for extent in shape)
        return fixed or (isinstance(shape[axis], int) and not moved.reshaped)


def _number(value: relax.Expr) -> int | None:
    return int(value) if isinstance(value, tvm.tirx.IntImm) else None


__all__ = ["index_ranges"]
