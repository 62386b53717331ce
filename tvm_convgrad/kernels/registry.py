# SPDX-License-Identifier: Apache-2.0
"""The list of all kernels: those that modules below this package bind in `KERNELS`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from tvm_convgrad import kernels
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.kernels.contract import Kernel


@cache
def all_kernels() -> tuple[Kernel, ...]:
    """Every kernel, in the order of the names of their modules.

    Raises:
        SetupError: two kernels of one direction have one name.
    """
    names = sorted(module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."))
    found = [kernel for name in names for kernel in getattr(importlib.import_module(name), "KERNELS", ())]
    owners: dict[str, Kernel] = {}
    for kernel in found:
        for direction in kernel.directions:
            other = owners.setdefault(kernel.label(direction), kernel)
            if other is not kernel:
                raise SetupError(
                    f"kernels: {type(other).__module__} and {type(kernel).__module__} both define "
                    f"{kernel.label(direction)!r}; give one of them another name"
                )
    return tuple(found)


def kernels_of(direction: str) -> tuple[Kernel, ...]:
    """The kernels that compute a direction."""
    return tuple(kernel for kernel in all_kernels() if direction in kernel.directions)


def kernel_named(name: str, direction: str) -> Kernel:
    """A kernel by its name, or by its name and direction ("implicit GEMM wgrad").

    Raises:
        UnsupportedError: no kernel of that name computes the direction.
    """
    for kernel in kernels_of(direction):
        if name in (kernel.name, kernel.label(direction)):
            return kernel
    known = ", ".join(kernel.name for kernel in kernels_of(direction))
    raise UnsupportedError(f"kernels: {name!r} computes no {direction}; there are {known}")


def forms_of(direction: str) -> dict[str, Kernel]:
    """The kernels of a direction by the value of `impl` that forces each; "winograd" is short for "kernel:winograd"."""
    found = {kernel.form: kernel for kernel in kernels_of(direction)}
    return found | {kernel.name: kernel for kernel in found.values() if not kernel.exact}


__all__ = ["all_kernels", "forms_of", "kernel_named", "kernels_of"]
