# SPDX-License-Identifier: Apache-2.0
"""Offload in Relay: convolutions, with what follows them, as regions for oneDNN, cuDNN, CUTLASS, or plain C.

    module = relay_ops.partition.partition(module, ["onednn"], "llvm")
    relay.build(module, "llvm").export_library("step.so")

Regions become C++ source (relay_ops.region_source) that is compiled into the exported library. Of a library it holds
calls of a runtime, which is built once a machine; C needs nothing besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Union

import tvm
from tvm import relay
from tvm.relay.build_module import bind_params_by_name
from tvm.relay.dataflow_pattern import DFPattern

from relay_ops.backends import (
    ALL,
    C,
    Verdict,
    compiler_of,
    default_names,
    forms_of,
    judge,
    require,
    takes,
    verdict,
)
from relay_ops.constants import without_constants
from relay_ops.patterns import OPS, Form, label_of, match_of, pattern_of
from relay_ops.region_source import TARGET, source_of
from tvm_convgrad.core.errors import ConvGradError, UnsupportedError
from tvm_convgrad.offload.contract import Engine

NAME = compiler_of(C)
"""The compiler of regions of C."""

Check = Callable[[relay.Call], bool]
Patterns = list[tuple[str, DFPattern, Check]]
TargetLike = Union[tvm.target.Target, str, None]
"""A target, its text, or None: the target in scope, or "llvm"."""


def partition(
    module: tvm.IRModule, backends: Sequence[str] | None = None, target: TargetLike = None, *, forward: bool = False
) -> tvm.IRModule:
    """Put the convolutions that backends take into regions of their own.

    Args:
        module: an IRModule, before operators are legalized.
        backends: "onednn", "cudnn", "cutlass" or "c" in order of preference: what the first one refuses goes to the
            next one, and what all of them refuse stays with its strategy. None takes what makes no program slower:
            libraries on GPUs, C on targets of kind "c", and on other CPUs nothing.
        target: that the module will be built for.
        forward: C takes nn.conv{1,2,3}d and their transposes as well, which Relay's own schedules do faster.

    Returns:
        The module, types inferred. Constants that a region needs are arguments of it: C source has no place for them.

    Raises:
        SetupError: a backend is not installed, or is not for this target; the text has the command that installs it.
        UnsupportedError: an unknown name, or libraries that refuse every convolution of the module.
    """
    target = target_of(target)
    names = _names(backends, target)
    module = relay.transform.InferType()(module)
    if backends is not None and C not in names:
        _require_one(module, names, target)
    patterns = [each for name in names for each in patterns_of(name, target, forward=forward, ops=_operators(module))]
    if not patterns:
        return module
    compilers = [compiler_of(name) for name in names]
    passes = tvm.transform.Sequential(
        [
            relay.transform.MergeComposite(patterns),
            relay.transform.AnnotateTarget(compilers),
            relay.transform.MergeCompilerRegions(),
            relay.transform.PartitionGraph(),
            relay.transform.InferType(),
        ]
    )
    with tvm.transform.PassContext(opt_level=3):
        return relay.transform.InferType()(without_constants(passes(module), compilers, {TARGET: str(target)}))


def partition_for_convgrad(
    module: tvm.IRModule,
    params: Mapping[str, tvm.nd.NDArray] | None = None,
    backends: Sequence[str] | None = None,
    target: TargetLike = None,
    *,
    forward: bool = False,
) -> tvm.IRModule:
    """As `partition`, in the form of TVM's partition_for_* functions: `params` become constants of the module first."""
    if params:
        module = tvm.IRModule(dict(module.functions), module.type_definitions)
        module["main"] = bind_params_by_name(module["main"], dict(params))
    return partition(module, backends, target, forward=forward)


partition_for_onednn = partial(partition_for_convgrad, backends=("onednn",))
partition_for_cudnn = partial(partition_for_convgrad, backends=("cudnn",))
partition_for_cutlass = partial(partition_for_convgrad, backends=("cutlass",))


