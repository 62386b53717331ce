# SPDX-License-Identifier: Apache-2.0
"""Sums over all but the last axes, in two calls, for GPUs.

TVM's schedule of such a sum, as batch norms and biases need in NHWC, gives 16 results to a block of threads and all
summands of a result to one block: of 64 channels it occupies 4 of a GPU's 132 multiprocessors. On an H100 these sums
took 20 of the 27 ms of a float16 step of ResNet-18 (batch 32). The first call sums each image, with as many times more
blocks; the second sums over the images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.ir import shape_values
from tvm_convgrad.core.geometry import Size
from tvm_convgrad.core.problem import REPRESENTATIVE_BATCH
from tvm_convgrad.training.ir.graph import element_type, has_single_blocks, is_call, operator_name, rewritten

RESULTS = 16
"""Neighbouring results of a block of threads, in TVM's schedule."""

BLOCKS = 512
"""Blocks of threads that a call should have, about four for each multiprocessor of a large GPU."""

SUMMANDS = 512
"""Summands of a result that one block takes in less time than another call would."""


_Reduction = Callable[[relax.Expr, list[int]], relax.Expr]
_REDUCTIONS: dict[str, _Reduction] = {"relax.sum": relax.op.sum, "relax.mean": relax.op.mean}


def SumInStages() -> tvm.transform.Pass:
    """The pass that replaces sums and means over leading axes, with too few results for a GPU, by sums of sums."""
    return tvm.transform.module_pass(_in_stages, opt_level=0, name="ConvgradSumInStages")


def _in_stages(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    return rewritten(module, _Sums(module))


@mutator
class _Sums(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self._sees_views = has_single_blocks(module)

    def visit_call_(self, call: relax.Call) -> Any:
        """A sum or mean over all leading axes in two stages; everything else as it is."""
        call = super().visit_call_(call)
        reduce = _REDUCTIONS.get(operator_name(call))
        if reduce is None or call.attrs.axis is None or not element_type(call).startswith(("float", "bfloat")):
            return call
        shape = call.args[0].ty.shape
        extents = None if shape is None else shape_values(shape)
        if extents is None:
            return call
        axes = sorted(int(axis) % len(extents) for axis in call.attrs.axis)
        if axes != list(range(len(axes))) or not _is_worth_it(extents, len(axes)):
            return call
        total = self._in_two(reduce, call.args[0], extents, len(axes))
        if total is None:
            return call
        return relax.op.reshape(total, call.ty.shape) if call.attrs.keepdims else total

    def _in_two(self, reduce: _Reduction, data: relax.Expr, extents: Sequence[Size], leading: int) -> relax.Expr | None:
        """The sum over the first axes, without them: over all but the first that is not 1, and then over that.

        A mean is the mean of means of as many numbers each, so that no count exceeds what float16 holds.
        """
        if leading == 1:
            data, leading = self._images(data, extents)
        if leading == 1:
            parts = _parts(extents)
            if parts is None:
                return None
            data, leading = self.builder_.emit(relax.op.reshape(data, [*parts, *extents[1:]])), 2
        extents = shape_values(data.ty.shape) or ()
        kept = next((axis for axis in range(leading) if not _is(extents[axis], 1)), 0)
        rest = [axis for axis in range(leading) if axis != kept]
        if all(_is(extents[axis], 1) for axis in rest):
            return None
        return self.builder_.emit(reduce(self.builder_.emit(reduce(data, rest)), [0]))

    def _images(self, rows: relax.Expr, extents: Sequence[Size]) -> tuple[relax.Expr, int]:
        """The images that rows of pixels are a view of, and how many leading axes they have; or the rows and 1.

        TVM fuses what computes the images with a sum over them, but not with one of a view.
        """
        value = self.lookup_binding(rows) if self._sees_views and isinstance(rows, relax.Var) else None
        if value is None or not is_call(value, "relax.reshape"):
            return rows, 1
        images = value.args[0]
        own = shape_values(images.ty.shape) or ()
        kept = len(extents) - 1
        if len(own) <= len(extents) or not all(map(_is, own[len(own) - kept :], extents[1:])):
            return rows, 1
        return images, len(own) - kept


def _is(extent: Size, other: Size) -> bool:
    """Whether both are the same number; of symbolic extents that is not asked."""
    return isinstance(extent, int) and isinstance(other, int) and extent == other


def _is_worth_it(extents: Sequence[Size], leading: int) -> bool:
    """Whether the sum over the first axes has many summands for each result, and too few results for a GPU."""
    known = [each if isinstance(each, int) else REPRESENTATIVE_BATCH for each in extents]
    results = math.prod(known[leading:])
    return leading < len(known) and math.prod(known[:leading]) > SUMMANDS and 0 < results < BLOCKS * RESULTS


def _parts(extents: Sequence[Size]) -> tuple[int, int] | None:
    """The extents of two axes in the place of the first, so that a sum over the second has blocks enough.

    Example:
        The gradient of the bias of a linear layer:

            assert _parts([100352, 96]) == (98, 1024)
    """
    extent, results = extents[0], math.prod(extents[1:])
    if not isinstance(extent, int) or not isinstance(results, int):
        return None
    least = -(-BLOCKS * RESULTS // results)
    outer = next((each for each in range(least, extent // 2 + 1) if extent % each == 0), None)
    return None if outer is None else (outer, extent // outer)
