# SPDX-License-Identifier: Apache-2.0
"""Tuning of cuDNN's engines on a device of numpy: what is thrown out and why, who wins, what is kept, the budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.offload.cudnn_device import FLAWS, Device, Kind
from tvm_convgrad.errors import ArtifactError
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.cudnn.agreement import Parties, bound
from tvm_convgrad.offload.cudnn.bench import Call
from tvm_convgrad.offload.cudnn.settings import Settings
from tvm_convgrad.offload.cudnn.store import EngineStore
from tvm_convgrad.offload.cudnn.tuner import MOST, Outcome, tune
from tvm_convgrad.problem import ConvProblem

SMALL = ConvProblem.from_descriptor("mb2ic4ih6oc4kh3ph1")
CALL = Call("backward_weight", SMALL)
STRICT = Settings()


def tuned(
    device: Device, path: Path, call: Call = CALL, settings: Settings = STRICT, budget: float = 60.0
) -> tuple[Outcome, EngineStore]:
    store = EngineStore(path / "t.json")
    (outcome,) = tune([(call, 1)], device, settings, store, budget, device.clock)
    return outcome, EngineStore(path / "t.json")


def reasons(outcome: Outcome) -> dict[int, str]:
    return {each.engine.index: each.reason for each in outcome.thrown_out}


EVERY = [
    ("forward", "mb2ic4ih6oc4kh3ph1", Epilogue(bias=True, relu=True)),
    ("forward", "g2mb2ic4ih6oc4kh3ph1_dt=f16:f16:f16_lay=NHWC:OHWI:NHWC", Epilogue(bias=True, accumulate=True)),
    ("backward_weight", "mb2ic4ih6oc4kh3ph1", NO_EPILOGUE),
    ("backward_weight", "mb2ic4iw9oc4kw3pw1_dt=bf16:bf16:bf16", NO_EPILOGUE),
    ("backward_data", "mb2ic4ih6oc4kh3ph1_dt=f64:f64:f64", Epilogue(accumulate=True)),
]


@pytest.mark.parametrize(("face", "descriptor", "epilogue"), EVERY)
def test_every_flaw_is_found(tmp_path: Path, face: str, descriptor: str, epilogue: Epilogue) -> None:
    """The fastest engines are wrong, each in its way; each is named with its reason; the best right one wins."""
    flawed = [Kind(1e-4, flaw, workspace=96) for flaw in FLAWS[1:]]
    right = [Kind(4e-4), Kind(2e-4, workspace=100), Kind(3e-4)]
    device = Device(right[0], *flawed, *right[1:], Kind(1e-5, refusal="not deterministic"))
    call = Call(face, ConvProblem.from_descriptor(descriptor), epilogue)
    outcome, store = tuned(device, tmp_path, call)
    best = 1 + len(flawed)
    assert (outcome.status, outcome.gain, outcome.tried) == ("better", pytest.approx(2.0), 3)
    assert outcome.detail.startswith(f"engine {best} (1={best}), 0.200 ms")
    told = reasons(outcome)
    parts = {
        "before": "writes outside: 1 bytes before its result",
        "behind": "writes outside: 1 bytes behind its result",
        "workspace": "writes outside: 1 bytes behind its workspace",
        "operand": "writes outside: into operand 0",
        "nan": "1 of",
        "far": "1 of",
        "random": "" if "f16" in descriptor else "gives other bits when it is called again",
        "fails": "fails: a rod is bent",
        "no plan": "has no plan: the abacus lacks beads",
        "late": "writes outside: 1 bytes behind its result",
    }
    assert set(told) == set(range(1, len(FLAWS)))
    assert [flaw for number, flaw in enumerate(FLAWS) if number and parts[flaw] not in told[number]] == []
    assert "elements differ from engine 0 (1=0), the first at [" in told[FLAWS.index("far")]
    winner = store.winner(call, "sm_90", 92400, STRICT, "Abacus")
    assert winner is not None
    assert (winner.engine.index, winner.engine.workspace, winner.gain) == (best, 100, pytest.approx(2.0))
    assert {index for index, _ in winner.thrown_out} == set(told)


def test_small_errors_of_narrow_sums_are_found() -> None:
    """The bound of the result's type is far below what one product lost makes, and above two roundings."""
    for dtype in ("float32", "float16", "bfloat16"):
        for descriptor in ("mb2ic8ih9oc8kh3ph1", "mb32ic64ih56oc64kh3ph1"):
            for face in ("forward", "backward_weight"):
                call = Call(face, ConvProblem.from_descriptor(descriptor).with_dtypes(dtype, dtype, dtype))
                operands, limit = call.numbers()
                assert max(np.abs(each.astype("float32")).max() for each in operands) == limit
                allowed = bound(call, limit, STRICT)
                assert (allowed.absolute == allowed.relative == 0) == (dtype == "float32")
                typical = np.sqrt(call.terms) * 2
                wide = np.asarray([typical], "float32").astype(operands[0].dtype)
                bits = wide.view(f"uint{8 * wide.itemsize}")
                assert allowed.differing(wide, (bits + 1).view(wide.dtype)).all() == (dtype == "float32")
                assert allowed.differing(wide, (wide.astype("float32") * 1.1 + 1).astype(wide.dtype)).all()
    strict = bound(CALL, 3, STRICT)
    assert strict.absolute < bound(CALL, 3, replace(STRICT, transforms=True)).absolute < 0.1
    assert strict.absolute < bound(CALL, 3, replace(STRICT, tf32=True)).absolute < 1
    assert strict.differing(np.asarray([np.nan, 1.0]), np.asarray([np.nan, 1.0])).tolist() == [True, False]


