# SPDX-License-Identifier: Apache-2.0
"""Arguments of a compiled module are checked once, where it is entered, and not again by each kernel inside.

TVM gives every kernel code that checks each of its tensors: type, shape, strides, alignment, device. In a step that is
a third of the time to compile and to link, for calls that the step makes itself, with tensors that the memory planner
made. The virtual machine's own check of a function's arguments covers shapes and types only, so more functions, which
do nothing, take all of its tensors, those of its state too, and have TVM's whole checks.

The pipeline also keeps the 64-bit indices of functions that LLVM would compile to wrong code with 32-bit ones, and
takes divisions out of loops that it would compile to wrong code (`symbolic_divisions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline

from relax_ops.compat import NARROWS_INDICES, SHRINKS_BUFFERS, SBlockRealize, TirCall, nodes_of
from tvm_convgrad.training.passes.symbolic_divisions import with_simple_divisions

PIPELINE = "convgrad_internal_calls"
"""The name under which TVM finds the pipeline of `without_checks`."""

_ENTRY = "convgrad_entry"

_LEFT_TO_LLVM = ("tirx.RemoveNoOp",)
"""Passes of TVM that take a seventh of the time before LLVM, for what LLVM removes as well."""


def CheckAtEntry() -> tvm.transform.Pass:
    """The pass that begins each public function with calls of functions that check the tensors it is given.

    One takes all of its tensors, whose symbolic extents have to agree; one each takes those of tuples, a step's state:
    they are hundreds of few shapes, and LLVM's time grows with the square of what one function checks.
    """
    return tvm.transform.module_pass(_check_at_entry, opt_level=0, name="ConvgradCheckAtEntry")


def _check_at_entry(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    builder = relax.BlockBuilder(module)
    made: dict[str, Any] = {}
    for variable, function in module.functions_items():
        if not isinstance(function, relax.Function) or not (function.attrs and "global_symbol" in function.attrs):
            continue
        own = [p for p in function.params if _is_checked(p)]
        bindings: list[Any] = []
        parts = [leaf for p in function.params if p not in own for leaf in _tensors(p, bindings)]
        for tensors in ([own] if own else []) + [[part] for part in parts]:
            described = str([t.ty for t in tensors])
            if described not in made:
                made[described] = builder.add_func(_checking(tensors), f"{_ENTRY}_{len(made)}")
            call = relax.Call(made[described], tensors, ty_args=[relax.TupleType([])])
            bindings.append(relax.VarBinding(relax.Var("checked", relax.TupleType([])), call))
        if not bindings:
            continue
        body = function.body
        body = relax.SeqExpr([relax.BindingBlock(bindings), *body.blocks], body.body)
        builder.update_func(
            variable, relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        )
    return builder.get()


def _is_checked(variable: relax.Var) -> bool:
    return isinstance(variable.ty, relax.TensorType) and variable.ty.shape is not None


def _tensors(variable: relax.Var, bindings: list[relax.Binding]) -> Iterator[Any]:
    """The tensors of a tuple; what takes them out of it is added to `bindings`."""
    if _is_checked(variable):
        yield variable
    for number, field in enumerate(variable.ty.fields if isinstance(variable.ty, relax.TupleType) else ()):
        part = relax.Var(f"{variable.name}_{number}", field)
        bindings.append(relax.VarBinding(part, relax.TupleGetItem(variable, number)))
        yield from _tensors(part, bindings)


def _checking(tensors: list[Any]) -> Any:
    """A function that takes tensors of these shapes and types, and does nothing."""
    buffers = [
        tirx.decl_buffer(tuple(t.ty.shape), str(t.ty.dtype), name=f"argument_{n}") for n, t in enumerate(tensors)
    ]
    return tirx.PrimFunc(buffers, tirx.Evaluate(tirx.IntImm("int32", 0))).with_attr({"tirx.is_scheduled": True})


def without_checks() -> tuple[Any, Any, Any]:
    """TVM's own pipeline for kernels on CPUs; what it adds to check arguments goes, but for the functions of entries.

    A kernel with a check of its own, such as of a batch that its indices do not reach, keeps all.
    """
    lower, finalize_host, finalize_device = compilation_pipeline.get_tir_pipeline("default")
    skip = tirx.transform.SkipAssert()

    @tvm.transform.module_pass(opt_level=0, name="ConvgradWithoutChecks")
    def pipeline(module: tvm.IRModule, _context: tvm.transform.PassContext) -> Any:
        bare = skip(module)
        keep = {
            variable.name_hint
            for variable, function in module.functions_items()
            if variable.name_hint.startswith(_ENTRY) or not bare[variable].body.same_as(function.body)
        }
        lowered = _lowered(module, lower)
        for variable, function in lowered.functions_items():
            if isinstance(function, tirx.PrimFunc):
                lowered[variable] = with_simple_divisions(function)
        result = skip(lowered)
        for variable in lowered.get_global_vars():
            if variable.name_hint in keep:
                result[variable] = lowered[variable]
        return result

    return pipeline, finalize_host, finalize_device


def _lowered(module: tvm.IRModule, lower: tvm.transform.Pass) -> tvm.IRModule:
    """The module after TVM's passes, each function without those that `_left_out` has for it."""
    groups: dict[tuple[str, ...], dict[Any, Any]] = {}
    for variable, function in module.functions_items():
        groups.setdefault(_left_out(function), {})[variable] = function
    result = tvm.IRModule({}, attrs=module.attrs)
    now = tvm.transform.PassContext.current()
    for left_out, functions in groups.items():
        context = tvm.transform.PassContext(
            now.opt_level, now.required_pass, [*now.disabled_pass, *left_out], list(now.instruments), now.config
        )
        with context:
            result.update(lower(tvm.IRModule(functions, attrs=module.attrs)))
    return result


def _left_out(function: Any) -> tuple[str, ...]:
    """The passes of TVM that a function does without: LLVM does the same, or it has no need of them, or breaks by them.

    Those of generated kernels take half of the time of all passes.
    """
    if not isinstance(function, tirx.PrimFunc):
        return ()
    shrinks = () if isinstance(function.body, SBlockRealize) else SHRINKS_BUFFERS
    narrows = NARROWS_INDICES if _has_guarded_remainder(function) else ()
    return (*_LEFT_TO_LLVM, *shrinks, *narrows)


def _has_guarded_remainder(function: tirx.PrimFunc) -> bool:
    """Whether a function has guards, and remainders of a power of two, which LLVM takes for numbers of few bits.

    LLVM 22's loop vectorizer assumes of a guarded index of 32 bits that it does not wrap, checks that, and takes it as
    proof that the number of few bits does not either: with AVX-512's masked loads, the remainders of 16 columns by 4
    became 0 to 15. Indices of 64 bits need no such assumption.
    """
    divisors = [node.b for node in nodes_of(function, tirx.FloorMod, tirx.Mod)]
    if not any(isinstance(d, tirx.IntImm) and _is_wide_power(d) for d in divisors):
        return False
    if nodes_of(function, tirx.IfThenElse):
        return True
    return any(str(getattr(call.op, "name", "")).endswith("if_then_else") for call in nodes_of(function, TirCall))


def _is_wide_power(divisor: tirx.IntImm) -> bool:
    """Whether a divisor is a power of two, and of 64 bits: our own kernels count in 32, which nothing narrows."""
    value = int(divisor.value)
    return value > 1 and value & (value - 1) == 0 and str(divisor.ty.dtype) == "int64"


compilation_pipeline.register_tir_pipeline(PIPELINE, without_checks)

__all__ = ["PIPELINE", "CheckAtEntry"]
