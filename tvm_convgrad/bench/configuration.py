# SPDX-License-Identifier: Apache-2.0
"""What a run measures: the device, the implementation of our convolutions, and the element type."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import tvm

from tvm_convgrad.core.entries import default_path
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.kernels.transforms import TRANSFORMS
from tvm_convgrad.offload.cuda import require_local
from tvm_convgrad.offload.registry import NAMES, backend, names_of_kind
from tvm_convgrad.training.compile.targets import parse_target

KERNEL = "kernel"
"""The generated kernels, by the name that `--impl` takes."""

DTYPES = ("float32", "float16", "bfloat16")
"""Element types that can be measured."""

_CPU_IMPLS, _GPU_IMPLS = (KERNEL, TRANSFORMS, *names_of_kind("llvm")), names_of_kind("cuda")


@dataclass(frozen=True)
class Configuration:
    """The device that all contenders of a run compute on, and what is measured there.

    Attributes:
        target: the TVM target that ours is compiled for.
        gpu: whether it is a GPU, whose calls return before it has computed.
        impl: what computes our convolutions: KERNEL, "transforms" (Winograd's transform allowed), or a vendor library.
        dtype: element type of all tensors.
    """

    target: tvm.target.Target
    gpu: bool
    impl: str
    dtype: str = DTYPES[0]

    @property
    def device(self) -> tvm.runtime.Device:
        """TVM's device."""
        return tvm.cuda(0) if self.gpu else tvm.cpu()

    @property
    def torch_device(self) -> str:
        """PyTorch's name of the device."""
        return "cuda" if self.gpu else "cpu"

    @property
    def gpu_name(self) -> str | None:
        """The GPU's name; None on a CPU."""
        return str(self.device.device_name) if self.gpu else None

    @property
    def backends(self) -> list[str]:
        """The vendor libraries that compute our convolutions."""
        return [self.impl] if self.impl in NAMES else []

    def engines(self) -> AbstractContextManager[None]:
        """A context in which compiled calls take what was tuned on this machine for their library, if anything."""
        return backend(self.impl).tuned(default_path()) if self.impl in NAMES else nullcontext()

    @property
    def tf32(self) -> bool:
        """Whether the library may round float32 operands to tf32; its environment variable decides."""
        return self.impl in NAMES and backend(self.impl).rounds_float32()

    @property
    def numbers(self) -> str:
        """The type that operands are rounded to: `dtype`, or "tf32"."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


def configuration_of(target: str, impl: str | None = None, dtype: str = DTYPES[0]) -> Configuration:
    """The configuration that options name.

    Args:
        target: as `parse_target` takes it; "cuda" is this machine's GPU.
        impl: None is KERNEL on CPUs, cuDNN on GPUs.
        dtype: one of DTYPES.

    Raises:
        UnsupportedError: no such target, or `impl` or `dtype` is not for it.
        SetupError: there is no such GPU in this machine.
    """
    compiled_for = parse_target(target, gpus=True)
    gpu = str(compiled_for.kind.name) == "cuda"
    able = _GPU_IMPLS if gpu else _CPU_IMPLS
    chosen = impl or able[0]
    if chosen not in able:
        raise UnsupportedError(f"bench --impl {chosen}: for {target} there is {', '.join(able)}; choose one of these.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"bench --dtype {dtype}: measured are {', '.join(DTYPES)}; choose one of these.")
    if gpu:
        require_local(compiled_for, "programs are measured")
    return Configuration(compiled_for, gpu, chosen, dtype)


__all__ = ["DTYPES", "KERNEL", "Configuration", "configuration_of"]