def verdicts(
    module: tvm.IRModule, backends: Sequence[str] | None = None, target: TargetLike = None, *, forward: bool = False
) -> list[Verdict]:
    """For each convolution of a module the backend that `partition` gives it to, and the reason of every other one.

    What follows a convolution may become a part of its region; a verdict is on the convolution alone.

    Args:
        module, backends, target, forward: as `partition` takes them; without backends those that are not taken by
            themselves have their reasons, too.

    Raises:
        SetupError, UnsupportedError: as `partition`, but for backends that refuse everything.
    """
    target = target_of(target)
    names = _names(backends, target)
    others = [name for name in ALL if name not in names] if backends is None else []
    found = []
    for call in _convolutions(relay.transform.InferType()(module)):
        op = str(call.op.name)
        try:
            match = match_of(call, op, ())
        except ConvGradError as error:
            found.append(Verdict(op, "", "", refused=dict.fromkeys([*names, *others], str(error))))
            continue
        assert not isinstance(match, str), "a bare convolution"
        found.append(judge(match, names, target, forward, others))
    return found


def patterns_of(name: str, target: tvm.target.Target, *, forward: bool, ops: Sequence[str] = OPS) -> Patterns:
    """The patterns of a backend, the longest first.

    Args:
        name: the backend.
        target: that programs are built for.
        forward: whether C takes stock convolutions.
        ops: the operators that are wanted.
    """
    compiler = compiler_of(name)
    found = [(op, form) for op in ops if takes(name, op, forward) for form in forms_of(name, op)]
    return [
        (f"{compiler}.{label_of(op, form)}", pattern_of(op, form), _check(name, op, form, target))
        for op, form in sorted(found, key=lambda each: -len(each[1]))
    ]


def register_codegen() -> None:
    """Register pattern tables and relay.ext.<compiler> of every backend; called once, by relay_ops.register."""
    for name in ALL:
        compiler = compiler_of(name)
        relay.op.contrib.register_pattern_table(compiler, partial(_table, name))
        tvm.register_func(f"relay.ext.{compiler}", partial(_generated, name), override=True)


def target_of(target: TargetLike) -> tvm.target.Target:
    """A target: as given, in scope, or "llvm"."""
    if target is None:
        target = tvm.target.Target.current(allow_none=True) or "llvm"
    return target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)


def _table(name: str) -> Patterns:
    """The pattern table of a backend, for the target in scope."""
    return patterns_of(name, target_of(None), forward=False)


def _generated(name: str, function: relay.Function) -> tvm.runtime.Module:
    """The module of a region."""
    symbol = str(function.attrs["global_symbol"])
    create = tvm.get_global_func("runtime.CSourceModuleCreate")
    return create(source_of(function, symbol, name), "cc", [symbol], [])


def _names(backends: Sequence[str] | None, target: tvm.target.Target) -> tuple[str, ...]:
    if backends is None:
        return default_names(target)
    require(backends, target)
    return tuple(backends)


def _check(name: str, op: str, form: Form, target: tvm.target.Target) -> Check:
    def check(call: relay.Call) -> bool:
        try:
            match = match_of(call, op, form)
        except ConvGradError:  # it stays with its strategy, which says so
            return False
        return not isinstance(match, str) and isinstance(verdict(name, match, target), Engine)

    return check


def _convolutions(module: tvm.IRModule) -> list[relay.Call]:
    """The calls of convolutions, in all functions that are not regions."""
    found: list[relay.Call] = []

    def visit(node: relay.Expr) -> None:
        if isinstance(node, relay.Call) and isinstance(node.op, tvm.ir.Op) and str(node.op.name) in OPS:
            found.append(node)

    for function in module.functions.values():
        if isinstance(function, relay.Function) and not (function.attrs and "Compiler" in function.attrs):
            relay.analysis.post_order_visit(function, visit)
    return found


def _operators(module: tvm.IRModule) -> list[str]:
    present = {str(call.op.name) for call in _convolutions(module)}
    return [name for name in OPS if name in present]


def _require_one(module: tvm.IRModule, names: Sequence[str], target: tvm.target.Target) -> None:
    """Raise UnsupportedError if the libraries refuse every convolution, and there is one."""
    found = verdicts(module, names, target)
    if found and not any(each.backend for each in found):
        raise UnsupportedError(f"offload to {', '.join(names)}: no convolution can be; the first is {found[0]}")


__all__ = [
    "NAME",
    "Verdict",
    "partition",
    "partition_for_convgrad",
    "partition_for_cudnn",
    "partition_for_cutlass",
    "partition_for_onednn",
    "patterns_of",
    "register_codegen",
    "target_of",
    "verdicts",
]
