# SPDX-License-Identifier: Apache-2.0
"""`Kernels`: the kernels of this process, which are loaded, kept on disk, or being compiled in the background."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from tvm_convgrad.bridge.compiler import compiler_identity
from tvm_convgrad.bridge.failures import keep_failure, kept_failure
from tvm_convgrad.bridge.job import HOST, SYMBOL, XLA_HOST, Job, library_key
from tvm_convgrad.bridge.library import Host, Kernel, LoadError, XlaHost
from tvm_convgrad.bridge.worker import LIBRARY, Worker, answer_error, key_of
from tvm_convgrad.core.errors import ConvGradError, SetupError
from tvm_convgrad.core.kept_objects import KeptObjects

_IDLE_SECONDS = 10.0
"""After which the process that compiles is ended; it holds some hundreds of MB."""

Loaded = TypeVar("Loaded")
Source = Callable[[Job | str], bytes | None]
"""The library of a job, an error in its place, or None."""


class Kernels:
    """The kernels of one store.

    Attributes:
        kept: the store.
        compiled: how many libraries this process has had compiled; those that another process has stored do not count.
    """

    def __init__(self, folder: Path | None = None, host: str = HOST) -> None:
        """Those of a store's folder, None is the default one; they run on the threads of HOST or XLA_HOST."""
        self._host_name = host
        self.kept = KeptObjects(folder)
        self.compiled = 0
        self._forked = False
        self._refused: dict[str, bytes] = {}  # libraries that the system's loader has refused, by key
        self._unloadable: dict[str, LoadError] = {}  # and its errors where it refuses what was made again, too
        self._reset()
        os.register_at_fork(after_in_child=self._reset_in_child)

    def _reset(self) -> None:
        self._loaded: dict[Job, Future[Kernel]] = {}
        self._jobs: queue.Queue[tuple[Future[Any], Callable[[], object]]] = queue.Queue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None
        self._host: Host | None = None

    def _reset_in_child(self) -> None:
        """A forked child has neither the thread nor the worker, and compiles nothing; what is loaded stays."""
        loaded, host = dict(self._loaded), self._host
        self._reset()
        self._loaded = {job: found for job, found in loaded.items() if found.done()}
        self._host, self._forked = host, True

    def compile_here(self) -> None:
        """Let a forked child compile, where it asks for that itself. Workers of a loader do not: there may be many."""
        self._forked = False

    def request(self, job: Job, build: bool = True) -> Future[Kernel]:
        """The kernel of a job: loaded at once if it is kept, otherwise compiled in the background.

        Args:
            job: what to compute.
            build: False: what is not kept is an error.

        Returns:
            A future, whose error is of the ConvGradError family.
        """
        with self._lock:
            found = self._loaded.get(job)
            if found is not None:
                return found
            found = Future()
            if not _resolved(found, partial(self._kernel, job, self._kept)):
                if not build or self._forked:
                    found.set_exception(SetupError(f"{job.direction} of {job.descriptor} is not compiled{self._child}"))
                    return found
                self._ask(found, partial(self._kernel, job, self._made))
            self._loaded[job] = found
            return found

    def request_library(self, name: str, load: Callable[[bytes], Loaded]) -> Future[Loaded]:
        """A loaded library that is not a kernel, from the store or compiled in the background (see `request`)."""
        with self._lock:
            found: Future[Loaded] = Future()
            if not _resolved(found, partial(self._load, name, self._kept, load)):
                if self._forked:
                    found.set_exception(SetupError(f"the library {name!r} is not compiled{self._child}"))
                else:
                    self._ask(found, partial(self._compiled_library, name, load))
            return found

    def kept_library(self, name: str, load: Callable[[bytes], Loaded]) -> Loaded | None:
        """A library that is not a kernel, if it is stored and loadable; `request_library` raises why it is not."""
        with self._lock:
            try:
                return self._load(name, self._kept, load)
            except ConvGradError:
                return None

    def _kernel(self, job: Job, source: Source) -> Kernel | None:
        """A kernel, and what kernels call; None if the source has not both."""
        if self._host is None:
            self._host = self._load(self._host_name, source, partial(_loaded_host, self._host_name))
        host = self._host
        return None if host is None else self._load(job, source, lambda content: Kernel(job, content, SYMBOL, host))

    def _compiled_library(self, name: str, load: Callable[[bytes], Loaded]) -> Loaded | None:
        """A library that is not a kernel, made. A failure to load is kept: making it takes long, and it is optional."""
        try:
            return self._load(name, self._made, load)
        except LoadError as error:
            keep_failure(self.kept, key_of(name), error)
            raise

    def _load(self, job: Job | str, source: Source, load: Callable[[bytes], Loaded]) -> Loaded | None:
        """The library of a job, loaded; None if the source has none.

        What the loader refuses, such as for a version of another system's C++ library, is removed and made again, once.

        Raises:
            ConvGradError: it cannot be made, or what was made again cannot be loaded either.
        """
        key = key_of(job)
        while True:
            if key in self._unloadable:
                raise self._unloadable[key]
            is_retry = key in self._refused
            content = source(job)
            if content is None:
                return None
            if not content.startswith(LIBRARY):
                raise answer_error(content)
            try:
                return load(content)
            except LoadError as error:
                if is_retry:
                    self._unloadable[key] = error
                else:
                    self._refused[key] = content
                    self.kept.drop(key)

    def _kept(self, job: Job | str) -> bytes | None:
        """What is kept: a library that was not refused, or the failure to make it."""
        key = key_of(job)
        content = self.kept.get(key)
        if content is None and isinstance(job, str) and not compiler_identity():
            content = self.kept.get(library_key(job, any_compiler=True))
        if key in self._refused:
            return None if content == self._refused[key] else content
        return content if content is not None else kept_failure(self.kept, key)

    def _made(self, job: Job | str) -> bytes:
        """What is kept or made by another process; for the thread that waits for it.

        Raises:
            SetupError: that process cannot be used.
        """
        kept = self._kept(job)
        if kept is not None:
            return kept
        try:
            if self._worker is None:
                self._worker = Worker(self.kept.folder)
            content = self._worker.make(job, self._refused.get(key_of(job)))
        except Exception:
            self._stop()
            raise
        self.kept.problem = self.kept.problem or self._worker.problem
        self.compiled += isinstance(job, Job)
        return content

    @property
    def _child(self) -> str:
        return ": a forked process has nothing compiled unless it calls enable() itself" if self._forked else ""

    def _ask(self, found: Future[Any], make: Callable[[], object]) -> None:
        self._jobs.put((found, make))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="convgrad-compile", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the process that compiles, if there is one."""
        worker = self._worker
        if worker is not None:
            worker.stop()

    def _serve(self) -> None:
        """Have jobs compiled, one by one, until none has come for a while."""
        while True:
            try:
                found, make = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if not self._jobs.empty():
                        continue
                    self._thread = None
                    self._stop()
                    return
            _resolved(found, make)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None


def _resolved(found: Future[Any], make: Callable[[], object]) -> bool:
    """Whether a future now has what a function gives or raises; None is neither."""
    try:
        result = make()
    except ConvGradError as error:
        found.set_exception(error)
    except Exception as error:  # of any kind: who waits for the kernel must hear of it
        found.set_exception(SetupError(f"the kernels of the store or the process that compiles them failed: {error!r}"))
    else:
        if result is not None:
            found.set_result(result)
    return found.done()


@lru_cache(maxsize=8)
def _loaded_host(name: str, content: bytes) -> Host:
    """What kernels call; one for all stores, as XLA knows one custom call only."""
    return XlaHost(content) if name == XLA_HOST else Host(content)


@lru_cache(maxsize=8)
def kernels(folder: Path | None = None, host: str = HOST) -> Kernels:
    """The kernels of this process by the folder of their store, and by whose threads they run on."""
    return Kernels(folder, host)


__all__ = ["Kernels", "kernels"]
