# SPDX-License-Identifier: Apache-2.0
"""Constants of regions as arguments: C source has no place for large ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relay


class _Hoist(relay.ExprMutator):
    """Turns the constants of one region into parameters; collects them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[relay.Var] = []
        self.constants: list[relay.Constant] = []

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


def without_constants(module: tvm.IRModule, compilers: Sequence[str], stated: Mapping[str, str]) -> tvm.IRModule:
    """The module with the constants of its regions as arguments.

    Args:
        module: partitioned, types inferred.
        compilers: of the regions that are meant.
        stated: attributes that these get.
    """
    # Region by its old variable: a new one, as the old one carries the old type, and the constants.
    regions: dict[relay.Expr, tuple[relay.GlobalVar, list[relay.Constant]]] = {}
    functions: dict[relay.GlobalVar, relay.Function] = {}
    for variable, function in module.functions.items():
        functions[variable] = function
        attrs = function.attrs
        if attrs is None or "Compiler" not in attrs or str(attrs["Compiler"]) not in compilers:
            continue
        hoist = _Hoist()
        body = hoist.visit(function.body)
        if hoist.constants:
            del functions[variable]
            parameters = [*function.params, *hoist.parameters]
            regions[variable] = relay.GlobalVar(variable.name_hint), hoist.constants
            variable = regions[variable][0]
            function = relay.Function(parameters, body, function.ret_type, [], attrs)
        for key, value in stated.items():
            if key not in attrs:  # partitioned before, perhaps for another target
                function = function.with_attr(key, value)
        functions[variable] = function
    if not regions:
        return tvm.IRModule(functions, module.type_definitions)
    new = {variable for variable, _ in regions.values()}
    passing = _PassConstants(regions)
    return tvm.IRModule(
        {variable: f if variable in new else passing.visit(f) for variable, f in functions.items()},
        module.type_definitions,
    )


__all__ = ["without_constants"]
