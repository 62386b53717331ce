# SPDX-License-Identifier: Apache-2.0
"""Importing TVM for a build for CPUs: in a sixth of a second, where `import tvm` needs a second.

The rest of that second makes backtraces. TVM raises and catches an error where a type or a function is not there, and
to write the backtrace down it reads the symbols of all libraries of the process, PyTorch's among them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

PLUGS = "TVM_DEVICE_BACKEND_AUTOLOAD"
"""TVM's switch of what `import tvm` loads at its end: its own backends of GPUs, and plug-ins such as this package."""


def import_tvm_for_cpus() -> None:
    """Import TVM with its plug-ins, but without its own backends of GPUs; nothing is done if it is imported already."""
    if "tvm" in sys.modules:
        return
    importlib.import_module("tvm_ffi")  # has the library that TVM's libraries are linked with
    _load_extra_runtime()
    stated = os.environ.get(PLUGS)
    os.environ[PLUGS] = "0"
    try:
        importlib.import_module("tvm")
    finally:
        os.environ.pop(PLUGS)
        if stated is not None:
            os.environ[PLUGS] = stated
    if stated == "0":
        return
    for plug in entry_points(group="tvm.backends"):
        try:
            plug.load()()
        except Exception as error:  # of any kind, as TVM has it: another package's failure is not this one's
            warnings.warn(f"plug-in {plug.name!r} of TVM fails: {error}", stacklevel=2)


def _load_extra_runtime() -> None:
    """Load the library with the types of tvm.runtime.disco, which TVM loads only after it has looked for them."""
    found = importlib.util.find_spec("tvm")
    if found is None or found.origin is None:
        return  # the import says so
    runtime, extra = (Path(found.origin).parent / "lib" / f"libtvm_{name}.so" for name in ("runtime", "runtime_extra"))
    if runtime.exists() and extra.exists():  # a TVM built from source has them elsewhere
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(extra))


__all__ = ["PLUGS", "import_tvm_for_cpus"]
