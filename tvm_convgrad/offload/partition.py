# SPDX-License-Identifier: Apache-2.0
"""`partition`: convolutions, with what follows them, become calls of backends; everything else stays TVM's.

It is a function of a module that returns one, so its name is snake_case; passes have CamelCase names, as in
relax.transform.

A chain that a backend takes (relax_ops.passes.chains) becomes a function of its own, marked `Codegen` as TVM's
partitions are; TVM's RunCodegen then hands these to `relax.ext.<backend>`, which gives the C code of the calls. TVM's
FuseOpsByPattern is not used to find them: weight and bias gradient are two results of one call, which its patterns
cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import relax

from relax_ops.lowering import Lowered
from relax_ops.passes.chain_rewriter import ChainRewriter
from relax_ops.passes.chains import Chain, Convolution, Finder
from tvm_convgrad.codegen.hardware import cores_of, machine_of
from tvm_convgrad.core.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.offload.call_source import call_source
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.in_place import can_overwrite, overwriting
from tvm_convgrad.offload.measured import Measured, Winner, default_path
from tvm_convgrad.offload.registry import AUTO, NAMES, NONE, backend, names_for, require, verdict
from tvm_convgrad.targets import TargetLike, target_of

_NUMBERS = "convgrad.numbers"

CodeGenerator = Callable[[Sequence[relax.Function], object, object], list[tvm.runtime.Module]]
"""TVM's `relax.ext.<backend>`: (marked functions, options, constants) to modules."""


@dataclass
class Offloaded:
    """A module after offloading.

    Attributes:
        module: ready for tvm.compile.
        lowered: what is offloaded; `place` is the function and the number of the convolution in it.
        refused: for each (direction, problem's descriptor) that is not, the reason of each backend that was tried.
    """

    module: tvm.IRModule
    lowered: list[Lowered] = field(default_factory=list)
    refused: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    @property
    def backends(self) -> list[str]:
        """Those that the module calls."""
        return sorted({entry.choice.name for entry in self.lowered})


class _Taken(NamedTuple):
    backend: str
    engine: Engine
    reason: str
    refused: dict[str, str]


def partition(
    module: tvm.IRModule, backends: Sequence[str] | None = None, target: TargetLike | None = None
) -> tvm.IRModule:
    """Replace convolutions and their gradients by calls of vendor libraries; compile the result with tvm.compile.

    Args:
        module: an IRModule of Relax functions, before operators are legalized.
        backends: "onednn", "cudnn" or "cutlass", in order of preference; None means all backends for the target. A
            convolution that a backend does not support is offered to the next one; if none supports it, it is
            unchanged.
        target: the target for which the module will be compiled: a tvm.target.Target, its name or JSON form, "native"
            or a GPU such as "cuda:sm_90"; None means the current target (`with target:`), or "llvm".

    Returns:
        A new IRModule; `module` itself is unchanged.

    Raises:
        SetupError: a backend is not installed, or is not for this target; the message has the command that installs it.
        UnsupportedError: a name or the target is unknown, or the named backends support no convolution of the module.

    Example:
        module = tvm_convgrad.partition(module, ["cudnn"], tvm.target.Target("cuda"))
        executable = tvm.compile(module, tvm.target.Target("cuda"))
    """
    if target is None:
        target = tvm.target.Target.current(allow_none=True) or "llvm"
    target = target_of(target, "partition")
    if backends is not None and not backends:
        raise UnsupportedError(
            f"partition: backends = [] names none; name some of {', '.join(NAMES)}, or leave it out for all of them."
        )
    return offload(module, tuple(backends) if backends is not None else names_for(target), target).module


