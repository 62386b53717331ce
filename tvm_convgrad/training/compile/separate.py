# SPDX-License-Identifier: Apache-2.0
"""Compiling the kernels of a module apart: equal ones once, in several processes, those of earlier builds not at all.

Each becomes an object of its own, which the linker puts together. A kernel's name in the module tells only where it
was met, so it is replaced by one that its code gives: equal kernels of any model share an object.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.lowering import generated_kernels_told
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.threads import JOBS, available_cores
from tvm_convgrad.training.compile.kernel_object import Settings
from tvm_convgrad.training.compile.kernel_pool import Kernel, KernelPool
from tvm_convgrad.training.compile.kernel_worker import Worker
from tvm_convgrad.training.compile.workspace import workspace
from tvm_convgrad.training.passes.internal_calls import PIPELINE

MOST_WORKERS = 7
"""Processes beside this one, however many cores there are: the rest of a build is not parallel."""

_MANY_CALLS = 400  # of a module that certainly has work for other processes, which are started before it is lowered


def other_processes() -> int:
    """How many processes compile kernels beside this one: as CONVGRAD_JOBS says, or one for each further core.

    Raises:
        SetupError: CONVGRAD_JOBS is not a whole number of at least 1.
    """
    stated = os.environ.get(JOBS, "")
    if stated and not (stated.isdecimal() and int(stated)):
        raise SetupError(f"{JOBS} is {stated!r}; it must be how many processes compile kernels, such as 1, or unset.")
    return min((int(stated) if stated else available_cores()) - 1, MOST_WORKERS)


@dataclass
class KernelBuilds:
    """How kernels are compiled apart.

    Attributes:
        kept: objects of earlier builds; None: none are read or written.
        workers: processes beside this one.
        progress: called with a phrase that says what is being done.
        found: how many different kernels there were, for the last module; `taken`: of them from `kept`.
    """

    kept: KeptObjects | None = None
    workers: int = field(default_factory=other_processes)
    progress: Callable[[str], None] = lambda _: None
    found: int = 0
    taken: int = 0
    _started: list[Worker] = field(default_factory=list)

    def start(self) -> None:
        """Start the first worker, which is ready when the first module is; `compile_apart` ends it if none comes."""
        if self.workers and not self._started:
            self._started.append(Worker())

    def take_started(self) -> list[Worker]:
        """What `start` has started; the caller ends it."""
        started, self._started = self._started, []
        return started


_builds: ContextVar[KernelBuilds | None] = ContextVar("tvm_convgrad_kernel_builds", default=None)


@contextmanager
def compile_apart(builds: KernelBuilds) -> Iterator[None]:
    """Compile kernels for CPUs apart inside the block; the executables need a C++ compiler to be linked."""
    token = _builds.set(builds)
    try:
        yield
    finally:
        _builds.reset(token)
        for worker in builds.take_started():
            worker.stop()


def builds_in_force() -> KernelBuilds | None:
    """Those of `compile_apart`; None outside."""
    return _builds.get()


@contextmanager
def pool_of(builds: KernelBuilds, module: tvm.IRModule, target: tvm.target.Target) -> Iterator[KernelPool]:
    """What makes the kernels of a module that is to be lowered: they are prefetched as soon as they are generated."""
    made = KernelPool(Settings.current(target), builds.kept, builds.workers, builds.take_started())
    with made as pool, generated_kernels_told(pool.expect):
        functions = [function for _, function in module.functions_items() if isinstance(function, relax.Function)]
        if sum(len(block.bindings) for function in functions for block in function.body.blocks) > _MANY_CALLS:
            pool.start()
        yield pool


def build_apart(
    lowered: tvm.IRModule, target: tvm.target.Target, builds: KernelBuilds, pool: KernelPool
) -> tvm.runtime.Executable:
    """The executable of a module that is lowered to what the virtual machine's code generator takes."""
    kernels = _kernels(lowered, pool)
    if kernels is None:  # kernels that call each other
        return relax.build(lowered, target, relax_pipeline=None, tir_pipeline=PIPELINE)
    module = _renamed(lowered, {variable: kernel.name for variable, kernel in kernels.items()})
    objects = pool.objects(kernels.values(), builds.progress)
    builds.found, builds.taken = pool.found, pool.taken
    builder = relax.ExecBuilder()
    vm_build._vmcodegen(builder, module)
    attributes = dict(lowered.attrs) if lowered.attrs else {}
    libraries = [*attributes.get("external_mods", []), *_libraries(objects)]
    constants = dict(attributes.get("const_name_to_constant", {}))
    return vm_build._vmlink(builder, target, None, ext_libs=libraries, params=constants)


def _kernels(lowered: tvm.IRModule, pool: KernelPool) -> dict[str, Kernel] | None:
    """The kernels of a module by their names in it; None if one calls another, so that they stay together."""
    found = {}
    for variable, function in lowered.functions_items():
        if not isinstance(function, tvm.tirx.PrimFunc):
            continue
        kernel = pool.kernel(function, variable.name_hint)
        if '"ir.GlobalVar"' in kernel.text:
            return None
        pool.expect(function, variable.name_hint)
        found[variable.name_hint] = kernel
    return found


@mutator
class _Renaming(PyExprMutator):
    """Puts other global variables in the place of those of these names."""

    def __init__(self, module: tvm.IRModule, names: dict[str, relax.GlobalVar]) -> None:
        super().__init__(module)
        self._names = names

    def visit_global_var_(self, op: relax.GlobalVar) -> relax.Expr:
        """The new one."""
        return self._names.get(op.name_hint, op)


def _renamed(lowered: tvm.IRModule, names: dict[str, str]) -> tvm.IRModule:
    """The module with other names of its kernels."""
    made: dict[str, relax.GlobalVar] = {}
    replaced: dict[str, relax.GlobalVar] = {}
    functions: dict[relax.GlobalVar, tvm.ir.BaseFunc] = {}
    for variable, function in lowered.functions_items():
        if variable.name_hint not in names:
            continue
        name = names[variable.name_hint]
        if name not in made:
            made[name] = relax.GlobalVar(name)
            relax.expr._update_type(made[name], variable.ty)
            functions[made[name]] = function.with_attr("global_symbol", name)
        replaced[variable.name_hint] = made[name]
    renaming = _Renaming(lowered, replaced)
    for variable, function in lowered.functions_items():
        if variable.name_hint not in names:
            functions[variable] = renaming.visit_expr(function)
    return tvm.IRModule(functions, attrs=lowered.attrs)


def _libraries(objects: dict[str, bytes]) -> list[tvm.runtime.Module]:
    """Modules that `export_library` writes and links."""
    found = []
    with workspace() as folder:
        path = folder / "kernel.o"
        for name, content in objects.items():
            path.write_bytes(content)
            found.append(tvm.runtime.load_static_library(str(path), [name]))
            path.unlink()  # see make_object
    return found


__all__ = [
    "MOST_WORKERS",
    "KernelBuilds",
    "build_apart",
    "builds_in_force",
    "compile_apart",
    "other_processes",
    "pool_of",
]
