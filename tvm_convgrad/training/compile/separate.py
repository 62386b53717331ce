# SPDX-License-Identifier: Apache-2.0
"""Compiling the kernels of a module apart: equal ones once, in several processes, those of earlier builds not at all.

Each becomes an object of its own, which the linker puts together. A kernel's name in the module tells only where it
was met, so it is replaced by one that its code gives: equal kernels of any model share an object.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.threads import available_cores
from tvm_convgrad.training.compile.kernel_object import Settings, kernel_key, kernel_text, make_object
from tvm_convgrad.training.compile.kernel_worker import Worker
from tvm_convgrad.training.compile.workspace import workspace
from tvm_convgrad.training.passes.internal_calls import PIPELINE

MOST_WORKERS = 7
"""Processes beside this one, however many cores there are: the rest of a build is not parallel."""

_FEW_BYTES = 1 << 20  # of kernels in TVM's JSON, which one process compiles in the time that a worker takes to start


@dataclass
class KernelBuilds:
    """How kernels are compiled apart.

    Attributes:
        kept: objects of earlier builds; None: none are read or written.
        workers: processes beside this one.
        progress: is told what is being done, in words.
        found: how many different kernels there were, for the last module; `taken`: of them from `kept`.
    """

    kept: KeptObjects | None = None
    workers: int = field(default_factory=lambda: min(available_cores() - 1, MOST_WORKERS))
    progress: Callable[[str], None] = lambda _: None
    found: int = 0
    taken: int = 0


_builds: ContextVar[KernelBuilds | None] = ContextVar("tvm_convgrad_kernel_builds", default=None)


@contextmanager
def compile_apart(builds: KernelBuilds) -> Iterator[None]:
    """Compile kernels for CPUs apart inside the block; the executables need a C++ compiler to be linked."""
    token = _builds.set(builds)
    try:
        yield
    finally:
        _builds.reset(token)


def builds_in_force() -> KernelBuilds | None:
    """Those of `compile_apart`; None outside."""
    return _builds.get()


@dataclass(frozen=True)
class _Kernel:
    """A kernel of a module: its name in the objects, their key, and its function, as TVM has it and as text."""

    name: str
    key: str
    function: tvm.tirx.PrimFunc
    text: str


def build_apart(lowered: tvm.IRModule, target: tvm.target.Target, builds: KernelBuilds) -> tvm.runtime.Executable:
    """The executable of a module that is lowered to what the virtual machine's code generator takes."""
    settings = Settings.current(target)
    kernels = _kernels(lowered, settings)
    if kernels is None:  # kernels that call each other
        return relax.build(lowered, target, relax_pipeline=None, tir_pipeline=PIPELINE)
    module = _renamed(lowered, {variable: kernel.name for variable, kernel in kernels.items()})
    objects = _objects(list({kernel.key: kernel for kernel in kernels.values()}.values()), settings, builds)
    builder = relax.ExecBuilder()
    vm_build._vmcodegen(builder, module)
    attributes = dict(lowered.attrs) if lowered.attrs else {}
    libraries = [*attributes.get("external_mods", []), *_libraries(objects)]
    constants = dict(attributes.get("const_name_to_constant", {}))
    return vm_build._vmlink(builder, target, None, ext_libs=libraries, params=constants)


def _kernels(lowered: tvm.IRModule, settings: Settings) -> dict[str, _Kernel] | None:
    """The kernels of a module by their names in it; None if one calls another, so that they stay together."""
    found = {}
    for variable, function in lowered.functions_items():
        if not isinstance(function, tvm.tirx.PrimFunc):
            continue
        text = kernel_text(function)
        if '"ir.GlobalVar"' in text:
            return None
        base = re.sub(r"\d+$", "", variable.name_hint)
        key = kernel_key(text, base, settings)
        found[variable.name_hint] = _Kernel(f"{base}_{key[:16]}", key, function, text)
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


def _objects(kernels: list[_Kernel], settings: Settings, builds: KernelBuilds) -> dict[str, bytes]:
    """The object of each kernel by its name, in the order of names."""
    objects: dict[str, bytes] = {}
    missing = []
    for kernel in kernels:
        content = builds.kept.get(kernel.key) if builds.kept else None
        if content is None:
            missing.append(kernel)
        else:
            objects[kernel.name] = content
    builds.found, builds.taken = len(kernels), len(objects)
    for kernel, content in _made(missing, settings, builds):
        objects[kernel.name] = content
        if builds.kept:
            builds.kept.put(kernel.key, content)
    if builds.kept and missing:
        builds.kept.trim()
    return dict(sorted(objects.items()))


def _made(kernels: list[_Kernel], settings: Settings, builds: KernelBuilds) -> Iterator[tuple[_Kernel, bytes]]:
    """Each kernel with its object, made by this process and by workers, which take the next one when they are free.

    What a worker fails at, this process does again: its error is the one that is raised.
    """
    waiting = deque(sorted(kernels, key=lambda kernel: (-len(kernel.text), kernel.name)))  # the longest ones first
    done: deque[tuple[_Kernel, bytes | None]] = deque()

    def ask(worker: Worker) -> None:
        while True:
            try:
                kernel = waiting.popleft()
            except IndexError:
                return
            content = None
            try:
                content = worker.make(kernel.text, kernel.name, settings)
            finally:
                done.append((kernel, content))
            if content is None:
                return

    many = sum(len(kernel.text) for kernel in kernels) > _FEW_BYTES
    left = len(kernels)
    with workspace() as folder:
        workers = [Worker(folder / str(number)) for number in range(builds.workers if many else 0)]
        threads = [threading.Thread(target=ask, args=(worker,), daemon=True) for worker in workers]
        try:
            for thread in threads:
                thread.start()
            while left:
                builds.progress(f"compiling kernels: {builds.found - left} of {builds.found}")
                content = None
                if done:
                    kernel, content = done.popleft()
                else:
                    try:
                        kernel = waiting.popleft()
                    except IndexError:
                        _wait(threads, done)
                        continue
                if content is None:
                    content = make_object(kernel.function, kernel.name, settings, folder)
                left -= 1
                yield kernel, content
        finally:
            for worker in workers:
                worker.stop()


def _wait(threads: list[threading.Thread], done: deque[tuple[_Kernel, bytes | None]]) -> None:
    """Wait until something is done, or nothing more will be."""
    while not done and any(thread.is_alive() for thread in threads):
        next(thread for thread in threads if thread.is_alive()).join(0.01)


def _libraries(objects: dict[str, bytes]) -> list[tvm.runtime.Module]:
    """Modules that `export_library` writes and links."""
    found = []
    with workspace() as folder:
        path = folder / "kernel.o"
        for name, content in objects.items():
            path.write_bytes(content)
            found.append(tvm.runtime.load_static_library(str(path), [name]))
    return found


__all__ = ["MOST_WORKERS", "KernelBuilds", "build_apart", "builds_in_force", "compile_apart"]
