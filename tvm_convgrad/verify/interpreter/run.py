# SPDX-License-Identifier: Apache-2.0
"""The call of the interpreter, which is C++, compiled on first use and kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_convgrad.offload import libraries

if TYPE_CHECKING:
    from tvm_ffi import Function

Array = np.ndarray[Any, Any]

_SOURCE = Path(__file__).parent / "runtime" / "interpreter.cc"
_ENTRY = "convgrad.interpreter.2.run"


def execute(function: object, arrays: Sequence[Array], batch: int = 0, fill: int = 0xFF) -> str:
    """Execute a kernel's PrimFunc once.

    Args:
        function: what `kernels.chooser.build` returns, before any pass of TVM.
        arrays: an argument for each parameter, contiguous, of its shape and type; results are written into them.
        batch: the value of the variable in the parameters' shapes, if there is one.
        fill: each byte of a local buffer before it is written; 0xFF is NaN as a float and -1 as an integer.

    Returns:
        The first fault as a sentence (an access out of bounds, a data race, an overflow, a failed assertion), or an
        empty string.

    Raises:
        SetupError: there is no C++ compiler.
        ValueError: an array is not contiguous, their number is not the function's, or the function has something that
            kernels do not have.

    Example:
        >>> import numpy as np
        >>> from tvm.script import tirx as T
        >>> from tvm_convgrad.verify.interpreter import execute
        >>> @T.prim_func
        ... def shifted(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        ...     for i in range(4):
        ...         y[i] = x[i + 1]
        >>> execute(shifted, [np.ones(4, "float32"), np.empty(4, "float32")])
        'a load of x[4], which has 4 elements'
    """
    if not all(array.flags.c_contiguous for array in arrays):
        raise ValueError("the interpreter takes contiguous arrays; apply numpy.ascontiguousarray")
    addresses, sizes = [array.ctypes.data for array in arrays], [array.size for array in arrays]
    return str(_entry()(function, addresses, sizes, batch, fill))


@cache
def _entry() -> Function:
    """The interpreter's function."""
    import tvm_ffi
    from tvm_ffi import libinfo

    folder = Path(libinfo.find_libtvm_ffi()).parent
    options = (
        f"-isystem{libinfo.find_include_path()}",
        f"-isystem{libinfo.find_dlpack_include_path()}",
        f"-L{folder}",
        "-ltvm_ffi",
        f"-Wl,-rpath,{folder}",
    )
    digest = hashlib.sha256("\0".join([importlib.metadata.version("apache-tvm-ffi"), *options]).encode())
    for source in sorted(_SOURCE.parent.iterdir()):
        digest.update(source.read_bytes())
    file = "libconvgrad_interpreter.so"
    library = libraries.build("interpreter", digest.hexdigest()[:16], file, _SOURCE, options)
    libraries.load("interpreter", library, _ENTRY, {})
    found = tvm_ffi.get_global_func(_ENTRY)
    assert found is not None
    return found


__all__ = ["execute"]
