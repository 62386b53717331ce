# SPDX-License-Identifier: Apache-2.0
"""The kernels of a module, and the processes that make objects of them, from when the first kernel is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.training.compile.kernel_object import Settings, kernel_key, kernel_text, make_object, without_name
from tvm_convgrad.training.compile.kernel_worker import LIMIT_SECONDS, Worker
from tvm_convgrad.training.compile.workspace import workspace
from tvm_convgrad.training.runtime.vm_code import without_numbers

_SHOWN_SECONDS = 0.1
"""Between two numbers of kernels that are done: a terminal needs a millisecond for each."""

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

    The other processes begin with kernels that are passed to `expect`, while this one is still lowering the module.

    Attributes:
        found: how many different kernels were requested of `objects`; `taken`: of them those of earlier builds.
    """

    def __init__(
        self,
        settings: Settings,
        kept: KeptObjects | None = None,
        workers: int = 0,
        started: Sequence[Worker] = (),
    ) -> None:
        """At most `workers` processes beside this one; `kept` has objects of earlier builds, and gets the new ones.

        Args:
            started: of these workers some that have been started; the pool ends them.
        """
        self.found = self.taken = 0
        self._settings, self._kept, self._most = settings, kept, workers
        self._known: dict[tvm.tirx.Stmt, list[tuple[str, Kernel]]] = {}  # by body, which passes leave as it is
        self._missing_bytes = 0
        self._folder = Path()
        self._started = started
        self._workers: list[Worker] = []
        self._ending = ExitStack()
        for worker in started:
            self._ending.callback(worker.stop)
        self._changed = threading.Condition()  # of what follows: kernels by key
        self._closed = False
        self._kept_keys: set[str] = set()
        self._waiting: dict[str, Kernel] = {}
        self._begun: set[str] = set()
        self._objects: dict[str, bytes | None] = {}  # None: a worker has failed at it
        self._overdue: set[str] = set()  # a worker has not answered

    def __enter__(self) -> KernelPool:
        """Make its folder, and employ the workers that have been started."""
        self._folder = self._ending.enter_context(workspace())
        for worker in self._started:
            self._employ(worker)
        return self

    def __exit__(self, *_: object) -> None:
        """End its processes, whatever they are doing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ending.close()

    def start(self) -> None:
        """Start the processes that are not started yet; they take half a second to be ready."""
        while len(self._workers) < self._most:
            worker = Worker()
            self._ending.callback(worker.stop)  # of each, even if a later one cannot be started, or stopped
            self._employ(worker)

    def _employ(self, worker: Worker) -> None:
        folder = self._folder / str(len(self._workers))
        folder.mkdir()
        self._workers.append(worker)
        threading.Thread(target=self._serve, args=(worker, folder), daemon=True).start()

    def expect(self, function: tvm.tirx.PrimFunc, name: str) -> None:
        """Have a kernel made that will probably be requested, if there are other processes; `name` as in `kernel`."""
        if self._most:
            self._add(self.kernel(function, name))

    def kernel(self, function: tvm.tirx.PrimFunc, name: str) -> Kernel:
        """The kernel that a function is; `name` is that in its module, whose numbers tell apart what may be equal."""
        function, base = without_name(function), without_numbers(name)
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
        """The object of each kernel by its name, in the order of names; `progress` is called with their number.

        What a worker fails at, this process does again: its error is the one that is raised.

        Raises:
            SetupError: a worker did not answer in time.
        """
        wanted = {kernel.key: kernel for kernel in kernels}
        with self._changed:
            self._waiting = {key: kernel for key, kernel in self._waiting.items() if key in wanted}
        for kernel in wanted.values():
            self._add(kernel)
        self.found, self.taken = len(wanted), len(self._kept_keys & wanted.keys())
        objects: dict[str, bytes] = {}
        made = self._made(wanted)
        shown = -_SHOWN_SECONDS
        while len(objects) < len(wanted):
            if time.monotonic() >= shown + _SHOWN_SECONDS:
                shown = time.monotonic()
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
                if kernel.key in self._overdue:
                    raise SetupError(
                        f"kernel {kernel.name}: a process was to compile it, and has not answered for "
                        f"{LIMIT_SECONDS:g} s; it has been ended. Was it stopped, or is the machine out of memory? "
                        "Build again; if the same kernel fails again, report it with the model."
                    )
                content = None if own is not None else self._objects[kernel.key]
                if content is None:
                    content = make_object(kernel.function, kernel.name, self._settings, self._folder)
                yield kernel, content

    def _serve(self, worker: Worker, folder: Path) -> None:
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
                content = worker.make(kernel.text, kernel.name, self._settings, folder)
            except TimeoutError:
                with self._changed:
                    self._overdue.add(kernel.key)
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
