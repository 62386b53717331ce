# SPDX-License-Identifier: Apache-2.0
"""A GPU that is the host, for a process of its own: cuDNN's runtime runs on it as it does on a real one."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.cudnn import backend


def load() -> None:
    """Load what stands in for cuDNN, CUDA's events and TVM's device of kind cuda, before anything asks for them."""
    _, of_runtime = backend._recipe()
    for name, file, options in (("cudart", "libcudart.so.13", ()), ("cudnn", "libcudnn.so.9", of_runtime)):
        source = Path(__file__).parent / f"{name}.cc"
        key = hashlib.sha256(source.read_bytes() + "\0".join(options).encode()).hexdigest()[:16]
        library = libraries.build(f"host-{name}", key, file, source, options)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
