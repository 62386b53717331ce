# SPDX-License-Identifier: Apache-2.0
"""Libraries in this process: `Host`, what kernels call, and `Kernel`, a function on the memory of its tensors."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import resource
from functools import lru_cache
from pathlib import Path
from typing import Any

from tvm_convgrad.bridge.job import Job
from tvm_convgrad.core.errors import SetupError

_POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_in_parallel")
_CONTEXT = {
    "__TVMBackendAllocWorkspace": "convgrad_allocate",
    "__TVMBackendFreeWorkspace": "convgrad_free",
}
"""Variables of a kernel's library that hold functions, and ours; of parallel loops the one that the host names."""

_CODES = {"float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16)}
_CPU = 1
_MOST_FILES = 16384  # a higher number makes the system's table of files larger
_AT_ONCE = 16  # threads that load libraries
_numbers = itertools.count(1)


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class LoadError(SetupError):
    """The system's loader refuses a library, or it lacks what it should have: another one has to be made."""


class Host:
    """What kernels call: parallel loops on the OpenMP pool that this process has, and scratch memory.

    Attributes:
        launch: the function of the library that runs parallel loops.
    """

    launch = "convgrad_launch"

    def __init__(self, content: bytes) -> None:
        """Load it.

        Raises:
            LoadError: the system's loader refuses it.
            SetupError: there is no OpenMP.
        """
        self._library = load(content, "the functions that kernels call")
        self.call = function_of(self._library, "convgrad_call")
        self._use_threads()
        self.call.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            *(ctypes.c_void_p for _ in range(4)),
        )

    def _use_threads(self) -> None:
        pool = openmp()
        self._library.convgrad_use_pool(*(ctypes.cast(getattr(pool, name), ctypes.c_void_p) for name in _POOL))

    @property
    def call_address(self) -> int | None:
        """That of the function that calls a kernel with the memory of its tensors."""
        return self.address("convgrad_call")

    def address(self, name: str) -> int | None:
        """That of one of its functions."""
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value


class XlaHost(Host):
    """What kernels call inside of XLA's custom call: parallel loops on XLA's own thread pool.

    Attributes:
        handler: XLA's custom call, which runs the kernel that its attribute "kernel" names.
    """

    launch = "convgrad_xla_launch"

    def _use_threads(self) -> None:
        self.handler = function_of(self._library, "convgrad_xla_run")
        self._library.convgrad_xla_register.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._library.convgrad_xla_register.restype = None
        self._library.convgrad_xla_calls.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))
        self._library.convgrad_xla_calls.restype = ctypes.c_int64

    def register(self, key: str, kernel: Kernel) -> None:
        """Let the custom call find a kernel, which has to live as long as programs that call it."""
        self._library.convgrad_xla_register(key.encode(), *kernel.entry)

    def tally(self, key: str) -> tuple[int, float]:
        """Calls of a kernel, and their seconds."""
        nanoseconds = ctypes.c_int64()
        calls = self._library.convgrad_xla_calls(key.encode(), ctypes.byref(nanoseconds))
        return int(calls), nanoseconds.value * 1e-9


@lru_cache(maxsize=1)
def openmp() -> ctypes.CDLL:
    """The OpenMP of this process: the one that is loaded, such as PyTorch's, or else the system's.

    Raises:
        SetupError: there is none.
    """
    maps = Path("/proc/self/maps").read_text()
    paths = dict.fromkeys(
        line.split(maxsplit=5)[5].strip() for line in maps.splitlines() if "omp" in line and "/" in line
    )
    loaded = [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    preferred = sorted(loaded, key=lambda path: "/torch/" not in path)
    for path in (*preferred, "libgomp.so.1"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if all(hasattr(library, name) for name in _POOL):
            return library
    raise SetupError(f"there is no OpenMP library with {_POOL[0]}: install libgomp (GCC's), on which kernels run")


class Kernel:
    """The kernel of a job: `run(addresses of its tensors, threads)`. It checks nothing.

    Attributes:
        job: what it computes.
    """

    def __init__(self, job: Job, content: bytes, symbol: str, host: Host) -> None:
        """Load it.

        Raises:
            LoadError: the system's loader refuses it.
        """
        self.job, self._host = job, host
        self._library = load(content, f"{job.direction} of {job.descriptor}")
        for variable, function in {"__TVMBackendParallelLaunch": host.launch, **_CONTEXT}.items():
            try:
                ctypes.c_void_p.in_dll(self._library, variable).value = host.address(function)
            except ValueError:  # this kernel does not call it
                continue
        tensors = job.tensors
        self._shapes = [(ctypes.c_int64 * len(shape))(*shape) for shape, _ in tensors]
        self._tensors = (_Tensor * len(tensors))(
            *(
                _Tensor(None, _CPU, 0, len(shape), *_CODES[dtype], 1, kept, None, 0)
                for (shape, dtype), kept in zip(tensors, self._shapes, strict=True)
            )
        )
        entry = ctypes.cast(function_of(self._library, f"__tvm_ffi_{symbol}"), ctypes.c_void_p).value
        self._call, self._entry, self._described = host.call, entry, ctypes.addressof(self._tensors)
        self._count, self._last = len(tensors), (None,) * (4 - len(tensors))

    @property
    def host(self) -> Host:
        """What it calls."""
        return self._host

    @property
    def entry(self) -> tuple[int | None, int, int]:
        """Addresses of its function and of the description of its tensors, and their number."""
        return self._entry, self._described, self._count

    def run(self, threads: int, *addresses: int) -> None:
        """Compute: the addresses are of operands, bias, result and gradient of the bias, as `Job.tensors` has them.

        Raises:
            SetupError: there was no scratch memory.
        """
        if self._call(self._entry, self._described, self._count, threads, *addresses, *self._last):
            raise SetupError(f"{self.job.direction} of {self.job.descriptor}: the kernel failed, for lack of memory")


def load(content: bytes, what: str) -> ctypes.CDLL:
    """A library from memory: what was checked is what runs, and no file is left behind. `what` it is, for errors.

    Raises:
        LoadError: the system's loader refuses it.
        SetupError: there is no memory for it, or no more file can be open.
    """
    try:
        descriptor = os.memfd_create("convgrad")
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
            high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _highest())
        finally:
            os.close(descriptor)
        try:
            return ctypes.CDLL(_unique_path(high), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        finally:
            os.close(high)
    except OSError as error:
        kind = LoadError if error.errno is None else SetupError  # the loader's errors have words, and no number
        raise kind(f"{what}: the library cannot be loaded ({error})") from error


def _highest() -> int:
    """From which on a file's number is not taken by another file later, as the least free number is.

    Who writes stack traces, as TVM does for each error, opens the paths of all libraries, and maps what it finds there.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, (min(limit, _MOST_FILES) if limit >= 0 else _MOST_FILES) - _AT_ONCE)


def function_of(library: ctypes.CDLL, name: str) -> Any:
    """A function of a library.

    Raises:
        LoadError: it has none of that name.
    """
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise LoadError(f"the library has no function {name} ({error})") from error


def _unique_path(descriptor: int) -> str:
    """A path of an open file by which none was loaded before: the loader takes libraries of one path for the same."""
    written = "".join("./" if digit == "1" else "/" for digit in f"{next(_numbers):b}")
    return f"/proc/self/{written}/fd/{descriptor}"


__all__ = ["Host", "Kernel", "LoadError", "XlaHost", "function_of", "load", "openmp"]
