# SPDX-License-Identifier: Apache-2.0
"""The terms of sums over column taps: one tap each or, where dot products of bfloat16 are used, two."""

from __future__ import annotations

from typing import NamedTuple

from tvm_convgrad.codegen.dot_product import LANES
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.depthwise.taps import Taps, tap_run
from tvm_convgrad.kernels.spec import ConvSpec, axes_of


class Term(NamedTuple):
    """A tap: its kernel index and offset. If `apart` is not 0, also the tap of k + k_step and offset + apart."""

    k: Index
    offset: Index
    k_step: int = 0
    apart: int = 0


class Terms(NamedTuple):
    """Terms of equal form: `number` terms from `first` on, each k_step and offset_step from the one before."""

    first: Term
    number: int
    k_step: int
    offset_step: int

    def at(self, i: Index) -> Term:
        """One of them."""
        first = self.first
        return first._replace(k=first.k + i * self.k_step, offset=first.offset + i * self.offset_step)


def has_dots(spec: ConvSpec, machine: Machine) -> bool:
    """Whether the types and the machine are those of dot products of AVX512-BF16."""
    return _have_dots({spec.source.dtype, spec.weight.dtype}, spec.dtype, machine)


def uses_dots(spec: ConvSpec, machine: Machine) -> bool:
    """Whether dot products sum two column taps at once, where vectors run over columns."""
    if not has_dots(spec, machine):
        return False
    # Both columns of a word are in one vector of halves.
    most = LANES if spec.in_step[2] == 1 else 1
    return all(
        tap_run(phase[2].taps).offset_step <= most for phases in spec.phases for phase in phases if phase[2].taps
    )


def has_wgrad_dots(problem: ConvProblem, machine: Machine) -> bool:
    """Whether the types and the machine are those of dot products of AVX512-BF16, in wgrad."""
    return _have_dots({problem.data_dtype, problem.grad_dtype}, problem.accumulator, machine)


def _have_dots(operands: set[str], sums: str, machine: Machine) -> bool:
    """Whether operands of these types, summed in that one, have dot products of AVX512-BF16, which are worth it.

    They are where they do more products than multiply-adds of converted operands.
    """
    narrow = operands == {"bfloat16"} and sums == "float32"
    return narrow and "bfloat16" in machine.dots and machine.lanes(sums) == LANES and machine.gains_by_dots


def uses_wgrad_dots(problem: ConvProblem, machine: Machine) -> bool:
    """Whether dot products of wgrad sum two adjacent pixels of a row at once, where vectors run over columns."""
    return has_wgrad_dots(problem, machine) and axes_of(problem)[1][2] == 1


def column_terms(taps: Taps, dots: bool) -> list[Terms]:
    """The terms of a phase's column taps: pairs of adjacent ones, and the tap that is left of an odd number."""
    if not taps:
        return []
    run, count = tap_run(taps), len(taps)
    pairs = count // 2 if dots else 0
    terms = []
    if pairs:
        first = Term(run.k, run.offset, run.k_step, run.offset_step)
        terms.append(Terms(first, pairs, 2 * run.k_step, 2 * run.offset_step))
    if count > 2 * pairs:
        single = Term(run.k + 2 * pairs * run.k_step, run.offset + 2 * pairs * run.offset_step)
        terms.append(Terms(single, count - 2 * pairs, run.k_step, run.offset_step))
    return terms


__all__ = ["Term", "Terms", "column_terms", "has_dots", "has_wgrad_dots", "uses_dots", "uses_wgrad_dots"]
