# SPDX-License-Identifier: Apache-2.0
"""Compiling a training step: legalization, fusion, a CPU schedule, memory planning, LLVM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline

from relax_ops.active import rules
from relax_ops.ir import direction_of
from relax_ops.lowering import Lowered, recorded_choices, recorded_seconds
from relax_ops.passes.fusion import FuseEpilogues
from tvm_convgrad.codegen.hardware import is_gpu, machine_of
from tvm_convgrad.core.epilogue import NO_EPILOGUE
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.partition import Offloaded, offload
from tvm_convgrad.offload.registry import AUTO, NONE, require, verdict
from tvm_convgrad.targets import target_of
from tvm_convgrad.training.compile.gpu import compile_for_gpu
from tvm_convgrad.training.compile.initial_state import InitialState
from tvm_convgrad.training.compile.separate import build_apart, builds_in_force, pool_of
from tvm_convgrad.training.ir.gradient_ops import convolution_descriptors
from tvm_convgrad.training.ir.recomputation import recomputation_of
from tvm_convgrad.training.passes.arena import PlaceInArena
from tvm_convgrad.training.passes.constants import FoldConstants
from tvm_convgrad.training.passes.flat_gradients import GradientsInOneBuffer
from tvm_convgrad.training.passes.gradient_sums import AddGradientsInPlace
from tvm_convgrad.training.passes.in_place import UpdateStateInPlace
from tvm_convgrad.training.passes.internal_calls import PIPELINE, CheckAtEntry
from tvm_convgrad.training.passes.layer_norm import FuseLayerNorms
from tvm_convgrad.training.passes.library_products import ProductsForLibraries
from tvm_convgrad.training.passes.order import OrderCalls
from tvm_convgrad.training.passes.own_results import OwnResults
from tvm_convgrad.training.passes.products import ProductsAsConvolutions
from tvm_convgrad.training.passes.recompute import Recompute
from tvm_convgrad.training.passes.rematerialise import Rematerialise
from tvm_convgrad.training.passes.vectorised import VectoriseFunctions
from tvm_convgrad.training.passes.wide_products import WidenProducts
from tvm_convgrad.training.passes.written_out import WriteOutOperators
from tvm_convgrad.training.schedule.cpu import ScheduleForCpu
from tvm_convgrad.training.step.module import StepModule
from tvm_convgrad.training.step.predictor import PREDICT, Predictor

# LLVM's SLP vectorizer breaks small fused matrix products on plain x86-64 ("Instruction does not dominate all
# uses"); vectors are made by the schedule, so nothing is lost without it.
_LLVM_OPTIONS = ["-vectorize-slp:bool=0"]


def compile_step(step: StepModule, target: tvm.target.Target = "llvm") -> tvm.runtime.Executable:
    """Compile a training step.

    Args:
        step: result of `build_step`.
        target: a tvm Target, its name or its JSON form; "native" means the CPU of this machine.

    Returns:
        The executable, with the functions step, predict and init, for relax.VirtualMachine.

    Raises:
        UnsupportedError: the target is neither a CPU nor an NVIDIA GPU; or the target is a GPU and the step is split or
            recomputes values; or a step with a symbolic batch recomputes values.
    """
    return compile_with_plan(step, target)[0]


@rules()
def compile_with_plan(
    step: StepModule, target: tvm.target.Target = "llvm", backends: Sequence[str] = (NONE,)
) -> tuple[tvm.runtime.Executable, list[Lowered]]:
    """The executable of a step, for a CPU, and what computes each convolution of its function `step`, in order.

    Args:
        target: a tvm Target, or what makes one; "native" is LLVM for the CPU of this machine. A GPU's is of kind cuda.
        backends: vendor libraries for convolutions, in order of preference; ("auto",) or ("none",).

    Raises:
        UnsupportedError: the target is not a CPU; or backends are named and refuse every convolution; or a split step
            for a GPU, or one that recomputes; or a step that recomputes and whose batch is free.
        SetupError: a backend that is named is not installed.
    """
    return _compiled_step(step, step.module, target, backends)


@rules()
def compile_to_link(
    step: StepModule, target: tvm.target.Target, backends: Sequence[str] = (NONE,)
) -> tuple[tvm.runtime.Executable, list[Lowered], InitialState | None]:
    """As `compile_with_plan`, for `save_artifact`, which takes the initial state, too.

    For a CPU the executable's `init` calls a function of the library that is linked; for a GPU it has constants, and
    there is no initial state to link.
    """
    initial = None if is_gpu(target) else InitialState(step.initial_state)
    module = step.module if initial is None else initial.module(step.module)
    return *_compiled_step(step, module, target, backends), initial


def _compiled_step(
    step: StepModule, module: tvm.IRModule, target: tvm.target.Target, backends: Sequence[str]
) -> tuple[tvm.runtime.Executable, list[Lowered]]:
    """The executable and the plan of a step's module."""
    target = target if is_gpu(target) else _cpu(target)
    if is_gpu(target) and step.flat is not None:
        raise UnsupportedError(
            f"compile_step: a split step puts its gradients into one buffer on CPUs only, but the target is "
            f"{target.attrs['arch']}; leave split out, or use target llvm."
        )
    if is_gpu(target) and recomputation_of(step.module["step"]).is_required:
        raise UnsupportedError(
            f"compile_step: values are computed again on CPUs only, but the target is {target.attrs['arch']}; leave "
            "recompute out, or use target llvm."
        )
    return _compiled(module, "step", target, backends)


