# SPDX-License-Identifier: Apache-2.0
"""A process that makes objects of kernels: jobs come through its standard input, objects go through its output.

It is a process of its own, not a fork: TVM's threads do not survive one, and the script of a user who builds from
Python is not run again, as `multiprocessing` would.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tvm_convgrad.training.compile.start_tvm import PLUGS

if TYPE_CHECKING:
    from tvm_convgrad.training.compile.kernel_object import Settings

LIMIT_SECONDS = 600.0
"""For one kernel, of which the largest take a second: a process that needs more hangs, or was stopped, and is ended."""

_LENGTH = struct.Struct("<q")  # of the message that follows; -1: the job failed, and nothing follows

# PyTorch is not imported: tvm-ffi does so where it can, which takes a second and serves nothing here.
_START = (
    "import sys; sys.modules['torch'] = None; sys.path[:] = sys.argv[1:]; "
    "from tvm_convgrad.core.rare_collections import rare_collections\nwith rare_collections():\n"
    "    from tvm_convgrad.training.compile.start_tvm import import_tvm_for_cpus\n    import_tvm_for_cpus()\n"
    "    from tvm_convgrad.training.compile.kernel_worker import serve\n    serve()"
)


class Worker:
    """A process that makes objects, from the side of who asks. It is being started when this returns."""

    def __init__(self) -> None:
        """Start it."""
        self._overdue = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what fails is done again by the process that asked, whose errors are seen
            env={**os.environ, PLUGS: "0"},
        )

    def make(self, text: str, name: str, settings: Settings, folder: Path) -> bytes | None:
        """The object of a kernel, given in TVM's JSON; None if the process failed, or has ended.

        Args:
            folder: where files may be made, by this worker only.

        Raises:
            TimeoutError: there was no answer for `LIMIT_SECONDS`; the process has been ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"text": text, "name": name, "settings": asdict(settings), "folder": str(folder)}
        limit = threading.Timer(LIMIT_SECONDS, self._give_up)
        limit.daemon = True
        limit.start()
        try:
            send(self._process.stdin, json.dumps(job).encode())
            answer = receive(self._process.stdout)
        except (OSError, ValueError):  # it has ended, or was stopped meanwhile
            answer = None
        finally:
            limit.cancel()
        if answer is None and self._overdue.is_set():
            raise TimeoutError
        return answer

    def _give_up(self) -> None:
        self._overdue.set()
        self._process.kill()  # which ends the wait for its answer

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # a job that was not taken any more
                    continue


def serve() -> None:
    """Make objects until the input ends."""
    from tvm_convgrad.training.compile.kernel_object import Settings, make_object, read_kernel

    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what TVM prints is not an answer
    while (message := receive(source)) is not None:
        job = json.loads(message)
        try:
            settings = Settings(**job["settings"])
            answer = make_object(read_kernel(job["text"]), job["name"], settings, Path(job["folder"]))
        except Exception:  # of any kind: the process that asked does the job again, and sees its error
            send(sink, None)
        else:
            send(sink, answer)


def send(stream: IO[bytes], message: bytes | None) -> None:
    """Write a message, or None, which says that the job failed."""
    stream.write(_LENGTH.pack(-1 if message is None else len(message)))
    stream.write(message or b"")
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message; None if there is none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    message = stream.read(length) if length >= 0 else None
    return message if message is not None and len(message) == length else None


__all__ = ["LIMIT_SECONDS", "Worker", "receive", "send", "serve"]
