# SPDX-License-Identifier: Apache-2.0
"""TVM's CUDA runtime with CUDA's libraries from the registry's packages, and the GPU of this machine."""

from __future__ import annotations

import ctypes
from pathlib import Path

import tvm

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.offload.libraries import installed_file

INSTALL = "pip install 'tvm-convgrad[cuda]'"


def load_cuda() -> None:
    """Give TVM its CUDA device, if it lacks it: its library is there, but needs CUDA's own, which no loader finds.

    Raises:
        SetupError: CUDA's runtime is not installed, or there is no NVIDIA driver.
    """
    if tvm.get_global_func("device_api.cuda", allow_missing=True) is not None:
        return
    runtime = installed_file("nvidia-cuda-runtime", "libcudart.so.13")
    if runtime is None:
        raise SetupError(f"TVM's device for GPUs needs CUDA's runtime (the package nvidia-cuda-runtime): {INSTALL}.")
    try:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(Path(tvm.__file__).parent / "lib" / "libtvm_runtime_cuda.so"))
    except OSError as error:
        raise SetupError(
            f"TVM's CUDA device cannot be loaded ({error}); it needs a GPU with NVIDIA's driver for CUDA 13."
        ) from error


def local_target() -> tvm.target.Target:
    """The target of the first GPU of this machine.

    Raises:
        SetupError: there is none, or its libraries are missing.
    """
    load_cuda()
    device = tvm.cuda(0)
    if not device.exist:
        raise SetupError("there is no NVIDIA GPU on this machine; run this on one, with NVIDIA's driver for CUDA 13.")
    return tvm.target.Target({"kind": "cuda", "arch": "sm_" + device.compute_version.replace(".", "")})


def require_local(target: tvm.target.Target, what: str) -> None:
    """Raise SetupError unless this machine's first GPU is of the target's architecture.

    Args:
        what: is done on it, such as "engines are tuned".
    """
    wanted, local = (str(each.attrs["arch"]).rstrip("af") for each in (target, local_target()))
    if local != wanted:
        raise SetupError(
            f"the target is {wanted}, and the GPU of this machine is {local}: {what} on what they are for; use "
            f"--target cuda:{local}, or a machine with the other."
        )


def local_name(arch: str) -> str | None:
    """The name of this machine's first GPU, if it is of an architecture such as "sm_90"; None otherwise."""
    try:
        here = local_target()
    except SetupError:
        return None
    return str(tvm.cuda(0).device_name) if str(here.attrs["arch"]) == arch else None


__all__ = ["INSTALL", "load_cuda", "local_name", "local_target", "require_local"]
