# SPDX-License-Identifier: Apache-2.0
"""Offload in Relay under the name `tvm_convgrad`: pattern table, partition pass, and the code generator's registration.

    module = relay_ops.partition.partition(module)      # regions of wgrad and dgrad, each a function of its own
    relay.build(module, "llvm").export_library("step.so")

Regions become C source (relay_ops.c_source) that is compiled into the library, which loads and runs without this
package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relay
from tvm.relay.dataflow_pattern import DFPattern, is_op, wildcard

from relay_ops.c_source import refuses, source_of
from relay_ops.ir import PREFIX, problem_of, types_of
from tvm_convgrad.core.catalogue import FORWARD, NEW_OPS, OpEntry
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import SPATIAL

NAME = "tvm_convgrad"
"""The compiler's name: of the pattern table, of regions' Compiler attribute, and of relay.ext.<name>."""

Patterns = list[tuple[str, DFPattern, Callable[[relay.Call], bool]]]


def pattern_table() -> Patterns:
    """Patterns of the six operators: name, pattern, and whether the code generator takes a match."""
    return [_pattern(entry) for entry in NEW_OPS]


def forward_patterns() -> Patterns:
    """Patterns of nn.conv{1,2,3}d, which `partition(forward=True)` adds."""
    return [_pattern(OpEntry(FORWARD, rank)) for rank in SPATIAL]


def partition(module: tvm.IRModule, *, forward: bool = False) -> tvm.IRModule:
    """Put every operator that the code generator takes into a region of its own compiler.

    Args:
        module: an IRModule.
        forward: nn.conv{1,2,3}d as well, which Relay's own schedules do faster.

    Returns:
        The module, types inferred. Constants that a region needs are arguments of it: C source has no place for them.
    """
    patterns = pattern_table() + (forward_patterns() if forward else [])
    passes = tvm.transform.Sequential(
        [
            relay.transform.InferType(),
            relay.transform.MergeComposite(patterns),
            relay.transform.AnnotateTarget(NAME),
            relay.transform.MergeCompilerRegions(),
            relay.transform.PartitionGraph(),
            relay.transform.InferType(),
        ]
    )
    with tvm.transform.PassContext(opt_level=3):
        return relay.transform.InferType()(_without_constants(passes(module)))


def verdict(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> str | None:
    """Why the code generator does not take a call, or None if it does."""
    try:
        return refuses(problem_of(op, attrs, types))
    except ConvGradError as error:
        return str(error)


def _pattern(entry: OpEntry) -> tuple[str, DFPattern, Callable[[relay.Call], bool]]:
    def takes(call: relay.Call) -> bool:
        return verdict(call.op, call.attrs, types_of(call)) is None

    return f"{NAME}.{entry.name}", is_op(PREFIX + entry.name)(wildcard(), wildcard()), takes


class _Hoist(relay.ExprMutator):
    """Turns the constants of one region into parameters; collects them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[Any] = []
        self.constants: list[Any] = []

    def visit_constant(self, const: relay.Constant) -> relay.Var:
        """A new parameter in the constant's place."""
        self.parameters.append(relay.var(f"constant{len(self.constants)}", type_annotation=const.checked_type))
        self.constants.append(const)
        return self.parameters[-1]


class _PassConstants(relay.ExprMutator):
    """Gives regions their new variables, and their former constants behind the arguments of their calls."""

    def __init__(self, regions: dict[relay.Expr, tuple[relay.GlobalVar, list[relay.Constant]]]) -> None:
        super().__init__()
        self._regions = regions

    def visit_call(self, call: relay.Call) -> relay.Call:
        """A call of a region, rewritten."""
        changed = super().visit_call(call)
        if call.op not in self._regions:
            return changed
        variable, constants = self._regions[call.op]
        return relay.Call(variable, [*changed.args, *constants])


def _without_constants(module: tvm.IRModule) -> tvm.IRModule:
    # Region by its old variable: a new one, as the old one carries the old type, and the constants.
    regions: dict[relay.Expr, tuple[relay.GlobalVar, list[relay.Constant]]] = {}
    functions: dict[relay.GlobalVar, relay.Function] = {}
    for variable, function in module.functions.items():
        functions[variable] = function
        attrs = function.attrs
        if attrs is None or "Compiler" not in attrs or str(attrs["Compiler"]) != NAME:
            continue
        hoist = _Hoist()
        body = hoist.visit(function.body)
        if hoist.constants:
            del functions[variable]
            parameters = [*function.params, *hoist.parameters]
            regions[variable] = relay.GlobalVar(variable.name_hint), hoist.constants
            functions[regions[variable][0]] = relay.Function(parameters, body, function.ret_type, [], attrs)
    if not regions:
        return module
    new = {variable for variable, _ in regions.values()}
    passing = _PassConstants(regions)
    return tvm.IRModule(
        {variable: f if variable in new else passing.visit(f) for variable, f in functions.items()},
        module.type_definitions,
    )


def register_codegen() -> None:
    """Register the pattern table and relay.ext.tvm_convgrad; called once, by relay_ops.register."""
    relay.op.contrib.register_pattern_table(NAME, pattern_table)

    @tvm.register_func(f"relay.ext.{NAME}", override=True)
    def codegen(function: relay.Function) -> tvm.runtime.Module:
        symbol = str(function.attrs["global_symbol"])
        create = tvm.get_global_func("runtime.CSourceModuleCreate")
        return create(source_of(function, symbol), "cc", [symbol], [])
