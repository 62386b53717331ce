# SPDX-License-Identifier: Apache-2.0
"""`Choice`: which implementation was chosen for a direction of a problem, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm_convgrad.kernels.contract import Kernel, Plan

COMPOSITION = "composition"
"""The name of a choice of stock operators, without a kernel."""


@dataclass(frozen=True)
class Choice:
    """The implementation of a direction of a problem.

    Attributes:
        name: of a kernel with the direction, of a vendor's library, or "composition".
        reason: why it was taken.
        estimate: as of `Kernel.estimate`, in seconds; 0 for a composition.
        refused: why each other kernel was not taken, by its name.
        kernel, plan: those of a generated kernel.
        engine: the engine or algorithm of a vendor's library.
    """

    name: str
    reason: str
    estimate: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    kernel: Kernel | None = None
    plan: Plan | None = None
    engine: object = None

    @property
    def is_kernel(self) -> bool:
        """Whether a generated kernel was taken."""
        return self.kernel is not None


__all__ = ["COMPOSITION", "Choice"]
