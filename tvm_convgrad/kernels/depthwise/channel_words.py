# SPDX-License-Identifier: Apache-2.0
"""Dot products of bfloat16 where vectors run over channels: a word has two pixels, or two channels of a small group."""

from __future__ import annotations

from collections.abc import Callable

from tvm_convgrad.codegen.dot_product import WORD, as_number, contiguous_words, high_halves, joined_words, word_at
from tvm_convgrad.codegen.loops import Index, Loops, load, splat
from tvm_convgrad.codegen.packing import shuffle
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.kernels.depthwise.taps import tap_run
from tvm_convgrad.kernels.spec import DHW, ConvSpec
from tvm_convgrad.kernels.vectors import accumulate, accumulate_words, load_vector


def pack_words(loops: Loops, packed: Buffer, spec: ConvSpec, kernel: DHW, blocks: int, lanes: int) -> Buffer:
    """The words of two column taps each, in the places that the first ones have in a packed W of bfloat16 numbers."""
    depth, height, width = kernel
    words = loops.panel("w_words", blocks * depth * height * width * lanes, "float32")
    partners: dict[int, int] = {}
    for taps in (phase[2].taps for phases in spec.phases for phase in phases):
        if taps:
            run = tap_run(taps)
            ks = [run.k + i * run.k_step for i in range(len(taps))]
            partners.update(zip(ks[::2], ks[1::2], strict=False))
    with loops.loop(blocks * depth * height, "row") as row:
        base = loops.let(row * (width * lanes), "w_row")
        for first, second in partners.items():
            low, high = (load(packed, base + k * lanes, lanes) for k in (first, second))
            loops.store(words, base + first * lanes, high_halves(low, high))
    return words


def pack_member_words(loops: Loops, packed: Buffer, pairs: int, step: int, lanes: int) -> Buffer:
    """The words of two neighbouring members of a group each, [block][pair][tap][lane], of a packed W of small groups.

    Args:
        packed: W as float32 numbers of bfloat16, [block][member][tap][lane].
        pairs: of all blocks.
        step: elements from a member to the next, of all taps.
    """
    words = loops.panel("w_words", pairs * step, WORD)
    with loops.loop(pairs, "pair") as pair, loops.loop(step // lanes, "tap") as tap:
        at = loops.let(pair * (2 * step) + tap * lanes, "w_row")
        low, high = (load(packed, at + member * step, lanes) for member in range(2))
        loops.store(words, pair * step + tap * lanes, high_halves(low, high))
    return words


def member_words(loops: Loops, halves: Buffer, at: Index, pair: int, each: int, lanes: int, mask: Expr | None) -> Expr:
    """A vector of words in which each group of `each` lanes has the word of two of its own channels, number `pair`.

    Args:
        halves: the source, of type HALF, whose channels are contiguous from `at` on.
        mask: the lanes that are channels, None for all.
    """
    if each == lanes:
        return splat(word_at(halves, at + 2 * pair), lanes)
    own = contiguous_words(load_vector(halves, at, lanes, mask))
    return shuffle(own, own, [lane // each * (each // 2) + pair for lane in range(lanes)])


def add_pairs(
    loops: Loops,
    tile: list[Buffer],
    valid: list[list[int]],
    columns: dict[tuple[int, int], int],
    half: Callable[[int], Expr],
    factors: tuple[Callable[[int], Expr], Callable[[int], Expr]],
) -> None:
    """Add a kernel row's products to a piece of a result row: two taps at once for pixels where both are in bounds.

    Args:
        tile: the sums of the pixels.
        valid: for each tap, the pixels where it is in bounds.
        columns: what (tap, pixel) reads.
        half: the vector of HALF of a column.
        factors: of a tap, and of the word of a tap and the next one.
    """
    terms: list[tuple[int, int, int, bool]] = []
    for tap in range(0, len(valid), 2):
        both = set(valid[tap]) & set(valid[tap + 1]) if tap + 1 < len(valid) else set()
        terms += [(columns[tap, i], tap, i, True) for i in both]
        for single in range(tap, min(tap + 2, len(valid))):
            terms += [(columns[single, i], single, i, False) for i in valid[single] if i not in both]
    halves: dict[int, Expr] = {}
    values: dict[tuple[Index, bool], Expr] = {}
    weights: dict[tuple[int, bool], Expr] = {}

    def read(column: int) -> Expr:
        if column not in halves:
            halves[column] = loops.let(half(column), "half")
        return halves[column]

    # In the order of columns: each is converted once.
    for column, tap, i, paired in sorted(terms):
        if (tap, paired) not in weights:
            weights[tap, paired] = factors[paired](tap)
        if (column, paired) not in values:
            if paired:
                value = joined_words(read(column), read(columns[tap + 1, i]))
            else:
                value = as_number(read(column), "float32")
            values[column, paired] = loops.let(value, "pixel")
        value, weight = values[column, paired], weights[tap, paired]
        if paired:
            accumulate_words(loops, tile[i], value, weight)
        else:
            accumulate(loops, tile[i], value * weight)


def add_pixel_pairs(
    loops: Loops,
    sums: list[dict[tuple[int, int], Buffer]],
    size: int,
    valid: list[list[int]],
    columns: Callable[[int, int], int],
    halves: tuple[Callable[[int], Expr], Callable[[int], Expr]],
    multiples: Callable[[Expr], list[Expr]],
) -> None:
    """Add a piece's products to the sums of a kernel row's taps: two pixels of dY at once where both are in bounds.

    Args:
        sums: copies of the sums of (multiple, tap), which pairs of pixels use in turn.
        size: pixels of the piece.
        valid: for each tap, the pixels where it is in bounds.
        columns: the column of X that a pixel and a tap multiply.
        halves: the vectors of HALF of a pixel of dY, and of a column of X.
        multiples: from a vector of dY, of numbers or of words, to what X is multiplied with for each multiple.
    """
    found: dict[tuple[bool, int], Expr] = {}
    values: dict[tuple[bool, int, int], list[Expr]] = {}

    def half(of_x: bool, at: int) -> Expr:
        if (of_x, at) not in found:
            found[of_x, at] = loops.let(halves[of_x](at), "half")
        return found[of_x, at]

    def vectors(of_x: bool, at: int, step: int) -> list[Expr]:
        """That of X, or those of dY's multiples: numbers, or, with a step, words with what lies a step further."""
        if (of_x, at, step) not in values:
            own = half(of_x, at)
            joined = joined_words(own, half(of_x, at + step)) if step else as_number(own, "float32")
            joined = loops.let(joined, "pixel")
            values[of_x, at, step] = [joined] if of_x else [loops.let(each, "member") for each in multiples(joined)]
        return values[of_x, at, step]

    for i in range(0, size, 2):
        copy = sums[i // 2 % len(sums)]
        for k, pixels in enumerate(valid):
            if i in pixels and i + 1 in pixels:
                step = columns(i + 1, k) - columns(i, k)
                (x,) = vectors(True, columns(i, k), step)
                for m, grad in enumerate(vectors(False, i, 1)):
                    accumulate_words(loops, copy[m, k], x, grad)
                continue
            for single in (i, i + 1):
                if single in pixels:
                    (x,) = vectors(True, columns(single, k), 0)
                    for m, grad in enumerate(vectors(False, single, 0)):
                        accumulate(loops, copy[m, k], x * grad)


__all__ = ["add_pairs", "add_pixel_pairs", "member_words", "pack_member_words", "pack_words"]
