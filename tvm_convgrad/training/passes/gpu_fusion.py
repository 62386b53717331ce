# SPDX-License-Identifier: Apache-2.0
"""Fusion for GPUs: many operators become one function, unless that would write formulas many times over.

TVM's schedules for GPUs write the formula of an intermediate value wherever it is read. The gradient of a batch norm
and a relu in 16 bits, 20 operators after `Recompute`, stays one formula of some 100 nodes. A minimum reads its operands
twice, as NaN has to pass: of a chain of 18 minima the formula would double with each, and so it would of the steps of a
cumulative maximum, which has filled the memory of the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.compat import TensorLoad, buffer_of, nodes_of
from relax_ops.ir import shape_values
from tvm_convgrad.core.geometry import Size
from tvm_convgrad.training.schedule.inlining import nodes_of as written_out

DEPTHS = (24, 8, 3)
"""The most operators that become one function: of ResNet-50, ConvNeXt-T and a ViT no chain is longer than the first.

Where the formula becomes too long the next one is tried.
"""

MOST_NODES = 150
"""The most operations, loads and constants of a formula as it is written out, or twice those of its operators."""

_IN_PLACE = 2
"""The largest `op_pattern` of functions whose value is written where it is read: elementwise, broadcast, injective."""

_DEPTH = "relax.FuseOps.max_depth"


def FuseForGpu() -> tvm.transform.Pass:
    """The pass in the place of relax.transform.FuseOps; the bound of a context in force is kept."""
    return tvm.transform.module_pass(_fuse, opt_level=0, name="ConvgradFuseForGpu")


def _fuse(module: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
    if _DEPTH in context.config:
        return relax.transform.FuseOps()(module)
    module = _fused(module, DEPTHS[0])
    for depth in DEPTHS[1:]:
        functions = {variable.name_hint: function for variable, function in module.functions.items()}
        long = {name: each for name, each in functions.items() if _is_fused(each) and _is_long(each, module)}
        if not long:
            break
        module = _fused(_taken_apart(module, long), depth)
    return module


def _fused(module: tvm.IRModule, depth: int) -> tvm.IRModule:
    now = tvm.transform.PassContext.current()
    context = tvm.transform.PassContext(
        opt_level=now.opt_level,
        required_pass=list(now.required_pass),
        disabled_pass=list(now.disabled_pass),
        instruments=list(now.instruments),
        config={**now.config, _DEPTH: depth},
    )
    with context:
        return relax.transform.FuseOps()(module)


def _is_fused(function: Any) -> bool:
    return isinstance(function, relax.Function) and bool((function.attrs or {}).get("Primitive"))


def _is_long(fused: relax.Function, module: tvm.IRModule) -> bool:
    """Whether a formula in a fused function is long because parts of it are written several times."""
    counts: dict[Any, int] = {}
    longest = alone = 0
    for block in fused.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, tvm.ir.Call) or not isinstance(value.args[0], tvm.ir.GlobalVar):
                continue
            function = module[value.args[0]]
            operands = value.args[1].fields if isinstance(value.args[1], relax.Tuple) else ()
            sizes = [(function.params[place], counts.get(operand, 0)) for place, operand in enumerate(operands)]
            nodes = [node for store in nodes_of(function, tirx.BufferStore) for node in written_out(store.value)]
            count = sum(_size(node, sizes) for node in nodes)
            longest, alone = max(longest, count), alone + len(nodes)
            pattern = int((function.attrs or {}).get("op_pattern", _IN_PLACE + 1))
            counts[binding.var] = count if pattern <= _IN_PLACE else 0
    return longest > max(MOST_NODES, 2 * alone)


def _size(node: tirx.Expr, sizes: Sequence[tuple[tirx.Buffer, int]]) -> int:
    """The nodes in the place of a node, where loads of buffers are formulas of some size."""
    if not isinstance(node, TensorLoad):
        return 1
    buffer = buffer_of(node)
    return next((size for known, size in sizes if buffer.same_as(known)), 0) or 1


def _taken_apart(module: tvm.IRModule, functions: Mapping[str, relax.Function]) -> tvm.IRModule:
    """The module with the bodies of some fused functions in the place of their calls."""
    mutator = _Bodies(module, functions)
    for variable, function in module.functions.items():
        if isinstance(function, relax.Function) and not _is_fused(function):
            mutator.builder_.update_func(variable, mutator.visit_expr(function))
    found = mutator.builder_.get()
    for variable in found.get_global_vars():
        if variable.name_hint in functions:
            del found[variable]
    return found


@mutator
class _Bodies(PyExprMutator):
    """Writes the calls in a fused function in the place of its own; their extents are those of the caller."""

    def __init__(self, module: tvm.IRModule, functions: Mapping[str, relax.Function]) -> None:
        super().__init__(module)
        self._functions = functions

    def visit_call_(self, call: relax.Call) -> Any:
        """The result of the calls of a function's body; everything else as it is."""
        call = super().visit_call_(call)
        function = self._functions.get(call.op.name_hint) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if function is None:
            return call
        function = _of_extents(function, call.args)
        values = dict(zip(function.params, call.args, strict=True))
        for block in function.body.blocks:
            for binding in block.bindings:
                values[binding.var] = self.builder_.emit(_with(binding.value, values))
        return _with(function.body.body, values)


def _of_extents(function: relax.Function, arguments: Sequence[relax.Expr]) -> relax.Function:
    """A function whose symbolic extents, which are its own, are those of arguments."""
    bound: dict[Any, Any] = {}
    for parameter, argument in zip(function.params, arguments, strict=True):
        own, given = _extents(parameter), _extents(argument)
        bound |= {mine: theirs for mine, theirs in zip(own, given, strict=True) if isinstance(mine, tirx.Var)}
    return function.bind_symbolic_vars(bound) if bound else function


def _extents(value: relax.Expr) -> Sequence[Size]:
    """Those of a tensor or a shape."""
    shape = value.ty.shape if isinstance(value.ty, relax.TensorType) else value
    return () if shape is None else shape_values(shape) or ()


def _with(value: Any, values: Mapping[Any, Any]) -> Any:
    """An expression in A-normal form of other values."""
    if value in values:
        return values[value]
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_with(field, values) for field in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(_with(value.tuple_value, values), value.index)
    if isinstance(value, tvm.ir.Call):
        return relax.Call(value.op, [_with(each, values) for each in value.args], value.attrs, list(value.ty_args))
    return value


__all__ = ["FuseForGpu"]
