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
        shifted: what negative values have been added to, to count from the front; None: nothing.
    """

    numbers: Array
    reshaped: bool = False
    shifted: int | None = None


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
                yield _Use(moved.numbers, IndexRange.of_classes(classes, int(call.attrs.ignore_index)))
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
            yield _Use(moved.numbers, IndexRange.of_rows(extent))

    def _vectors(self, call: relax.Call, first: int) -> Iterator[_Use]:
        """Indices whose last axis has one for each axis of the data from `first` on."""
        shape, moved = known_shape(call.args[0].ty), self.moved(call.args[1])
        if shape is None or moved is None or not moved.numbers.ndim:
            return
        for place, extent in enumerate(shape[first : first + moved.numbers.shape[-1]]):
            if isinstance(extent, int) and moved.shifted in (None, extent):
                yield _Use(moved.numbers[..., place], IndexRange.of_rows(extent))

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
            inside = all(isinstance(bound, int) and bound >= 0 for bound in (begin, end))
            if not inside or not self._divides(moved, shape, axis):
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
        if not known or len({part.shifted for part in known}) > 1:
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
        return _Moved(numbers, any(part.reshaped for part in known), known[0].shifted)

    def _take(self, call: relax.Call) -> _Moved | None:
        """Of elements of inputs, at constant places."""
        moved, shape = self.moved(call.args[0]), known_shape(call.args[0].ty)
        if moved is None or shape is None or not isinstance(call.args[1], Constant) or call.attrs.axis is None:
            return None
        places, axis = array_of(call.args[1]), int(call.attrs.axis)
        extent = shape[axis]
        if not self._divides(moved, shape, axis) or not isinstance(extent, int):
            return None
        if places.size and (places.min() < 0 or places.max() >= extent):
            return None
        return replace(moved, numbers=np.take(moved.numbers, places, axis))

    def _where(self, call: relax.Call) -> _Moved | None:
        """where(x < 0, x + extent, x), by which frontends count negative indices from the end."""
        condition, last, x = call.args
        less, add = (self._values.get(each) if isinstance(each, relax.Var) else None for each in (condition, last))
        moved = self.moved(x)
        if moved is None or moved.shifted is not None or less is None or add is None:
            return None
        if not (is_call(less, "relax.less") and is_call(add, "relax.add")):
            return None
        if not (less.args[0].same_as(x) and add.args[0].same_as(x) and _scalar(less.args[1]) == 0):
            return None
        extent = _scalar(add.args[1])
        return None if extent is None else replace(moved, shifted=extent)

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


def _scalar(value: relax.Expr) -> int | None:
    """The value of a constant that has one."""
    if not isinstance(value, Constant) or array_of(value).size != 1:
        return None
    return int(array_of(value).item())


__all__ = ["index_ranges"]
