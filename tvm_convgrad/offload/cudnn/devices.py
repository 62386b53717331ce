# SPDX-License-Identifier: Apache-2.0
"""GPUs as data: the properties that cuDNN reads to say which engines it has for it, on machines that have none.

Numbers are those of NVIDIA's data sheets and of its CUDA C++ programming guide ("Technical Specifications per Compute
Capability"). On the GPU itself `convgrad.cudnn.2.properties` gives cuDNN's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.target import Target

_DRIVER = 13000
"""CUDA's version that the driver is for, as 1000 * major + 10 * minor."""


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    Attributes:
        name: as NVIDIA sells it.
        version: 10 times the compute capability.
        processors: streaming multiprocessors.
        shared: bytes of shared memory that a block may have at most.
        blocks, threads: that a multiprocessor holds.
        memory, l2: bytes.
        clock, memory_clock: kHz.
        pci: device number on the PCI bus.
    """

    name: str
    version: int
    processors: int
    shared: int
    blocks: int
    threads: int
    memory: int
    l2: int
    clock: int
    memory_clock: int
    pci: int

    def json(self) -> str:
        """As cuDNN's device property descriptor reads it (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION)."""
        return json.dumps(
            {
                "deviceName": self.name,
                "deviceVer": self.version * 10,
                "driverVer": _DRIVER,
                "cudaDeviceId": 0,
                "pciDeviceId": self.pci,
                "multiProcessorCount": self.processors,
                "smCountOrigin": 0,
                "warpSize": 32,
                "maxGridSize": [2**31 - 1, 65535, 65535],
                "maxBlockSize": [1024, 1024, 64],
                "maxThreadsPerBlock": 1024,
                "maxThreadsPerSM": self.threads,
                "maxCtasPerSM": self.blocks,
                "regsPerBlock": 65536,
                "maxRegistersPerSM": 65536,
                "maxSharedMemoryPerBlock": 48 * 1024,
                "maxSharedMemoryPerBlockOptin": self.shared,
                "reservedSharedMemoryPerBlock": 0 if self.version < 80 else 1024,
                "totalGlobalMem": self.memory,
                "l2CacheSize": self.l2,
                "smClockRateKHz": self.clock,
                "memClockRateKHz": self.memory_clock,
                "isTccDriver": 0,
                "supportCoopLaunch": 1,
            }
        )


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

DEVICES = {
    "sm_75": Gpu("Tesla T4", 75, 40, 64 * _KIB, 16, 1024, 15 * _GIB, 4 * _MIB, 1590000, 5001000, 0x1EB8),
    "sm_80": Gpu("A100-SXM4-80GB", 80, 108, 163 * _KIB, 32, 2048, 79 * _GIB, 40 * _MIB, 1410000, 1593000, 0x20B2),
    "sm_89": Gpu("L40S", 89, 142, 99 * _KIB, 24, 1536, 44 * _GIB, 96 * _MIB, 2520000, 9001000, 0x26B9),
    "sm_90": Gpu("H200", 90, 132, 227 * _KIB, 32, 2048, 139 * _GIB, 60 * _MIB, 1980000, 3201000, 0x2335),
    "sm_100": Gpu("B200", 100, 148, 227 * _KIB, 32, 2048, 178 * _GIB, 126 * _MIB, 1965000, 3996000, 0x2901),
}
"""A GPU of each architecture, on which cuDNN's answers depend."""


def arch_of(target: Target) -> str:
    """The architecture of a target for GPUs, such as "sm_90"; that of "sm_90a" is the same GPU's."""
    return str(target.attrs["arch"]).rstrip("af")


def version_of(arch: str) -> int:
    """10 times the compute capability of an architecture."""
    return int(arch.removeprefix("sm_"))


def properties_of(arch: str) -> str | None:
    """The properties of DEVICES' GPU of an architecture as JSON, or None where there is none."""
    found = DEVICES.get(arch)
    return None if found is None else found.json()


__all__ = ["DEVICES", "Gpu", "arch_of", "properties_of", "version_of"]
