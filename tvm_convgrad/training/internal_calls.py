# SPDX-License-Identifier: Apache-2.0
"""Arguments of a compiled module are checked once, where it is entered, and not again by each kernel inside.

TVM gives every kernel code that checks each of its tensors: type, shape, strides, alignment, device. In a step that is
a third of the time to compile and to link, for calls that the step makes itself, with tensors that the memory planner
made. The virtual machine's own check of what a function is given knows shapes and types only, so one more function,
which does nothing, takes all of a function's tensors and has TVM's whole checks.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline

PIPELINE = "convgrad_internal_calls"
"""The name under which TVM finds the pipeline of `without_checks`."""

_ENTRY = "convgrad_entry"


@tvm.transform.module_pass(opt_level=0, name="ConvgradCheckAtEntry")
def check_at_entry(module: Any, _context: Any) -> Any:
    """Each public function begins with a call of a function that checks the tensors it is given."""
    builder = relax.BlockBuilder(module)
    for variable, function in module.functions_items():
        if not isinstance(function, relax.Function) or not (function.attrs and "global_symbol" in function.attrs):
            continue
        tensors = [p for p in function.params if isinstance(p.ty, relax.TensorType) and p.ty.shape is not None]
        if not tensors:
            continue
        checks = builder.add_func(_checking(tensors), f"{_ENTRY}_{variable.name_hint}")
        call = relax.Call(checks, tensors, ty_args=[relax.TupleType([])])
        binding = relax.VarBinding(relax.Var("checked", relax.TupleType([])), call)
        body = function.body
        body = relax.SeqExpr([relax.BindingBlock([binding]), *body.blocks], body.body)
        builder.update_func(
            variable, relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        )
    return builder.get()


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
    def pipeline(module: Any, _context: Any) -> Any:
        bare = skip(module)
        keep = {
            variable
            for variable, function in module.functions_items()
            if variable.name_hint.startswith(_ENTRY) or not bare[variable].body.same_as(function.body)
        }
        lowered = lower(module)
        result = skip(lowered)
        for variable in lowered.get_global_vars():
            if any(variable.name_hint == kept.name_hint for kept in keep):
                result[variable] = lowered[variable]
        return result

    return pipeline, finalize_host, finalize_device


compilation_pipeline.register_tir_pipeline(PIPELINE, without_checks)

__all__ = ["PIPELINE", "check_at_entry"]