def offload(module: tvm.IRModule, names: Sequence[str], target: tvm.target.Target) -> Offloaded:
    """As `partition`, with a report.

    Args:
        names: backends in order of preference; ("auto",) or ("none",).
        target: a TVM target.
    """
    if tuple(names) == (NONE,):
        return Offloaded(module)
    automatic = tuple(names) == (AUTO,)
    if not automatic:
        require(names, target)
    taker = _Libraries(names_for(target) if automatic else tuple(names), target, automatic)
    found = {}
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            found[variable] = Finder(function, taker).chains()
    if taker.refused and not automatic and not any(found.values()):
        (direction, descriptor), reasons = next(iter(taker.refused.items()))
        because = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(
            f"offload to {', '.join(names)}: no convolution can be; {direction} of {descriptor} is refused by {because}"
        )
    result = Offloaded(module, refused=taker.refused)
    marked = _Marked(module, target)
    rewriter = ChainRewriter(module, marked.call)
    for variable, chains in found.items():
        if chains:
            result.module = rewriter.rewritten(variable, module[variable], chains)
            result.lowered += [_lowered(variable.name_hint, chain, target) for chain in chains]
    if result.lowered:
        _register()
        passes = [relax.transform.DeadCodeElimination(), relax.transform.RunCodegen()]
        result.module = overwriting(tvm.transform.Sequential(passes)(result.module), marked.places)
    return result


class _Libraries:
    """The taker of what backends compute."""

    copies = True

    def __init__(self, names: tuple[str, ...], target: tvm.target.Target, automatic: bool) -> None:
        self.in_place = can_overwrite(target)
        self._names, self._target, self._automatic = names, target, automatic
        self._measured = Measured(default_path(), cores_of(target)) if automatic else None
        self.refused: dict[tuple[str, str], dict[str, str]] = {}

    def take(self, op: str, direction: str, problem: ConvProblem) -> _Taken | None:
        """The first backend that computes it; automatically, what was measured to be faster, or a generated kernel."""
        reasons: dict[str, str] = {}
        kernel = chooser.choose(problem, direction, machine_of(self._target))
        winner = (
            self._measured.winner(direction, problem, machine_of(self._target)) if self._measured is not None else None
        )
        for name in self._names:
            found = self._reason_against(name, kernel, winner) or self._verdict(name, direction, problem, NO_EPILOGUE)
            if isinstance(found, Engine):
                if self._automatic and kernel.is_kernel and winner is not None:
                    passed = {kernel.name: f"measured: {name} is {winner.gain:.2f}x as fast"}
                    return _Taken(name, found, f"measured: {winner.gain:.2f}x the generated kernel", passed)
                if self._automatic:
                    return _Taken(name, found, "no generated kernel computes it", kernel.refused)
                passed = {kernel.name: f"{name} is requested"} if kernel.is_kernel else kernel.refused
                return _Taken(name, found, "requested", {**reasons, **passed})
            reasons[name] = found
        self.refused[direction, problem.descriptor] = reasons
        return None

    def refusal(self, convolution: Convolution, epilogue: Epilogue) -> str:
        """As the backend's rules and its library say."""
        found = self._verdict(convolution.how.backend, convolution.direction, convolution.problem, epilogue)
        return found if isinstance(found, str) else ""

    def _reason_against(self, name: str, kernel: Choice, winner: Winner | None) -> str:
        """Why the automatic order passes over a backend."""
        if not self._automatic or not kernel.is_kernel or (winner is not None and winner.name == name):
            return ""
        measured = f"; measured: it is {winner.gain:.2f}x as fast" if winner is not None else ""
        first = f"auto takes the generated kernel first ({kernel.name}{measured})"
        return backend(name).unavailable(self._target) or first

    def _verdict(self, name: str, direction: str, problem: ConvProblem, epilogue: Epilogue) -> Engine | str:
        return verdict(name, direction, problem, epilogue, self._target, lenient=self._automatic)


def _lowered(function: str, chain: Chain, target: tvm.target.Target) -> Lowered:
    c = chain.convolution
    engine = c.how.engine
    if chain.epilogue != NO_EPILOGUE:
        again = verdict(c.how.backend, c.direction, c.problem, chain.epilogue, target)
        assert isinstance(again, Engine), "the finder has tried it"
        engine = again
    choice = Choice(c.how.backend, c.how.reason, refused=c.how.refused, engine=engine)
    fused = tuple(name for name, value in vars(chain.epilogue).items() if value)
    form = f"{c.how.backend} {engine.implementation}"
    return Lowered(c.op, c.direction, c.problem, choice, machine_of(target), form, fused, (function, c.number))


