# SPDX-License-Identifier: Apache-2.0
"""Estimated seconds of a call of a TIR function: the roofline of its operations and bytes, or its kernel's estimate."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.s_tir.analysis import estimate_tir_flops

from tvm_convgrad.codegen.hardware import Machine

_SCHEDULED = "tirx.is_scheduled"
_ANY = Machine("any CPU", 32, 16)
DENSE = 64
"""Operations for each element that a function reads or writes, from which on it is not a cheap function."""


class CallCosts:
    """The estimates of a module's functions.

    Args:
        module: has them.
        seconds: those of generated kernels, by name (`relax_ops.lowering.recorded_seconds`).
        machine: that of the target; None: any CPU's, as only the ratios of estimates decide.
    """

    def __init__(self, module: tvm.IRModule, seconds: Mapping[str, float], machine: Machine | None) -> None:
        self._module, self._seconds, self._machine = module, seconds, machine or _ANY
        self._operations: dict[str, float] = {}

    def seconds(self, variable: relax.GlobalVar, moved: int) -> float:
        """Of a call of a function that reads and writes `moved` bytes together."""
        name, machine = str(variable.name_hint), self._machine
        computing = self._seconds.get(name, 0.0)
        if not computing:
            rate = machine.fmas * 2 * machine.lanes("float32") * machine.clock
            computing = self._counted(variable) / rate
        return max(computing, moved / (machine.mixed_rate * machine.clock))

    def is_cheap(self, variable: relax.GlobalVar, elements: int) -> bool:
        """Whether a function is not a convolution or matrix product; `elements` are those that it reads and writes."""
        return str(variable.name_hint) not in self._seconds and self._counted(variable) <= DENSE * elements

    def _counted(self, variable: relax.GlobalVar) -> float:
        """The arithmetic operations of a function that TVM has made; 0 of a generated one, whose loops are not read."""
        name = str(variable.name_hint)
        if name not in self._operations:
            self._operations[name] = _operations(self._module[variable])
        return self._operations[name]


def _operations(function: tvm.tirx.PrimFunc) -> float:
    if _SCHEDULED in (function.attrs or {}):
        return 0.0
    try:
        return float(estimate_tir_flops(tvm.IRModule({"main": function})))
    except RuntimeError:  # TVM does not count every expression; bytes are left to estimate by
        return 0.0


__all__ = ["CallCosts"]
