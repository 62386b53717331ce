# SPDX-License-Identifier: Apache-2.0
"""The kernels of a module, and the processes that make objects of them, from when the first kernel is known."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi

from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.training.compile.kernel_object import Settings, kernel_key, kernel_text, make_object, without_name
from tvm_convgrad.training.compile.kernel_worker import Worker
from tvm_convgrad.training.compile.workspace import workspace

_FEW_BYTES = 3 << 20  # of kernels in TVM's JSON, which one process compiles in the time that a worker takes to start


@dataclass(frozen=True)
class Kernel:
    """A kernel: its name in objects, their key, and its function, as TVM has it and as text."""

    name: str
    key: str
    function: tvm.tirx.PrimFunc
    text: str


class KernelPool:
    """Makes objects of kernels, once of equal ones, in this process and in others; it is used in a with statement.

    The other processes begin with kernels that `expect` is told of, while this one is still lowering the module.

    Attributes:
        found: how many different kernels `objects` was asked for; `taken`: of them those of earlier builds.
    """

    def __init__(self, settings: Settings, kept: KeptObjects | None = None, workers: int = 0) -> None:
        """At most `workers` processes beside this one; `kept` has objects of earlier builds, and gets the new ones."""
        self.found = self.taken = 0
        self._settings, self._kept, self._most = settings, kept, workers
        self._known: dict[tvm.tirx.Stmt, list[tuple[str, Kernel]]] = {}  # by body, which passes leave as it is
        self._missing_bytes = 0
        self._folder = Path()
        self._workers: list[Worker] = []
        self._ending = ExitStack()
        self._changed = threading.Condition()  # of what follows: kernels by key
        self._closed = False
        self._kept_keys: set[str] = set()
        self._waiting: dict[str, Kernel] = {}
        self._begun: set[str] = set()
        self._objects: dict[str, bytes | None] = {}  # None: a worker has failed at it

    def __enter__(self) -> KernelPool:
        """Make its folder."""
        self._folder = self._ending.enter_context(workspace())
        return self

    def __exit__(self, *_: object) -> None:
        """End its processes, whatever they are doing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ending.close()

    def start(self) -> None:
        """Start the processes, if there are none yet; they take a second to be ready."""
        if self._workers:
            return
        for number in range(self._most):
            worker = Worker(self._folder / str(number))
            self._workers.append(worker)
            self._ending.callback(worker.stop)  # of each, even if a later one cannot be started, or stopped
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def expect(self, function: tvm.tirx.PrimFunc, name: str) -> None:
        """Have a kernel made that will probably be asked for, if there are other processes; `name` as in `kernel`."""
        if self._most:
            self._add(self.kernel(function, name))

    def kernel(self, function: tvm.tirx.PrimFunc, name: str) -> Kernel:
        """The kernel that a function is; `name` is that in its module, whose number tells apart what is equal."""
        function, base = without_name(function), re.sub(r"\d+$", "", name)
        known = self._known.setdefault(function.body, [])
        for its_base, kernel in known:
            if its_base == base and _equal(kernel.function, function):
                return kernel
        text = kernel_text(function)
        key = kernel_key(text, base, self._settings)
        made = Kernel(f"{base}_{key[:16]}", key, function, text)
        known.append((base, made))
        return made

    def objects(self, kernels: Iterable[Kernel], progress: Callable[[str], None]) -> dict[str, bytes]:
        """The object of each kernel by its name, in the order of names; `progress` is told how many there are.

        What a worker fails at, this process does again: its error is the one that is raised.
        """
        wanted = {kernel.key: kernel for kernel in kernels}
        with self._changed:
            self._waiting = {key: kernel for key, kernel in self._waiting.items() if key in wanted}
        for kernel in wanted.values():
            self._add(kernel)
        self.found, self.taken = len(wanted), len(self._kept_keys & wanted.keys())
        objects: dict[str, bytes] = {}
        made = self._made(wanted)
        while len(objects) < len(wanted):
            progress(f"compiling kernels: {len(objects)} of {len(wanted)}")
            kernel, content = next(made)
            objects[kernel.name] = content
            if self._kept and kernel.key not in self._kept_keys:
                self._kept.put(kernel.key, content)
        if self._kept and self.taken < self.found:
            self._kept.trim()
        return dict(sorted(objects.items()))

    def _add(self, kernel: Kernel) -> None:
        """Let a kernel wait for being made, if it is neither kept nor known."""
        with self._changed:
            if any(kernel.key in those for those in (self._objects, self._begun, self._waiting)):
                return
        content = self._kept.get(kernel.key) if self._kept else None
        with self._changed:
            if content is not None:
                self._kept_keys.add(kernel.key)
                self._objects[kernel.key] = content
                return
            self._waiting[kernel.key] = kernel
            self._changed.notify()
        self._missing_bytes += len(kernel.text)
        if self._missing_bytes > _FEW_BYTES:
            self.start()

    def _made(self, wanted: dict[str, Kernel]) -> Iterator[tuple[Kernel, bytes]]:
        """Each kernel with its object. This process makes the next one whenever none is ready."""
        left = dict(wanted)
        while left:
            with self._changed:
                ready = [key for key in left if key in self._objects]
                own = None if ready else self._next()
                if not ready and own is None:
                    self._changed.wait()
                    continue
            for kernel in [left.pop(key) for key in ready] if own is None else [left.pop(own.key)]:
                content = None if own is not None else self._objects[kernel.key]
                if content is None:
                    content = make_object(kernel.function, kernel.name, self._settings, self._folder)
                yield kernel, content

    def _serve(self, worker: Worker) -> None:
        """Have a worker make kernels until it fails at one."""
        content: bytes | None = b""
        while content is not None:
            with self._changed:
                while (kernel := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            content = None
            try:
                content = worker.make(kernel.text, kernel.name, self._settings)
            finally:
                with self._changed:
                    self._objects[kernel.key] = content
                    self._changed.notify_all()

    def _next(self) -> Kernel | None:
        """The longest of the waiting kernels, which is begun; None if the pool is closed, or none is waiting."""
        if self._closed or not self._waiting:
            return None
        longest = max(self._waiting.values(), key=lambda kernel: (len(kernel.text), kernel.name))
        self._begun.add(longest.key)
        return self._waiting.pop(longest.key)


def _equal(one: tvm.tirx.PrimFunc, other: tvm.tirx.PrimFunc) -> bool:
    """Whether functions with the same body are equal in all else."""
    return (
        len(one.params) == len(other.params)
        and all(mine.same_as(yours) for mine, yours in zip(one.params, other.params, strict=True))
        and tvm_ffi.structural_equal(one.attrs, other.attrs)
    )


__all__ = ["Kernel", "KernelPool"]
