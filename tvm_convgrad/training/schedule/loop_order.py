# SPDX-License-Identifier: Apache-2.0
"""The order of a stage's loops: the contiguous inner loop, the loops around it, and rows that several stages share.

Consecutive groups of stages over the same rows, each of which reads only its own row, run row by row: what one leaves
in the first cache the next finds there. A layer norm's mean, variance and result are of this kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_convgrad.training.schedule.stages import Address, Stage

MOST_COLUMNS = 4096  # elements of a row: several tensors' rows stay in the first cache
FEWEST_ROWS = 64  # fewer are not worth sharing out


@dataclass(frozen=True)
class LoopOrder:
    """The loops of stages with equal iterators: `run` are those fused into the inner loop, innermost first."""

    run: tuple[int, ...]
    outer: tuple[int, ...]  # of the result, outside the inner loop
    reduced: tuple[int, ...]  # reduced over, outside the inner loop
    length: int  # iterations of the inner loop
    is_contiguous: bool  # each inner iteration moves every access by one element, or not at all
    reduces_inner: bool  # the inner loop is reduced over
    rows: int = 0  # extent of the outer iterator that consecutive stages share to run row by row; 0: none


def loop_order_of(group: list[Stage]) -> LoopOrder | None:
    """The loop order of stages of equal iterators, or None where no iterator is contiguous."""
    first = group[0]
    extents, kinds = first.extents, first.kinds
    moving = [position for position, extent in enumerate(extents) if extent > 1]
    accesses = [address.coefficients for stage in group for _, address in stage.loads]
    stores = [stage.store.coefficients for stage in group]
    if not first.combiner:
        start = next((p for p in moving if all(store[p] == 1 for store in stores)), None)
        if start is None:
            return None if moving else LoopOrder((), (), (), 1, False, False)
        run = run_of(start, moving, extents, [*accesses, *stores])
        dense = all(access[start] in (0, 1) for access in accesses)
        return LoopOrder(run, tuple(p for p in moving if p not in run), (), size_of(run, extents), dense, False)
    # A product of matrices has no operand that moves with every iterator: it needs tiles.
    if not all(any(all(a.coefficients[p] for p in moving) for _, a in stage.loads) for stage in group):
        return None
    start = next((p for p in reversed(moving) if _is_contiguous(p, kinds, group)), None)
    if start is None:
        return None
    kind = kinds[start]
    candidates = [p for p in moving if kinds[p] == kind]
    run = run_of(start, candidates, extents, accesses if kind == "R" else [*accesses, *stores])
    outer = tuple(p for p in moving if kinds[p] == "S" and p not in run)
    reduced = tuple(p for p in moving if kinds[p] == "R" and p not in run)
    return LoopOrder(run, outer, reduced, size_of(run, extents), True, kind == "R")


def _is_contiguous(position: int, kinds: str, group: list[Stage]) -> bool:
    """Whether every operand moves along this iterator by one element or not at all, and the result likewise."""
    for stage in group:
        steps = [address.coefficients[position] for _, address in stage.loads]
        if not set(steps) <= {0, 1} or 1 not in steps:
            return False
        if kinds[position] == "S" and stage.store.coefficients[position] != 1:
            return False
    return True


def run_of(start: int, moving: list[int], extents: tuple[int, ...], accesses: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The iterators that fuse with `start` into one inner loop, innermost first."""
    run = [start]
    while True:
        last, size = run[-1], extents[run[-1]]
        following = next(
            (p for p in moving if p not in run and all(a[p] == a[last] * size for a in accesses)),
            None,
        )
        if following is None:
            return tuple(run)
        run.append(following)


def size_of(run: Sequence[int], extents: tuple[int, ...]) -> int:
    """The number of places of some iterators."""
    return math.prod(extents[position] for position in run)


def by_rows(groups: list[tuple[list[Stage], LoopOrder]]) -> list[list[tuple[list[Stage], LoopOrder]]]:
    """The groups in chains: those of one chain, if it has several, run row by row, and their orders have `rows`."""
    chains: list[list[tuple[list[Stage], LoopOrder]]] = []
    for group, order in groups:
        alone = _row_order(group, order)
        if alone is not None and chains and chains[-1][-1][1].rows == alone.rows:
            longer = [*chains[-1], (group, alone)]
            if _are_local(longer):
                chains[-1] = longer
                continue
        chains.append([(group, alone or order)])
    # A group of its own has all its iterators to share out, and a chain is for what sums leave behind.
    own = {id(group): order for group, order in groups}
    return [
        piece
        for chain in chains
        for piece in (
            [chain]
            if len(chain) > 1 and any(order.reduces_inner for _, order in chain)
            else [[(group, own[id(group)])] for group, _ in chain]
        )
    ]


def _row_order(group: list[Stage], order: LoopOrder) -> LoopOrder | None:
    """The order of a group in a chain: one outer iterator, the rest one inner loop; None if it is not of that form."""
    first = group[0]
    moving = [position for position, extent in enumerate(first.extents) if extent > 1]
    if not moving or first.kinds[moving[0]] != "S" or first.extents[moving[0]] < FEWEST_ROWS:
        return None
    row, rest = moving[0], moving[1:]
    rows = first.extents[row]
    if first.combiner:
        is_one = order.reduces_inner and order.outer == (row,) and not order.reduced and order.length <= MOST_COLUMNS
        return replace(order, rows=rows) if is_one else None
    if not rest:
        return LoopOrder((), (row,), (), 1, False, False, rows)
    accesses = [address.coefficients for stage in group for address in (stage.store, *(a for _, a in stage.loads))]
    run = run_of(rest[-1], rest, first.extents, accesses)
    dense = all(access[run[0]] in (0, 1) for access in accesses) and all(
        stage.store.coefficients[run[0]] == 1 for stage in group
    )
    length = size_of(run, first.extents)
    return (
        LoopOrder(run, (row,), (), length, True, False, rows)
        if len(run) == len(rest) and dense and length <= MOST_COLUMNS
        else None
    )


def _are_local(chain: list[tuple[list[Stage], LoopOrder]]) -> bool:
    """Whether each row of what a stage stores is one piece of memory, and all that others read of it."""
    stages = [(stage, order) for group, order in chain for stage in group]
    pieces: dict[int, int] = {}
    for number, (stage, order) in enumerate(stages):
        if any(stage.store.buffer.same_as(other.store.buffer) for other, _ in stages[:number]):
            return False
        pieces[number] = stage.store.coefficients[order.outer[0]]
        if not _is_within(stage, stage.store, order.outer[0], pieces[number]):
            return False
    for stage, order in stages:
        for _, address in stage.loads:
            for number, (other, _) in enumerate(stages):
                if address.buffer.same_as(other.store.buffer):
                    same = address.coefficients[order.outer[0]] == pieces[number]
                    if not same or not _is_within(stage, address, order.outer[0], pieces[number]):
                        return False
    return True


def _is_within(stage: Stage, address: Address, row: int, piece: int) -> bool:
    """Whether an access stays in the `piece` elements of its row."""
    others = [(c, e) for p, (c, e) in enumerate(zip(address.coefficients, stage.extents, strict=True)) if p != row]
    reach = sum(coefficient * (extent - 1) for coefficient, extent in others)
    return address.constant == 0 and all(coefficient >= 0 for coefficient, _ in others) and 0 <= reach < piece