class _Marked:
    """Calls of marked functions, one function a module for equal calls.

    Attributes:
        places: by symbol, of those that sum in place, for each result the argument that it overwrites, or -1.
    """

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target) -> None:
        self._target = target
        self._functions: dict[tuple[str, tuple[int, ...], bool], tvm.ir.GlobalVar] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        # A module may be partitioned again; its symbols must not meet those of before.
        self._round = len((module.attrs or {}).get("external_mods", []))

    def call(self, builder: relax.BlockBuilder, chain: Chain) -> relax.Call:
        """The call of a chain's function, which is added to the builder's module if it is new."""
        arguments = [*chain.convolution.operands, chain.bias, chain.acc, chain.second_acc]
        arguments = [tensor for tensor in arguments if tensor is not None]
        return relax.Call(self._function(builder, chain, arguments), arguments)

    def _function(self, builder: relax.BlockBuilder, chain: Chain, arguments: list[relax.Expr]) -> tvm.ir.GlobalVar:
        c = chain.convolution
        name = c.how.backend
        numbers = backend(name).numbers(c.direction, c.problem, chain.epilogue, self._target)
        key = (name, tuple(numbers), chain.in_place)
        if key not in self._functions:
            symbol = f"convgrad_{name}_{c.op}_{self._round}_{len(self._functions)}"
            if chain.in_place:
                acc = 2 + chain.epilogue.bias
                second = (acc + 1 if chain.epilogue.bias_accumulate else -1,) if chain.epilogue.bias_grad else ()
                self.places[symbol] = (acc, *second)
            made = _function_of(chain, arguments).with_attrs(
                {"Codegen": name, "global_symbol": symbol, _NUMBERS: list(numbers)}
            )
            self._functions[key] = builder.add_func(relax.utils.copy_with_new_vars(made), symbol)
        return self._functions[key]


def _function_of(chain: Chain, arguments: list[relax.Expr]) -> relax.Function:
    """A chain in operators, as a function of its operands: what the call of the backend means."""
    c, e = chain.convolution, chain.epilogue
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", argument.ty) for i, argument in enumerate(arguments)]
    extra = iter(params[2:])
    with builder.function("main", params):
        with builder.dataflow():
            value = builder.emit(relax.Call(c.call.op, [*params[:2], *c.call.args[2:]], c.call.attrs, c.call.ty_args))
            if e.bias:
                layout = c.problem.grad_layout
                wide = [c.problem.out_channels if letter == "C" else 1 for letter in layout]
                value = builder.emit(relax.op.add(value, builder.emit(relax.op.reshape(next(extra), wide))))
            if e.accumulate:
                value = builder.emit(relax.op.add(next(extra), value))
            if e.relu:
                value = builder.emit(relax.op.nn.relu(value))
            if e.bias_grad:
                axes = [axis for axis, letter in enumerate(c.problem.grad_layout) if letter != "C"]
                wide = builder.emit(relax.op.astype(params[0], c.problem.kernel_dtype))
                total = builder.emit(relax.op.sum(wide, axis=axes))
                if e.bias_accumulate:
                    total = builder.emit(relax.op.add(next(extra), total))
                value = relax.Tuple([value, total])
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()["main"]


def _register() -> None:
    """Give TVM the code generators, `relax.ext.<backend>`."""
    for name in NAMES:
        tvm_ffi.register_global_func(f"relax.ext.{name}", _generator(name), override=True)


def _generator(name: str) -> CodeGenerator:
    def generate(functions: Sequence[relax.Function], _options: object, _constants: object) -> list[tvm.runtime.Module]:
        """The C module of the marked functions."""
        calls = []
        for function in functions:
            attributes = function.attrs or {}
            if _NUMBERS not in attributes:
                raise UnsupportedError(f"relax.ext.{name}: a function that tvm_convgrad.partition has not made")
            calls.append((str(attributes["global_symbol"]), [int(number) for number in attributes[_NUMBERS]]))
        chosen = backend(name)
        source = call_source(calls, chosen.run_function, name, chosen.library(), chosen.entry.setting)
        create = tvm_ffi.get_global_func("runtime.CSourceModuleCreate")
        return [create(source, "c", [symbol for symbol, _ in calls], [])]

    return generate


__all__ = ["Offloaded", "offload", "partition"]
