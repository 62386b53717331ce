# SPDX-License-Identifier: Apache-2.0
"""`Kernels`: the kernels of this process, which are loaded, kept on disk, or being compiled in the background."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import cast

from tvm_convgrad.bridge.job import HOST, SYMBOL, XLA_HOST, Job
from tvm_convgrad.bridge.library import Host, Kernel, XlaHost
from tvm_convgrad.bridge.worker import LIBRARY, Worker, answer_error, key_of
from tvm_convgrad.core.errors import ConvGradError, SetupError
from tvm_convgrad.core.kept_objects import KeptObjects

_IDLE_SECONDS = 10.0
"""After which the process that compiles is ended; it holds some hundreds of MB."""


class Kernels:
    """The kernels of one store.

    Attributes:
        kept: the store.
        compiled: how many libraries this process has had compiled; those that another process has kept are none.
    """

    def __init__(self, folder: Path | None = None, host: str = HOST) -> None:
        """Those of a store's folder, None is the default one; they run on the threads of HOST or XLA_HOST."""
        self._host_name = host
        self.kept = KeptObjects(folder)
        self.compiled = 0
        self._forked = False
        self._reset()
        os.register_at_fork(after_in_child=self._reset_in_child)

    def _reset(self) -> None:
        self._loaded: dict[Job, Future[Kernel]] = {}
        self._jobs: queue.Queue[tuple[Job, Future[Kernel]] | tuple[str, Future[bytes]]] = queue.Queue()
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
            content, host = self.kept.get(job.key), b"" if self._host is not None else self._kept_host()
            if content is not None and host is not None:
                self._finish(job, found, content, host)
            elif not build or self._forked:
                found.set_exception(SetupError(f"{job.direction} of {job.descriptor} is not compiled"))
                return found
            else:
                self._ask((job, found))
            self._loaded[job] = found
            return found

    def request_library(self, name: str) -> Future[bytes]:
        """A library that is no kernel, as `request` gives kernels: kept, or compiled in the background."""
        with self._lock:
            found: Future[bytes] = Future()
            content = self.kept_library(name)
            if content is not None:
                found.set_result(content)
            elif self._forked:
                found.set_exception(SetupError(f"the library {name!r} is not compiled"))
            else:
                self._ask((name, found))
            return found

    def kept_library(self, name: str) -> bytes | None:
        """A library that is no kernel, if it is kept."""
        return self.kept.get(key_of(name))

    def _ask(self, asked: tuple[Job, Future[Kernel]] | tuple[str, Future[bytes]]) -> None:
        self._jobs.put(asked)
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
                job, found = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if not self._jobs.empty():
                        continue
                    self._thread = None
                    self._stop()
                    return
            try:
                if self._worker is None:
                    self._worker = Worker(self.kept.folder)
                host = b"" if self._host is not None else self._kept_host() or self._worker.make(self._host_name)
                content = self._worker.make(job)
            except ConvGradError as error:
                self._stop()
                found.set_exception(error)
                continue
            except Exception as error:  # of any kind: who waits for the kernel must hear of it
                self._stop()
                found.set_exception(SetupError(f"the process that compiles kernels cannot be used: {error!r}"))
                continue
            with self._lock:
                if isinstance(job, Job):
                    self.compiled += 1
                    self._finish(job, cast("Future[Kernel]", found), content, host)
                elif content.startswith(LIBRARY):
                    cast("Future[bytes]", found).set_result(content)
                else:
                    found.set_exception(answer_error(content))

    def _kept_host(self) -> bytes | None:
        return self.kept_library(self._host_name)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def _finish(self, job: Job, found: Future[Kernel], content: bytes, host: bytes) -> None:
        """Load what was made or kept."""
        try:
            for answer in (host, content):
                if answer and not answer.startswith(LIBRARY):
                    raise answer_error(answer)
            if self._host is None:
                self._host = _loaded_host(self._host_name, host)
            kernel = Kernel(job, content, SYMBOL, self._host)
        except ConvGradError as error:
            found.set_exception(error)
        except Exception as error:  # the same here
            found.set_exception(SetupError(f"{job.direction} of {job.descriptor}: not loaded: {error!r}"))
        else:
            found.set_result(kernel)


@lru_cache(maxsize=8)
def _loaded_host(name: str, content: bytes) -> Host:
    """What kernels call; one for all stores, as XLA knows one custom call only."""
    return XlaHost(content) if name == XLA_HOST else Host(content)


@lru_cache(maxsize=8)
def kernels(folder: Path | None = None, host: str = HOST) -> Kernels:
    """The kernels of this process by the folder of their store, and by whose threads they run on."""
    return Kernels(folder, host)


__all__ = ["Kernels", "kernels"]
