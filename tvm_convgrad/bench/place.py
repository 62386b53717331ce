# SPDX-License-Identifier: Apache-2.0
"""Where all parties of a run compute: this machine's CPU, or its first GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.transforms import TRANSFORMS
from tvm_convgrad.offload.common import NAMES
from tvm_convgrad.offload.cuda import require_local
from tvm_convgrad.training.cpu import parse_target

KERNEL = "kernel"
"""The generated kernels, by the name that `--impl` takes."""

TYPES = ("float32", "float16", "bfloat16")
"""Element types that can be measured, on a GPU; on CPUs it is the first only."""

_OF_CPU, _OF_GPU = (KERNEL, TRANSFORMS, "onednn"), ("cudnn", "cutlass")


@dataclass(frozen=True)
class Place:
    """A device, and what is measured there.

    Attributes:
        target: TVM's, that ours is compiled for.
        gpu: whether it is one, which works on while the caller goes on.
        impl: what computes our convolutions: KERNEL, "transforms" (with Winograd's), or a vendor's library.
        dtype: of all tensors.
    """

    target: Any
    gpu: bool
    impl: str
    dtype: str = "float32"

    @property
    def device(self) -> Any:
        """TVM's device."""
        import tvm

        return tvm.cuda(0) if self.gpu else tvm.cpu()

    @property
    def torch(self) -> str:
        """PyTorch's name of it."""
        return "cuda" if self.gpu else "cpu"

    @property
    def name(self) -> str | None:
        """The GPU's, None for a CPU."""
        return str(self.device.device_name) if self.gpu else None

    @property
    def backends(self) -> list[str]:
        """The libraries that compute our convolutions."""
        return [self.impl] if self.impl in NAMES else []

    def engines(self) -> AbstractContextManager[None]:
        """Where programs are compiled: calls take the engines of cuDNN that were tuned here, if any."""
        if not self.gpu:
            return nullcontext()
        from tvm_convgrad.offload.cudnn.store import EngineStore, default_path, use_engines

        return use_engines(EngineStore(default_path()))

    @property
    def tf32(self) -> bool:
        """Whether float32 operands may be rounded for tensor cores, which the library's variable says."""
        if not self.gpu:
            return False
        if self.impl == "cutlass":
            from tvm_convgrad.offload.cutlass.backend import float32_math

            return float32_math() == "tf32"
        from tvm_convgrad.offload.cudnn.settings import settings

        return settings().tf32

    @property
    def numbers(self) -> str:
        """The element type, and what it may be rounded to: "float32", "tf32", …"""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


def place_of(target: str, impl: str | None = None, dtype: str = "float32") -> Place:
    """The place of a target by name.

    Args:
        target: as `parse_target` takes it; "cuda" is this machine's GPU.
        impl: None is KERNEL on CPUs, cuDNN on GPUs.

    Raises:
        UnsupportedError: no such target, or `impl` or `dtype` is not for it.
        SetupError: there is no such GPU in this machine.
    """
    compiled_for = parse_target(target, gpus=True)
    gpu = str(compiled_for.kind.name) == "cuda"
    able = _OF_GPU if gpu else _OF_CPU
    chosen = impl or able[0]
    if chosen not in able:
        raise UnsupportedError(f"bench --impl {chosen}: for {target} there is {', '.join(able)}; choose one of these.")
    if dtype not in TYPES[: None if gpu else 1]:
        raise UnsupportedError(
            f"bench --dtype {dtype}: on a CPU float32 is measured; give --target cuda, or leave it out."
        )
    if gpu:
        require_local(compiled_for, "programs are measured")
    return Place(compiled_for, gpu, chosen, dtype)


__all__ = ["KERNEL", "TYPES", "Place", "place_of"]
