# SPDX-License-Identifier: Apache-2.0
"""The TVM that runtimes are built for and loaded into: one with TVM-FFI, or one that has Relay (up to 0.19).

The runtime of a backend is one source. For a TVM with Relay it is compiled to export C functions (CONVGRAD_RELAY in
offload/runtime/host.h); then it needs no header and no library of TVM.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import tvm_convgrad
from tvm_convgrad.core.errors import SetupError

HAS_RELAY = tvm_convgrad._tvm_has_relay()
"""Whether the TVM of this process has Relay."""

_HEADERS = Path(__file__).parent / "runtime"
_LOADED: dict[str, ctypes.CDLL] = {}
_ERRORS = {error.__name__: error for error in (ValueError, RuntimeError)}


def file_of(name: str, interface: int) -> str:
    """The name of a backend's runtime; another one for a TVM with Relay, as the loader identifies libraries by name."""
    return f"libconvgrad_{name}{'-relay' if HAS_RELAY else ''}.so.{interface}"


def headers() -> list[Path]:
    """Files that every runtime includes."""
    return sorted(_HEADERS.iterdir())


def includes() -> list[str]:
    """Folders of headers: ours, and TVM's where a runtime needs them."""
    if HAS_RELAY:
        return [str(_HEADERS)]
    import tvm  # artifacts are read without it
    from tvm_ffi import libinfo

    return [
        str(_HEADERS),
        libinfo.find_include_path(),
        libinfo.find_dlpack_include_path(),
        tvm.libinfo.find_include_path(),
    ]


def library_folders() -> list[Path]:
    """Folders of the libraries of TVM that a runtime is linked with."""
    if HAS_RELAY:
        return []
    import tvm  # artifacts are read without it
    from tvm_ffi import libinfo

    return [Path(libinfo.find_libtvm_ffi()).parent, Path(tvm.__file__).parent / "lib"]


def options() -> list[str]:
    """Options of the compiler, and TVM's libraries."""
    return ["-DCONVGRAD_RELAY"] if HAS_RELAY else ["-ltvm_ffi", "-ltvm_runtime"]


def versions() -> list[str]:
    """Those of TVM that a runtime is compiled against."""
    return ["Relay"] if HAS_RELAY else [importlib.metadata.version(each) for each in ("apache-tvm", "apache-tvm-ffi")]


def compiler() -> str | None:
    """The C++ compiler that TVM uses, or None."""
    if HAS_RELAY:
        from tvm.contrib import cc
    else:
        from tvm.support import cc
    found = cc.get_cc()
    return None if found is None else str(found)


def is_loaded(name: str, entry: str) -> bool:
    """Whether the process has the runtime of a backend.

    Args:
        name: of the backend.
        entry: its global function in TVM-FFI.
    """
    if HAS_RELAY:
        return name in _LOADED
    import tvm_ffi  # artifacts are read without TVM

    return tvm_ffi.get_global_func(entry, allow_missing=True) is not None


def load(name: str, library: Path) -> None:
    """Load the runtime of a backend.

    Raises:
        OSError: the system's loader refuses it.
    """
    if HAS_RELAY:
        import tvm  # noqa: F401  (the runtime finds TVM's functions in the process)
    _LOADED[name] = ctypes.CDLL(str(library))


def ask(name: str, interface: int, question: str, numbers: Sequence[int] = (), *more: str | int) -> str:
    """What the loaded runtime of a backend says of a call.

    Args:
        name, interface: of the backend.
        question: such as "describe"; runtime/runtime.cc of the backend has them.
        numbers: the call as the runtime reads it; none where the question is of no call.
        more: what else the question takes: at most a text, then at most a number.

    Raises:
        ValueError, RuntimeError: as the runtime does.
    """
    block = (ctypes.c_int64 * len(numbers))(*numbers)
    if HAS_RELAY:
        return _answer(_LOADED[name], name, question, block, more)
    import tvm_ffi  # artifacts are read without TVM

    function = tvm_ffi.get_global_func(f"convgrad.{name}.{interface}.{question}")
    return str(function(*([ctypes.c_void_p(ctypes.addressof(block))] if numbers else []), *more))


def _answer(
    library: ctypes.CDLL, name: str, question: str, block: ctypes.Array[ctypes.c_int64], more: Sequence[str | int]
) -> str:
    """By the C function that a runtime for a TVM with Relay exports."""
    text = next((each for each in more if isinstance(each, str)), "")
    number = next((each for each in more if isinstance(each, int)), 0)
    answer = ctypes.c_char_p()
    function = _function(library, f"convgrad_{name}_ask")
    status = function(question.encode(), block, text.encode(), ctypes.c_int64(number), ctypes.byref(answer))
    said = (answer.value or b"").decode()
    if status:
        kind, colon, message = said.partition(": ")
        raise _ERRORS.get(kind, RuntimeError)(message if colon and kind in _ERRORS else said)
    return said


@lru_cache(maxsize=16)
def _function(library: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise SetupError(f"the runtime has no function {name}; `convgrad build-runtime` makes it again.") from error


__all__ = [
    "HAS_RELAY",
    "ask",
    "compiler",
    "file_of",
    "headers",
    "includes",
    "is_loaded",
    "library_folders",
    "load",
    "options",
    "versions",
]
