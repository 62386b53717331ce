# SPDX-License-Identifier: Apache-2.0
"""`Kernel`, `Plan` and `Tiling`: what a module in this package defines so that its kernel is used everywhere.

A kernel is one object of a class derived from `Kernel`. `registry` finds every module below this package that binds one
in `KERNELS`; the chooser, `explain`, `tune`, `verify`, `impl=` and the fuzzer all read that one list:

    class Mine(Kernel):
        name = "mine"
        def tiling_type(self, direction): ...                   # its class of tilings
        def refusal(self, problem, direction, machine): ...     # why it does not take the problem, or ""
        def plan(self, problem, direction, machine): ...        # the Plan of least estimated time
        def estimate(self, problem, direction, plan, machine): ...
        def invalid(self, problem, direction, plan, machine): ...   # why a plan cannot be built, or ""
        def emit(self, problem, direction, plan, machine, name, epilogue): ...  # the PrimFunc

    KERNELS = (Mine(),)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.core.exact import Array
from tvm_convgrad.core.geometry import FLOAT_DTYPES
from tvm_convgrad.core.problem import REPRESENTATIVE_BATCH, ConvProblem, planned
from tvm_convgrad.kernels.epilogue import Epilogue

EPILOGUES: Mapping[str, tuple[str, ...]] = {
    FORWARD.name: ("bias", "relu", "accumulate", "relu6"),
    BACKWARD_WEIGHT.name: ("accumulate", "bias_grad", "bias_accumulate"),
    BACKWARD_DATA.name: ("bias", "relu", "accumulate", "relu6"),
}
"""The fields of an Epilogue that a direction can have; every kernel of this package fuses them."""


@dataclass(frozen=True)
class Tiling:
    """Base class of tilings: how one loop nest of a kernel is blocked. The fields of a tiling are int, bool or str."""

    def __str__(self) -> str:
        """The register tile in vectors, then every other field that is neither 0 nor 1 nor False."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        words = [f"tile of {values.pop('tile_m')} x {values.pop('tile_n')} vectors"] if "tile_m" in values else []
        for name, value in values.items():
            if isinstance(value, bool):
                words += [name] if value else []
            elif value not in (0, 1, None):
                words.append(f"{name.replace('_', ' ')} {value}")
        return ", ".join(words)


TilingOf = TypeVar("TilingOf", bound=Tiling)


@dataclass(frozen=True)
class Plan:
    """The tilings of a kernel: with the problem, the direction, the machine and the epilogue they determine its code.

    Attributes:
        tilings: one for each loop nest of the kernel.
        region: the number of a decomposition of the result, into regions or phases of one size; 0 is the whole result.
    """

    tilings: tuple[Tiling, ...]
    region: int = 0

    def __str__(self) -> str:
        """The distinct tilings in words."""
        return "; ".join(dict.fromkeys(map(str, self.tilings)))

    def only(self, kind: type[TilingOf]) -> TilingOf:
        """The tiling of a plan of one loop nest.

        Raises:
            TypeError: the plan is of another kernel.
        """
        (tiling,) = self.tilings
        if not isinstance(tiling, kind):
            raise TypeError(f"a plan of {type(tiling).__name__}; this kernel takes {kind.__name__}")
        return tiling


class Kernel(ABC):
    """An algorithm for convolutions, for which code is generated.

    Attributes:
        name: without the direction; unique among the kernels of a direction.
        directions: those that it computes.
        dtypes: types of operands that it takes; every problem with an operand of another type is refused.
        exact: whether each element is a plain sum of its products. Kernels that are not exact, such as Winograd's, are
            considered inside `allow_transforms` only, or if they are forced.
        any_batch: whether the batch may be a variable of the generated function.
        reason: why it can be taken, for `explain`.
    """

    name: str
    directions: tuple[str, ...] = tuple(DIRECTIONS)
    dtypes: tuple[str, ...] = tuple(FLOAT_DTYPES)
    exact: bool = True
    any_batch: bool = True
    reason: str = "the least estimate"

    def label(self, direction: str) -> str:
        """The name with the direction, such as "implicit GEMM wgrad"."""
        return f"{self.name} {DIRECTIONS[direction].short}"

    @property
    def form(self) -> str:
        """The value of `impl` that forces the kernel, such as "kernel:implicit-gemm"."""
        return f"kernel:{self.name.lower().replace(' ', '-')}"

    def epilogues(self, direction: str) -> tuple[str, ...]:
        """The names of the fields of an Epilogue that the kernel can fuse."""
        return EPILOGUES[direction]

    @abstractmethod
    def tiling_type(self, direction: str) -> type[Tiling]:
        """The class of its tilings."""

    @abstractmethod
    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Why the kernel does not take a static problem, or nothing."""

    @abstractmethod
    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The plan of least estimated time for a problem that is not refused."""

    @abstractmethod
    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """Core-seconds: estimated seconds until the last core is done, times the cores. The least is chosen."""

    @abstractmethod
    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why the kernel cannot be built with a plan, or nothing, for a problem that is not refused."""

    @abstractmethod
    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (first operand, second operand, [bias,] result[, bias gradient]).

        Args:
            problem: its batch may be a name, which becomes a variable; the plan is then of `planned(problem)`.
            name: the function's symbol.
        """

    def packed_weight(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, weight: Array
    ) -> Array | None:
        """W, whose values are known, as each call would pack it; None if the kernel takes it as it is.

        What is given takes W's place in the function of `emit_packed`.
        """
        return None

    def emit_packed(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function of `emit` with what `packed_weight` gives in W's place; results are equal to the last bit."""
        raise NotImplementedError(f"{self.name} packs nothing ahead")

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """Other valid plans for the tuner to measure, the most promising first; there may be none.

        By default they are the plans for machines with other caches, fewer registers or more cores.
        """
        seen = [own]
        for variant in variants(machine):
            if self.refusal(problem, direction, variant):
                continue
            other = self.plan(problem, direction, variant)
            if other not in seen and not self.invalid(problem, direction, other, machine):
                seen.append(other)
                yield other


CACHE_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125)
"""Factors of `l2_bytes` for other plans: other programs leave less of the cache, prefetches make more of it useful."""

REGISTER_FACTORS = (1.0, 0.75, 0.875, 0.5)
"""Factors of `registers` for other plans: a smaller tile may divide the channels or pixels of a problem better."""

PART_FACTORS = (1, 2, 4)
"""Factors of `parts` for other plans: more parts balance the cores better, and have more sums to add."""


def variants(machine: Machine) -> list[Machine]:
    """The machine with other caches, registers and parts; the most different ones come last."""
    found = [
        (abs(i) + abs(j) + abs(k), replace(
            machine,
            l2_bytes=int(machine.l2_bytes * cache),
            registers=int(machine.registers * registers),
            parts=machine.parts * parts,
        ))
        for i, cache in enumerate(CACHE_FACTORS)
        for j, registers in enumerate(REGISTER_FACTORS)
        for k, parts in enumerate(PART_FACTORS)
    ]  # fmt: skip
    return [variant for _, variant in sorted(found, key=lambda pair: pair[0])]


def not_one_tiling(plan: Plan) -> str:
    """Why a plan is not of one loop nest, or nothing."""
    if len(plan.tilings) == 1 and plan.region == 0:
        return ""
    return f"there are {len(plan.tilings)} tilings of region {plan.region}; there must be one, of region 0"


__all__ = ["EPILOGUES", "REPRESENTATIVE_BATCH", "Kernel", "Plan", "Tiling", "not_one_tiling", "planned", "variants"]