@rules()
def compile_predictor(
    predictor: Predictor, target: tvm.target.Target = "llvm", backends: Sequence[str] = (NONE,)
) -> tuple[tvm.runtime.Executable, list[Lowered]]:
    """The executable of an inference function, and what computes its convolutions; the rest as `compile_with_plan`."""
    return _compiled(predictor.module, PREDICT, target if is_gpu(target) else _cpu(target), backends)


def _compiled(
    module: tvm.IRModule, entry: str, target: tvm.target.Target, backends: Sequence[str]
) -> tuple[tvm.runtime.Executable, list[Lowered]]:
    """The executable of a module, and what computes the convolutions of its function `entry`."""
    module = for_libraries(simplified(module), backends, target)
    offloaded = offload(module, backends, target)
    with recorded_choices() as record:
        executable = compile_module(offloaded.module, target)
    return executable, _in_order(module, entry, record, offloaded)


@rules()
def compile_module(module: tvm.IRModule, target: tvm.target.Target = "llvm") -> tvm.runtime.Executable:
    """Compile a module of Relax functions without control flow by the passes that training steps are compiled with.

    Args:
        module: any such module, such as that of `per_sample_module`.
        target: a tvm Target, its name or its JSON form; "native" means the CPU of this machine.

    Returns:
        The executable, for relax.VirtualMachine.

    Raises:
        UnsupportedError: the target is neither a CPU nor an NVIDIA GPU.
    """
    if is_gpu(target):
        return compile_for_gpu(module, target)
    target = _cpu(target)
    whole, builds = _with_options(target), builds_in_force()
    if builds is None:
        return tvm.compile(module, target=whole, relax_pipeline=LowerStep(target), tir_pipeline=PIPELINE)
    builds.progress("choosing kernels, layouts and memory")
    with pool_of(builds, module, whole) as pool:
        with whole:
            lowered = LowerStep(target)(module)
        return build_apart(lowered, whole, builds, pool)


@rules()
def plan_of(step: StepModule, target: tvm.target.Target = "llvm", backends: Sequence[str] = (NONE,)) -> list[Lowered]:
    """What `compile_with_plan` would take for each convolution, without compiling; arguments and errors as there."""
    target = target if is_gpu(target) else _cpu(target)
    module = for_libraries(simplified(step.module), backends, target)
    offloaded = offload(module, backends, target)
    with target, recorded_choices() as record:
        tvm.transform.Sequential([*_rewrites(), relax.transform.LegalizeOps()])(offloaded.module)
    return _in_order(module, "step", record, offloaded)


def simplified(module: tvm.IRModule) -> tvm.IRModule:
    """The module without common subexpressions: the one whose convolutions are counted."""
    passes = [WriteOutOperators(), relax.transform.EliminateCommonSubexpr(), relax.transform.CanonicalizeBindings()]
    return tvm.transform.Sequential(passes)(module)


def for_libraries(module: tvm.IRModule, backends: Sequence[str], target: tvm.target.Target) -> tvm.IRModule:
    """The module with more convolutions for libraries: on GPUs matrix products are.

    Unless libraries are named and refuse all of the module's own, of which `offload` tells the reasons.
    """
    if not is_gpu(target) or tuple(backends) == (NONE,):
        return module
    functions = [function for function in module.functions.values() if isinstance(function, relax.Function)]
    own = {key for function in functions for key in convolution_descriptors(function)}
    if own and tuple(backends) != (AUTO,):
        require(backends, target)
        if not any(_is_taken(name, *key, target) for name in backends for key in own):
            return module
    return ProductsForLibraries(backends, target)(module)