def test_the_majority_decides(tmp_path: Path) -> None:
    """The heuristics' first may be the one that is wrong; where as many say the one as the other, none is taken."""
    outcome, store = tuned(Device(Kind(1e-4, "far"), Kind(3e-4), Kind(3e-4)), tmp_path)
    assert (outcome.status, outcome.gain) == ("better", 1.0)
    assert "the heuristics' first, engine 0 (1=0), is thrown out" in outcome.detail
    assert "(1 engine against 2 engines)" in reasons(outcome)[0]
    assert len(store) == 1
    split, store = tuned(Device(Kind(1e-4, "far"), Kind(3e-4)), tmp_path / "other")
    assert (split.status, split.detail, set(reasons(split))) == ("failed", "no engine can be trusted", {0, 1})
    assert len(store) == 0
    none, _ = tuned(Device(Kind(1e-4, "nan"), Kind(1e-4, "fails")), tmp_path / "none")
    assert (none.status, set(reasons(none))) == ("failed", {0, 1})
    alone, store = tuned(Device(Kind(1e-4)), tmp_path / "alone")
    assert (alone.status, len(store)) == ("own", 1)
    assert "no other engine computes it" in alone.detail
    parties: Parties[str] = Parties(bound(CALL, 3, STRICT))
    assert (parties.majority(), parties.others()) == ([], [])


def test_turns_are_interleaved_and_noise_does_not_win(tmp_path: Path) -> None:
    device = Device(Kind(1e-3), Kind(0.98e-3), Kind(1.02e-3, noise=0.5))
    outcome, _ = tuned(device, tmp_path)
    assert (outcome.status, outcome.gain, outcome.tried) == ("own", 1.0, 3)
    turns = device.runs[3 * 2 + 3 :]  # two checked calls and a warm one each
    assert len(turns) >= 15
    assert all(sorted(turns[i : i + 3]) == [0, 1, 2] for i in range(0, len(turns), 3))
    assert {turns[i] for i in range(0, len(turns), 3)} == {0, 1, 2}, "each begins some rounds"


def test_other_bits_are_a_matter_of_the_settings(tmp_path: Path) -> None:
    device = Device(Kind(2e-3), Kind(1e-3, "random"), Kind(2e-3))
    call = Call("forward", SMALL.with_dtypes("float16", "float16", "float16"))
    assert tuned(Device(*device.kinds[:1], Kind(1e-3, "random")), tmp_path)[0].status == "own"
    free = replace(STRICT, deterministic=False)
    assert tuned(device, tmp_path / "free", call, free)[0].status == "better"


