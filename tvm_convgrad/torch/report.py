# SPDX-License-Identifier: Apache-2.0
"""What `explain` and `stats` tell of plans."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_convgrad.torch.plan import Plan
from tvm_convgrad.torch.signature import BACKWARD


@dataclass(frozen=True)
class Explanation:
    """Who computes the calls of one signature.

    Attributes:
        call: the operator, the shapes and its arguments, in words.
        where: "kernels", "PyTorch", "both" (some results each), "compiling" or "measuring".
        why: for each result, or for all.
        by_kernels, by_pytorch: calls.
    """

    call: str
    where: str
    why: str
    by_kernels: int
    by_pytorch: int

    def __str__(self) -> str:
        calls = f"{self.by_kernels} calls by kernels, {self.by_pytorch} by PyTorch"
        return f"{self.call}: {self.where} ({calls}){': ' if self.why else ''}{self.why}"


@dataclass(frozen=True)
class Stats:
    """What has been computed since `enable`.

    Attributes:
        kernel_calls, kernel_seconds: calls in which kernels computed at least one result.
        pytorch_calls, pytorch_seconds: all other calls.
        signatures: different calls.
        compiled: kernels that this process has had compiled; those that were kept on disk are none.
        kept_bytes: memory of freed results, which is kept for the next ones.
    """

    kernel_calls: int
    kernel_seconds: float
    pytorch_calls: int
    pytorch_seconds: float
    signatures: int
    compiled: int
    kept_bytes: int = 0


def explanation(plan: Plan) -> Explanation:
    """Who computes the calls of a plan."""
    taken = {part.name for part, _ in plan.taken}
    reasons = plan.reasons
    if not plan.decided and not plan.requested:
        where, reasons = "PyTorch", {"": "kernels are compiled for what is called twice"}
    elif not plan.decided:
        where = "measuring" if plan.measuring else "compiling"
    elif not taken:
        where = "PyTorch"
    else:
        wanted = sum(plan.signature.wanted[:2]) if plan.signature.operator == BACKWARD else 1
        where = "kernels" if len(taken) == wanted else "both"
    why = "; ".join(f"{name}: {reason}" if name else reason for name, reason in reasons.items())
    return Explanation(str(plan.signature), where, why, plan.by_kernels.calls, plan.by_pytorch.calls)


__all__ = ["Explanation", "Stats", "explanation"]
