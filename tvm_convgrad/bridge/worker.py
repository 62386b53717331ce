# SPDX-License-Identifier: Apache-2.0
"""The process that makes libraries, with TVM in it: jobs come through its standard input, libraries through its output.

It keeps what it makes, under a lock for each key, so that processes that start together compile each kernel once, and
it keeps failures, so that processes that start later do not repeat them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from tvm_convgrad.bridge.failures import answer_of, keep_failure, kept_failure
from tvm_convgrad.bridge.job import Job, library_key
from tvm_convgrad.core.errors import FAMILY, ConvGradError, SetupError, UnsupportedError, first_line
from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.training.compile.kernel_worker import receive, send

LIBRARY = b"\x7fELF"
"""How a library begins; another answer or kept object is an error in JSON."""

_LOCKS = 64  # files of the store's folder; two keys of one lock wait for each other

# A terminal's interrupt comes to this process, too, and is meant for the other one, which may go on. PyTorch is not
# imported: tvm-ffi does so where it can, which takes a second and serves nothing here.
_START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys; sys.modules['torch'] = None; sys.path[:] = sys.argv[2:]; "
    "from tvm_convgrad.bridge.worker import serve; serve(sys.argv[1])"
)


def key_of(job: Job | str) -> str:
    """What the library of a kernel's job, or of another one by its name, is found by."""
    return job.key if isinstance(job, Job) else library_key(job)


class Worker:
    """A process that makes libraries, from the side of who asks. It is being started when this returns.

    Attributes:
        problem: why it cannot keep what it makes, in a sentence; or nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Start it; it keeps what it makes in `folder`."""
        self.problem = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(folder), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an error is an answer
            env={**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "0"},
        )

    def make(self, job: Job | str, refused: bytes | None = None) -> bytes:
        """The library of a job, or its error as `answer_error` reads it.

        Args:
            job: what to make.
            refused: a library that could not be loaded; if it is the one that is kept, it is made again.

        Raises:
            SetupError: the process has ended, such as for lack of memory, or because TVM cannot be imported.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = job if isinstance(job, str) else [job.direction, job.descriptor, job.extra]
        answer = problem = None
        with suppress(OSError, ValueError):  # it has ended, or is being stopped
            digest = "" if refused is None else hashlib.sha256(refused).hexdigest()
            send(self._process.stdin, json.dumps([words, digest]).encode())
            answer, problem = receive(self._process.stdout), receive(self._process.stdout)
        if answer is None or problem is None:
            code = self._process.poll()
            raise SetupError(
                f"the process that compiles kernels has ended (exit code {code}) at {words}; "
                "`convgrad env` tells whether TVM and a C++ compiler are there"
            )
        key = key_of(job).encode()
        if not answer.startswith(key):  # such as where a forked child has written to the same pipe
            raise SetupError(f"the process that compiles kernels has not answered what was asked, {words}")
        self.problem = problem.decode()
        return answer.removeprefix(key)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # a job that was not taken any more
                    stream.close()


def answer_error(answer: bytes) -> ConvGradError:
    """The error that an answer without a library tells."""
    words = json.loads(answer)
    kind = next((each for each in FAMILY if each.__name__ == words["error"]), SetupError)
    return kind(words["text"])


def serve(folder: str) -> None:
    """Make libraries until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what TVM prints is not an answer
    kept = KeptObjects(Path(folder))
    while (message := receive(source)) is not None:
        words, refused = json.loads(message)
        job = words if isinstance(words, str) else Job(*words)
        with _locked(kept.folder, key_of(job)):
            answer = _kept(kept, key_of(job), refused) or _made(job, kept)
        send(sink, key_of(job).encode() + answer)
        send(sink, kept.problem.encode())


def _kept(kept: KeptObjects, key: str, refused: str) -> bytes | None:
    """What another process has made meanwhile, or failed to make; not the library of the digest that is refused."""
    library = kept.get(key)
    if library is not None and hashlib.sha256(library).hexdigest() != refused:
        return library
    return None if refused else kept_failure(kept, key)


def _made(job: Job | str, kept: KeptObjects) -> bytes:
    """The library of a job, or its error. What this version cannot compute is kept like a library; failures, for a day.

    A library in C++ is kept for machines without a compiler, too.
    """
    from tvm_convgrad.bridge.make import make_host, make_kernel  # loads TVM, which who reads this file does not want

    keys = [key_of(job)]
    try:
        if isinstance(job, str):
            answer = make_host(job)
            keys.append(library_key(job, any_compiler=True))
        else:
            answer = make_kernel(job)
    except UnsupportedError as error:
        answer = answer_of(error)
    except ConvGradError as error:
        keep_failure(kept, key_of(job), error)
        return answer_of(error)
    except Exception as error:  # of any kind, from TVM: who asked goes on without this kernel
        failure = UnsupportedError(f"{job}: TVM cannot compile it: {type(error).__name__}: {first_line(error)}")
        keep_failure(kept, key_of(job), failure)
        return answer_of(failure)
    for key in keys:
        kept.put(key, answer)
    kept.trim()
    return answer


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[None]:
    """While another process makes the same library, wait; where no file can be locked, go on."""
    lock = FileLock(folder / f".{int(key[:4], 16) % _LOCKS}.lock")
    try:
        lock.acquire()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release()


__all__ = ["LIBRARY", "Worker", "answer_error", "key_of", "serve"]
