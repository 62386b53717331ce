# SPDX-License-Identifier: Apache-2.0
"""The results of `explain` and `stats`."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_convgrad.torch.plan import Plan
from tvm_convgrad.torch.signature import BACKWARD


@dataclass(frozen=True)
class Explanation:
    """What computes the calls of one signature: this package's kernels, PyTorch, or both.

    Attributes:
        call: the operator with its shapes and arguments.
        where: "kernels", "PyTorch", "both" (some results by each), or "compiling" or "measuring" before the choice.
        why: the reason, for each result or for all.
        by_kernels, by_pytorch: number of calls so far that kernels and that PyTorch computed.
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
    """Counts of calls and times since `enable`.

    Attributes:
        kernel_calls, kernel_seconds: number and total time of calls in which kernels computed at least one result.
        pytorch_calls, pytorch_seconds: number and total time of all other calls.
        signatures: number of distinct signatures.
        compiled: number of kernels compiled for this process; kernels that were loaded from the store do not count.
        kept_bytes: bytes of freed results that are kept for later results.
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
