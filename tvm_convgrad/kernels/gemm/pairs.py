# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad of bfloat16 as the same GEMM over words: pairs of source channels for dot products.

`paired` turns the spec of a problem into that of its words (`codegen.dot_product`): half as many source channels, which
taps, blocks, panels and estimates then count. An operand whose pairs lie side by side, as channels do in NHWC, is a
tensor of words, read in place or packed like float32; of any other a word is made of two elements while it is packed.
The last word of an odd number of channels has a zero in its high half, in both operands. Tiles want a number of words
that they divide: words of zeros are added to both operands while these are packed (`paired`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import HALF, WORD, as_number, words
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Expr, Index, choose, expr, load, load_masked, splat
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.kernels.spec import ConvSpec, Pairs, View, WeightView
from tvm_convgrad.kernels.vectors import converts_halves, load_vector


def paired(spec: ConvSpec, words: int = 0) -> ConvSpec:
    """The spec of the words of a spec whose operands are bfloat16; of more `words` than it has, the last are zeros."""
    own = -(-spec.source_channels // 2)
    words = words or own
    odd = spec.source_channels % 2 == 1 or words > own
    view, weight = spec.source, spec.weight
    source_strides = (view.batch, *view.spatial)
    weight_strides = (spec.weight_result_stride, spec.weight_group_stride, *_used(spec))
    pairs = Pairs(view.channel, spec.weight_source_stride, spec.source_channels)
    weight_step, group_step = spec.weight_result_stride, spec.weight_group_stride
    if view.channel == 1 and not odd and _even(source_strides):
        view, pairs = _words_of(view), replace(pairs, source=0)
    else:
        view = replace(view, channel=2 * view.channel)
    source_step = 2 * spec.weight_source_stride
    if spec.weight_source_stride == 1 and not odd and _even(weight_strides):
        d, h, w = (stride // 2 for stride in weight.spatial)
        weight = replace(weight, spatial=(d, h, w), size=weight.size // 2, dtype=WORD)
        pairs, source_step = replace(pairs, weight=0), 1
        weight_step, group_step = weight_step // 2, group_step // 2
    return replace(
        spec,
        source_channels=words,
        source=view,
        weight=weight,
        weight_source_stride=source_step,
        weight_result_stride=weight_step,
        weight_group_stride=group_step,
        pairs=pairs,
    )


def _used(spec: ConvSpec) -> Iterable[int]:
    """The strides of W along the axes on which a tap is not the first."""
    taps = [phase for phases in spec.phases for phase in phases]
    return [stride for axis, stride in enumerate(spec.weight.spatial) if any(k for t in taps for k, _ in t[axis].taps)]


def _even(strides: Iterable[int]) -> bool:
    return all(stride % 2 == 0 for stride in strides)


def _words_of(view: View) -> View:
    d, h, w = (stride // 2 for stride in view.spatial)
    return replace(view, batch=view.batch // 2, spatial=(d, h, w), size=view.size // 2, dtype=WORD)


class Operand:
    """Reads an operand's elements as the register tile multiplies them: numbers in the type of the sums, or words.

    Attributes:
        vectors: whether vectors of them can be read; has_numbers: as they are, or converted.
    """

    def __init__(
        self, buffer: Buffer, dtype: str, pair: int = 0, channels: int = 0, words: int = 0, *, converts: bool = False
    ) -> None:
        """Describe an operand.

        Args:
            buffer: a flat view, of HALF where words are made of two elements.
            dtype: of the sums.
            pair: elements from the first of a word to its second; 0 if elements are not made to words.
            channels: the reduced channels of the tensor, if elements are made to words.
            words: how many words are made of them; those that have no channel are zeros.
            converts: whether vectors of another type are converted in registers.
        """
        self.buffer, self._dtype, self._pair, self._channels, self._words = buffer, dtype, pair, channels, words
        self.has_numbers = converts or str(buffer.dtype) == dtype
        self.vectors = pair != 0 or self.has_numbers

    def element(self, at: Index, channel: Index) -> Expr:
        """One element; `channel` is its number among those of the group, words counted as one."""
        if not self._pair:
            return as_number(load(self.buffer, at), self._dtype)
        low, high = load(self.buffer, at), load(self.buffer, at + self._pair)
        first, second = self._first(channel), self._second(channel)
        if first is not None:
            low = choose(first, low, tir.const(0, HALF))
        if second is not None:
            high = choose(second, high, tir.const(0, HALF))
        return words(low, high)

    def vector(self, at: Index, lanes: int, channel: Index, mask: Expr | None = None) -> Expr:
        """`lanes` contiguous elements of one channel; with a mask those whose mask is true, and zeros."""
        if not self._pair:
            return as_number(load_vector(self.buffer, at, lanes, mask), self._dtype)
        low = self._half(at, lanes, mask, self._first(channel))
        return words(low, self._half(at + self._pair, lanes, mask, self._second(channel)))

    def _half(self, at: Index, lanes: int, mask: Expr | None, exists: Expr | None) -> Expr:
        """The first or the second elements of a vector of words, zeros if they do not exist."""
        if exists is not None:
            every = splat(exists, lanes)
            mask = every if mask is None else tir.And(mask, every)
        return load(self.buffer, at, lanes) if mask is None else load_masked(self.buffer, at, mask, lanes)

    def _first(self, channel: Index) -> Expr | None:
        """Whether a word has a first element; None if all have one."""
        own = -(-self._channels // 2)
        return expr(channel) < own if self._words > own else None

    def _second(self, channel: Index) -> Expr | None:
        """Whether a word has a second element; None if all have one."""
        if self._channels % 2 == 0 and self._words <= self._channels // 2:
            return None
        return expr(channel) < self._channels // 2


def operands_of(spec: ConvSpec, source: Buffer, weight: Buffer, machine: Machine) -> tuple[Operand, Operand]:
    """The operands (source, W) of a spec, in flat views of them."""
    pairs = spec.pairs or Pairs(0, 0, 0)
    made = pairs.channels, spec.source_channels
    of_source, of_weight = (
        spec.pairs is None and converts_halves(machine, view.dtype, spec.dtype) and str(each.dtype) == _seen_as(view)
        for view, each in ((spec.source, source), (spec.weight, weight))
    )
    return (
        Operand(source, spec.dtype, pairs.source, *made, converts=of_source),
        Operand(weight, spec.dtype, pairs.weight, *made, converts=of_weight),
    )


def _seen_as(view: View | WeightView) -> str:
    """The type that vectors of a tensor of 16 bits are loaded as."""
    return HALF if view.dtype == "bfloat16" else view.dtype


__all__ = ["Operand", "operands_of", "paired"]
