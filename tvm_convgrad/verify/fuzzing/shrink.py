# SPDX-License-Identifier: Apache-2.0
"""Shrinking of a case with a fault: numbers of its problem and tilings are lowered as long as some fault remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import data_layout_of, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.fuzzing.cases import KernelCase
from tvm_convgrad.verify.fuzzing.check import check_case, read_case

MOST_CHECKS = 600
"""The most checks of smaller cases; each takes some milliseconds."""


def shrink(case: KernelCase, fault: Callable[[KernelCase], str] = check_case) -> KernelCase:
    """The smallest case found that still has a fault.

    Args:
        case: one for which `fault` returns something.
        fault: what is wrong with a case, or an empty string.
    """
    checks = 0
    improved = True
    while improved and checks < MOST_CHECKS:
        improved = False
        for smaller in _smaller(case):
            if not _is_valid(smaller):
                continue
            checks += 1
            if fault(smaller):
                case, improved = smaller, True
                break
            if checks >= MOST_CHECKS:
                break
    return case


def _is_valid(case: KernelCase) -> bool:
    """Whether the kernel takes the problem, and can be built with the tilings."""
    try:
        read_case(case.problem, case.direction, case.tiling_text)
    except (ConvGradError, IndexError):
        return False
    return True


def _smaller(case: KernelCase) -> Iterator[KernelCase]:
    """Cases that are simpler in one thing, those that gain most first."""
    for problem in _smaller_problems(case.problem):
        yield replace(case, problem=problem)
    if case.any_batch:
        yield replace(case, any_batch=False)
    for item in fields(case.epilogue):
        if getattr(case.epilogue, item.name):
            yield replace(case, epilogue=replace(case.epilogue, **{item.name: False}))
    cpu = CPUS[case.machine.name]
    for field in ("l2_bytes", "parts", "parallel_from"):
        if getattr(case.machine, field) != getattr(cpu, field):
            yield replace(case, machine=replace(case.machine, **{field: getattr(cpu, field)}))
    tilings = case.plan.tilings
    for number, tiling in enumerate(tilings):
        for item in fields(tiling):
            for value in _smaller_values(getattr(tiling, item.name)):
                changed = (*tilings[:number], replace(tiling, **{item.name: value}), *tilings[number + 1 :])
                yield replace(case, plan=replace(case.plan, tilings=changed))


def _smaller_values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield from (False,) if value else ()
    elif isinstance(value, int):
        yield from sorted({1, value // 2, value - 1} - {0, value, -1})


def _smaller_problems(problem: ConvProblem) -> Iterator[ConvProblem]:
    for changes in _changes(problem):
        try:
            yield replace(problem, **changes)  # type: ignore[arg-type]
        except ConvGradError:
            continue


def _changes(problem: ConvProblem) -> Iterator[dict[str, object]]:
    """Fields of a problem with smaller values."""
    for value in _smaller_values(int(problem.batch)):
        yield {"batch": value}
    ins, outs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    for groups in _smaller_values(problem.groups):
        assert isinstance(groups, int)
        yield {"groups": groups, "in_channels": ins * groups, "out_channels": outs * groups}
    for name, each in (("in_channels", ins), ("out_channels", outs)):
        for value in _smaller_values(each):
            assert isinstance(value, int)
            yield {name: value * problem.groups}
    for name in ("data_extents", "kernel", "strides", "dilation"):
        values = getattr(problem, name)
        for axis, old in enumerate(values):
            for value in _smaller_values(int(old)):
                yield {name: (*values[:axis], value, *values[axis + 1 :])}
    for axis, (low, high) in enumerate(problem.padding):
        for pair in ((0, 0), (low, 0), (0, high), (low - 1, high), (low, high - 1)):
            if pair != (low, high) and min(pair) >= 0:
                yield {"padding": (*problem.padding[:axis], pair, *problem.padding[axis + 1 :])}
    data, kernel = data_layout_of(problem.rank), kernel_layout_of(problem.rank)
    for name, plain in (("data_layout", data), ("grad_layout", data), ("kernel_layout", kernel)):
        if getattr(problem, name) != plain:
            yield {name: plain}
    for name in ("data_dtype", "kernel_dtype", "grad_dtype"):
        if getattr(problem, name) != "float32":
            yield {name: "float32"}


__all__ = ["shrink"]
