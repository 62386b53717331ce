# SPDX-License-Identifier: Apache-2.0
"""`convgrad tune --cudnn`: times cuDNN's engines for convolutions on the GPU, and keeps the winners for build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.offload.cudnn.bench import Call
from tvm_convgrad.offload.cudnn.gpu import bench_for
from tvm_convgrad.offload.cudnn.settings import settings
from tvm_convgrad.offload.cudnn.store import EngineStore, beside
from tvm_convgrad.offload.cudnn.tuner import Outcome, tune
from tvm_convgrad.report.tables import followed, print_json, print_table, stdout
from tvm_convgrad.tuning.search import TuningError, Work
from tvm_convgrad.tuning.store import default_path

if TYPE_CHECKING:
    from relax_ops.lowering import Lowered


def calls_of_plan(entries: Iterable[Lowered]) -> list[tuple[Call, int]]:
    """The calls of cuDNN in a plan, and how often each occurs."""
    taken = (entry for entry in entries if entry.choice.kind == "cudnn")
    calls = (Call(each.face, each.problem, Epilogue(**dict.fromkeys(each.fused, True))) for each in taken)
    return list(Counter(calls).items())


def calls_of_work(work: Iterable[Work]) -> list[tuple[Call, int]]:
    """Calls without epilogue."""
    return [(Call(each.face, each.problem), each.count) for each in work]


def tune_engines(calls: Sequence[tuple[Call, int]], target: Any, store: Path | None, budget: float, json: bool) -> None:
    """Tune, and print what became of each call and which engines were thrown out.

    Raises:
        SetupError: there is no GPU, or another than the target's.
        TuningError: for some calls no engine can be trusted; the others are kept.
    """
    bench, chosen = bench_for(target), settings()
    kept = EngineStore(beside(store or default_path()))
    outcomes = list(followed(tune(calls, bench, chosen, kept, budget), "tuning", len(calls)))
    counts = Counter(outcome.status for outcome in outcomes)
    if json:
        about = {"device": bench.device, "cudnn": bench.version, "settings": chosen.allowed, "store": str(kept.path)}
        print_json({**about, "counts": dict(counts), "outcomes": [_plain(outcome) for outcome in outcomes]})
    else:
        _show(outcomes, bench.device)
        summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        stdout().print(f"{summary}; kept in {kept.path}", markup=False, soft_wrap=True)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        why = "; ".join(f"{engine}: {reason}" for engine, reason in failed[0].thrown_out)
        raise TuningError(
            f"{len(failed)} of {len(outcomes)} calls have no engine of cuDNN that can be trusted; "
            f"{failed[0].call}: {why}"
        )


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "face": outcome.call.face,
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


__all__ = ["calls_of_plan", "calls_of_work", "tune_engines"]
