# SPDX-License-Identifier: Apache-2.0
"""Folding of constants: calls whose operands are all constants are computed when the step is compiled.

relax.transform.FoldConstant does the same, but compiles each call by itself: of a step of CrossViT, whose position
embeddings are interpolated by 276 small calls, that takes half of the time before kernels are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import tvm
from tvm import relax

from relax_ops.compat import Constant, array_of
from relax_ops.ir import constant_extents
from relax_ops.single_run import quick_executable
from tvm_convgrad.training.ir.graph import operator_name
from tvm_convgrad.training.schedule.blocks import without_scopes

CREATED = 1024
"""Elements of the largest tensor that is folded without operands, such as zeros; TVM's limit, too."""


def FoldConstants() -> tvm.transform.Pass:
    """The pass that folds calls of TIR functions in all straight-line functions of a legalized module."""

    def fold(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        found = {
            variable: _folded(module, function)
            for variable, function in module.functions_items()
            if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr)
        }
        for variable, function in found.items():
            module[variable] = function
        return module

    return tvm.transform.module_pass(fold, opt_level=0, name="ConvgradFoldConstants")


def _folded(module: tvm.IRModule, function: relax.Function) -> relax.Function:
    """A function with the constants that its calls of constants give."""
    if len(function.body.blocks) != 1:
        return function
    block = function.body.blocks[0]
    constants = {each.var: each.value for each in block.bindings if isinstance(each.value, Constant)}
    computed = list(_computed(block, set(constants)))
    if not computed:
        return function
    known = {binding.var for binding in computed}
    read = set(relax.analysis.free_vars(function.body.body))
    for binding in block.bindings:
        if binding.var not in known:
            read |= set(relax.analysis.free_vars(binding.value))
    needed = [binding.var for binding in computed if binding.var in read]
    values = dict(zip(needed, _values(module, computed, constants, needed), strict=True)) if needed else {}
    kept = [
        relax.VarBinding(binding.var, values[binding.var]) if binding.var in values else binding
        for binding in block.bindings
        if binding.var not in known or binding.var in values
    ]
    body = relax.SeqExpr([type(block)(kept)], function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _computed(block: relax.BindingBlock, known: set[relax.Var]) -> Iterator[relax.VarBinding]:
    """The bindings of calls that depend on constants alone; `known` are variables that are constants."""
    for binding in block.bindings:
        value = binding.value
        if not (isinstance(value, tvm.ir.Call) and operator_name(value) == "relax.call_tir" and len(value.args) == 2):
            continue
        extents, operands = constant_extents(binding.var), list(value.args[1].fields)
        if extents is None or not all(isinstance(each, Constant) or each in known for each in operands):
            continue
        if operands or math.prod(extents) <= CREATED:
            known.add(binding.var)
            yield binding


def _values(
    module: tvm.IRModule,
    computed: Sequence[relax.VarBinding],
    constants: Mapping[relax.Var, Constant],
    needed: Sequence[relax.Var],
) -> list[relax.Expr]:
    """What variables stand for, from one program of all the calls. Its parameters are their operands, as that program
    would be folded, too, if it had constants.
    """
    given: dict[Constant, relax.Var] = {}
    for operand in (each for binding in computed for each in binding.value.args[1].fields):
        constant = constants.get(operand, operand)
        if isinstance(constant, Constant) and constant not in given:
            given[constant] = relax.Var(f"constant_{len(given)}", constant.ty)
    builder, made = relax.BlockBuilder(), dict[relax.Var, relax.Var]()
    with builder.function("main", list(given.values())):
        with builder.dataflow():
            for binding in computed:
                callee, operands = binding.value.args
                fields = [made[v] if v in made else given[constants.get(v, v)] for v in operands.fields]
                function = builder.add_func(without_scopes(module[callee]), callee.name_hint)
                made[binding.var] = builder.emit(relax.call_tir(function, relax.Tuple(fields), binding.var.ty))
            results = builder.emit_output(relax.Tuple([made[v] for v in needed]))
        builder.emit_func_output(results)
    # In memory: a second library that TVM links and loads in a process makes it print a warning.
    machine = relax.VirtualMachine(quick_executable(builder.get()), tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(array_of(each)) for each in given))
    return [relax.const(each.numpy(), str(v.ty.dtype)) for each, v in zip(found, needed, strict=True)]


__all__ = ["CREATED", "FoldConstants"]