def _is_taken(name: str, operator: str, descriptor: str, target: tvm.target.Target) -> bool:
    """Whether a library computes a convolution, by the keys of `convolution_descriptors`."""
    problem = ConvProblem.from_descriptor(descriptor)
    return isinstance(verdict(name, direction_of(operator), problem, NO_EPILOGUE, target), Engine)


def _rewrites() -> list[tvm.transform.Pass]:
    """What is done to a step before operators are legalized; convolutions stay in their order."""
    return [
        WriteOutOperators(),  # of a module that is no step, and so was not simplified
        FuseLayerNorms(),
        ProductsAsConvolutions(),
        WidenProducts(),
        FuseEpilogues(),
        AddGradientsInPlace(),
        Recompute(),
        VectoriseFunctions(),
    ]


def _in_order(module: tvm.IRModule, entry: str, record: list[Lowered], offloaded: Offloaded) -> list[Lowered]:
    """For each convolution of a function its entry of a record; equal problems are lowered alike, but for fusion.

    A fused one's place counts only the convolutions that offloading has left.
    """
    libraries = {each.place: each for each in offloaded.lowered}
    fused = {each.place: each for each in record if each.place is not None}
    alone = {(each.op, each.problem.descriptor): each for each in record if each.place is None}
    ordered, left = [], 0
    for number, key in enumerate(convolution_descriptors(module[entry])):
        found = libraries.get((entry, number))
        if found is None:
            found = fused.get((entry, left)) or alone[key]
            left += 1
            refused = found.choice.refused | offloaded.refused.get((found.direction, found.problem.descriptor), {})
            found = found._replace(choice=replace(found.choice, refused=refused))
        ordered.append(found)
    return ordered


def _cpu(target: tvm.target.Target) -> tvm.target.Target:
    """The target as an object; raises if it is not for CPUs."""
    target = target_of(target, "compile_step")
    if target.kind.name != "llvm":
        raise UnsupportedError(
            f"compile_step: target {target.kind.name!r} is not a CPU; training steps are compiled for kind llvm only."
        )
    return target


def _with_options(target: tvm.target.Target) -> tvm.target.Target:
    """The target with our LLVM options added to those that it has."""
    described = json.loads(str(target))
    described["cl-opt"] = [*described.get("cl-opt", []), *_LLVM_OPTIONS]
    return tvm.target.Target(described)


def LowerStep(target: tvm.target.Target) -> tvm.transform.Pass:
    """The pass that lowers a step's module to what the virtual machine's code generator takes."""

    @rules()
    def lower(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        module, seconds = ordered(module, target)
        return finished(module, target, seconds)

    return tvm.transform.module_pass(lower, opt_level=0, name="ConvgradLower")


def ordered(module: tvm.IRModule, target: tvm.target.Target) -> tuple[tvm.IRModule, dict[str, float]]:
    """A step's module whose functions call kernels in their final order; the estimates of generated ones by name."""
    with target, recorded_seconds() as seconds:
        passes = [
            *cpu_pipeline.library_dispatch_passes(target),
            *_rewrites(),
            relax.transform.LegalizeOps(),
            FoldConstants(),
            *cpu_pipeline.legalize_passes(target),
            relax.transform.DeadCodeElimination(),
            OrderCalls(),
        ]
        return tvm.transform.Sequential(passes)(module), seconds


def finished(
    module: tvm.IRModule, target: tvm.target.Target, seconds: Mapping[str, float], *, scheduled: bool = True
) -> tvm.IRModule:
    """A module of `ordered` with its memory.

    Args:
        scheduled: whether loops are scheduled; a plan of the memory does without.
    """
    with target:
        passes = [
            Rematerialise(seconds, machine_of(target)),
            OwnResults(PREDICT),
            UpdateStateInPlace(),
            GradientsInOneBuffer(),
            *cpu_pipeline.dataflow_lower_passes(target),
            PlaceInArena(),
            CheckAtEntry(),
            # Behind the pass that finds reshapes, which recognises unscheduled functions only.
            *([ScheduleForCpu()] if scheduled else []),
            *cpu_pipeline.finalize_passes(target),
        ]
        return tvm.transform.Sequential(passes)(module)
