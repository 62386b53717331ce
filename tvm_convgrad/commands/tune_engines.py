# SPDX-License-Identifier: Apache-2.0
"""`convgrad tune --cudnn`: times cuDNN's engines for convolutions on the GPU, and keeps the winners for build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tvm.target import Target

from relax_ops.lowering import Lowered
from tvm_convgrad.commands.tune_work import TuneSources
from tvm_convgrad.core.entries import default_path
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.entry import ENTRY
from tvm_convgrad.offload.cudnn.gpu import device_for
from tvm_convgrad.offload.cudnn.settings import settings
from tvm_convgrad.offload.cudnn.store import EngineStore, beside, use_engines
from tvm_convgrad.offload.cudnn.tuner import Outcome, tune
from tvm_convgrad.offload.registry import require
from tvm_convgrad.report.tables import followed, print_json, print_table, stdout
from tvm_convgrad.tuning.search import TuningError, Work


def calls_of(sources: TuneSources, target: Target) -> list[tuple[Call, int]]:
    """The calls of cuDNN, and how often each occurs: of a model's step with their epilogues, of problems without.

    Raises:
        SetupError: cuDNN is not installed, or not for the target.
    """
    require([ENTRY.name], target)
    if sources.model is None:
        return calls_of_work(sources.work(target))
    with use_engines(None):
        return calls_of_plan(sources.planned(target, (ENTRY.name,)))


def calls_of_plan(entries: Iterable[Lowered]) -> list[tuple[Call, int]]:
    """The calls of cuDNN in a plan, and how often each occurs."""
    taken = (entry for entry in entries if entry.choice.name == ENTRY.name)
    calls = (Call(each.direction, each.problem, Epilogue(**dict.fromkeys(each.fused, True))) for each in taken)
    return list(Counter(calls).items())


def calls_of_work(work: Iterable[Work]) -> list[tuple[Call, int]]:
    """Calls without epilogue."""
    return [(Call(each.direction, each.problem), each.count) for each in work]


def tune_engines(
    calls: Sequence[tuple[Call, int]], target: Target, store: Path | None, budget: float, json: bool
) -> None:
    """Tune, and print what became of each call and which engines were thrown out.

    Raises:
        SetupError: there is no GPU, or another than the target's.
        TuningError: for some calls no engine can be trusted; the others are kept.
    """
    device, chosen = device_for(target), settings()
    kept = EngineStore(beside(store or default_path()))
    outcomes = list(followed(tune(calls, device, chosen, kept, budget), "tuning", len(calls)))
    counts = Counter(outcome.status for outcome in outcomes)
    if json:
        about = {"device": device.device, "cudnn": device.version, "settings": chosen.allowed, "store": str(kept.path)}
        print_json({**about, "counts": dict(counts), "outcomes": [_plain(outcome) for outcome in outcomes]})
    else:
        _show(outcomes, device.device)
        summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        stdout().print(f"{summary}; kept in {kept.path}", markup=False, soft_wrap=True)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        why = "; ".join(f"{engine}: {reason}" for engine, reason in failed[0].thrown_out)
        raise TuningError(
            f"{len(failed)} of {len(outcomes)} calls have no cuDNN engine that passed all checks; "
            f"{failed[0].call}: {why}"
        )


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "direction": outcome.call.direction,
        "descriptor": outcome.call.problem.descriptor,
        "fused": list(outcome.call.fused),
        "status": outcome.status,
        "gain": outcome.gain,
        "tried": outcome.tried,
        "detail": outcome.detail,
        "thrown_out": [{"engine": str(engine), "reason": reason} for engine, reason in outcome.thrown_out],
    }


def _show(outcomes: Sequence[Outcome], device: str) -> None:
    rows = ((o.status, f"{o.gain:.2f}", o.call, o.tried, o.detail) for o in outcomes)
    columns = ("outcome", "gain", "call", "tried", "engine or reason")
    print_table(f"cuDNN's engines, tuned on {device}", columns, rows, right=("gain", "tried"))
    thrown = [(o.call, each.engine, each.reason) for o in outcomes for each in o.thrown_out]
    if thrown:
        print_table("thrown out", ("call", "engine", "because it"), thrown)


__all__ = ["calls_of", "calls_of_plan", "calls_of_work", "tune_engines"]