def test_the_budget_and_what_is_skipped(tmp_path: Path) -> None:
    """The heaviest call comes first and gets what it may; what is known, symbolic or refused costs nothing."""
    heavy, light = Call("forward", replace(SMALL, batch=8)), Call("forward", SMALL)
    symbolic = Call("forward", ConvProblem.from_descriptor("mb{n}ic4ih6oc4kh3"))
    refused = Call("forward", ConvProblem.from_descriptor("g7mb1ic7ih5oc7kh3"))
    device, store = Device(*[Kind(1.0)] * MOST, Kind(0.1)), EngineStore(tmp_path / "t.json")
    work = [(light, 1), (symbolic, 1), (heavy, 1), (refused, 100)]

    def told(budget: float) -> dict[str, str]:
        return {str(o.call): f"{o.status}: {o.detail}" for o in tune(work, device, STRICT, store, budget, device.clock)}

    assert set(told(0).values()) == {"skipped: the budget is spent", "skipped: an extent is known only at run time"}
    assert device.runs == []
    first = told(30)
    assert first[str(refused)] == "skipped: cuDNN is not fond of 7"
    assert first[str(heavy)].startswith("own: engine 0")
    assert 2 < len(set(device.runs)) < MOST, "as many as the share allows"
    assert first[str(light)] == "skipped: the budget is spent"
    assert told(300)[str(heavy)] == "skipped: tuned before"
    assert len(store) == 2
    assert len(set(device.runs)) == MOST
    small = Device(Kind(1.0), room=1 << 17)
    assert tuned(small, tmp_path / "small")[0].detail.startswith("no room for")


def test_what_an_engine_is_kept_for(tmp_path: Path) -> None:
    """Another call, epilogue, type, layout, device, cuDNN or setting finds nothing, and so do other versions."""
    _, store = tuned(Device(Kind(2e-3), Kind(1e-3), Kind(2e-3)), tmp_path)

    def found(
        call: Call = CALL, arch: str = "sm_90", version: int = 92400, device: str = "Abacus", **other: Any
    ) -> Any:
        return store.winner(call, arch, version, replace(STRICT, **other), device)

    assert found().gain == pytest.approx(2.0)
    assert found(cached=True) is not None, "says who may choose, not what engines may do"
    others = [
        found(replace(CALL, face="backward_data")),
        found(replace(CALL, epilogue=Epilogue(accumulate=True))),
        found(replace(CALL, problem=replace(SMALL, batch=3))),
        found(replace(CALL, problem=SMALL.with_dtypes("float16", "float16", "float16"))),
        found(replace(CALL, problem=SMALL.with_layouts("NHWC", "OHWI", "NHWC"))),
        found(arch="sm_80"),
        found(version=92500),
        found(device="Abacus II"),
        found(deterministic=False),
        found(tf32=True),
        found(transforms=True),
        found(workspace=1 << 20),
    ]
    assert others == [None] * len(others)
    assert store.devices(CALL, "sm_90", 92400, STRICT) == ["Abacus"]
    assert store.devices(CALL, "sm_9", 92400, STRICT) == []
    assert len(store.used) == 1
    text = (tmp_path / "t.json").read_text().replace("tvm-convgrad 0", "tvm-convgrad 99")
    (tmp_path / "t.json").write_text(text)
    assert EngineStore(tmp_path / "t.json").devices(CALL, "sm_90", 92400, STRICT) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine": "1"}, "engine is no int"),
        ({"knobs": [[1]]}, "knobs are no pairs"),
        ({"more": 1}, "not the fields"),
        ({"seconds": 0.0}, "not positive"),
        ({"notes": [1]}, "notes are no words"),
        ({"thrown_out": [{"engine": 1}]}, "not the fields engine, knobs, reason"),
    ],
)
def test_a_damaged_entry_is_never_trusted(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "t.json"
    tuned(Device(Kind(2e-3), Kind(1e-3, "nan")), tmp_path)
    content = json.loads(path.read_text())
    (entry,) = content["entries"].values()
    entry.update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(
        ArtifactError, match=rf"no engines of cuDNN that `convgrad tune` wrote.*{told}.*remove the file"
    ):
        EngineStore(path)
