# SPDX-License-Identifier: Apache-2.0
"""Tuning of cuDNN's engines on a device of numpy: what is thrown out and why, who wins, what is kept, the budget."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from relax_ops.program import directions_module
from tests.cli.command import Command
from tests.offload.cudnn_device import BREAKS, FLAWS, Device, Kind
from tests.relax.net import Net, module_of
from tvm_convgrad import partition
from tvm_convgrad.commands.tune_engines import calls_of_plan, calls_of_work
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import ArtifactError, SetupError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.cudnn.agreement import Agreement, bound
from tvm_convgrad.offload.cudnn.backend import CuDnn
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.offload.cudnn.gpu import TensorMemory
from tvm_convgrad.offload.cudnn.settings import VARIABLE, Settings
from tvm_convgrad.offload.cudnn.store import EngineStore, use_engines
from tvm_convgrad.offload.cudnn.tuner import MOST, Outcome, tune
from tvm_convgrad.offload.cudnn.tuning_device import EngineError
from tvm_convgrad.offload.partition import offload
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.tuning.search import Work

SUM = Epilogue(accumulate=True)
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


@pytest.mark.parametrize(("direction", "descriptor", "epilogue"), EVERY)
def test_every_flaw_is_found(tmp_path: Path, direction: str, descriptor: str, epilogue: Epilogue) -> None:
    """The fastest engines are wrong, each in its way; each is named with its reason; the best right one wins."""
    flawed = [Kind(1e-4, flaw, workspace=96) for flaw in FLAWS[1:]]
    right = [Kind(4e-4), Kind(2e-4, workspace=100), Kind(3e-4)]
    device = Device(right[0], *flawed, *right[1:], Kind(1e-5, refusal="not deterministic"))
    call = Call(direction, ConvProblem.from_descriptor(descriptor), epilogue)
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
        for descriptor in ("mb2ic8ih9oc8kh3ph1", "mb8ic16ih28oc16kh3ph1"):
            for direction in ("forward", "backward_weight"):
                call = Call(direction, ConvProblem.from_descriptor(descriptor).with_dtypes(dtype, dtype, dtype))
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


def test_an_engine_that_breaks_the_gpu_is_left_out_the_next_time(tmp_path: Path) -> None:
    """Its process ends with the error; the next one tunes that call without it, under whatever settings."""
    device = Device(Kind(2e-4), Kind(1e-4, BREAKS), Kind(1e-4))
    with pytest.raises(SetupError, match="come apart"):
        tuned(device, tmp_path)
    outcome, store = tuned(device, tmp_path)
    assert reasons(outcome) == {1: "broke the GPU for its process when it was tuned before"}
    assert (outcome.status, outcome.tried) == ("better", 2)
    winner = store.winner(CALL, "sm_90", 92400, STRICT, "Abacus")
    assert winner is not None
    assert {index for index, _ in winner.thrown_out} == {1}
    assert store.devices(CALL, "sm_90", 92400, STRICT) == ["Abacus"]
    assert store.broke(CALL, "sm_90", 92400) == {(1, ((1, 1),))}
    assert not store.broke(CALL, "sm_80", 92400)
    path = next(tmp_path.glob("*.json"))
    content = json.loads(path.read_text())
    (entry,) = [entry for entry in content["entries"].values() if "broke" in entry]
    entry["broke"] = [{"engine": "1", "knobs": []}]
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="engine is not of type int"):
        EngineStore(path)


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
    parties: Agreement[str] = Agreement(bound(CALL, 3, STRICT))
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
        found(replace(CALL, direction="backward_data")),
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
    text = (tmp_path / "t.json").read_text().replace("tvm-convgrad 0", "tvm-convgrad 99")
    (tmp_path / "t.json").write_text(text)
    assert EngineStore(tmp_path / "t.json").devices(CALL, "sm_90", 92400, STRICT) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine": "1"}, "engine is not of type int"),
        ({"knobs": [[1]]}, "knobs are not pairs"),
        ({"more": 1}, "not the fields"),
        ({"seconds": 0.0}, "not positive"),
        ({"notes": [1]}, "notes are not strings"),
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


# ------------------------------------------------------------------------------------------------- programs


TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
CONV = ConvProblem.from_descriptor("mb2ic16ih9oc32kh3ph1")
CALL_OF_CONV = Call("backward_weight", CONV)


def keep(path: Path, number: int, device: str = "Abacus", **change: Any) -> tuple[EngineStore, Listed]:
    """Put one of cuDNN's own engines into a store, as the tuned one; its first is thrown out."""
    cudnn, call = CuDnn(), CALL_OF_CONV
    listed = cudnn.engines(call.direction, CONV, NO_EPILOGUE, "sm_90", 4)
    engine = replace([each for each in listed if not each.refusal][number], **change)
    bench = Device(name=device)
    bench.version = cudnn.number()
    thrown = [(next(each for each in listed if not each.refusal), "leaves NaN")] if number else []
    EngineStore(path).record(call, bench, STRICT, engine, thrown, seconds=1e-3, own_seconds=1.5e-3, candidates=4)
    return EngineStore(path), engine


@pytest.mark.cuda
def test_calls_take_the_tuned_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number and knobs are a program's first; what was thrown out is in none; without tuning all is as it was."""
    direction, cudnn = "backward_weight", CuDnn()
    plain = cudnn.numbers(direction, CONV, NO_EPILOGUE, TARGET)
    store, engine = keep(tmp_path / "t.json", 2)
    with use_engines(store):
        found = cudnn.engine(direction, CONV, NO_EPILOGUE, TARGET)
        assert isinstance(found, Engine)
        assert found.implementation == str(engine)
        assert found.detail.startswith("tuned: 1.50x the heuristics' first on Abacus; deterministic")
        numbers = cudnn.numbers(direction, CONV, NO_EPILOGUE, TARGET)
        others = [cudnn.numbers("forward", CONV, NO_EPILOGUE, TARGET), cudnn.numbers(direction, CONV, SUM, TARGET)]
        (lowered,) = offload(directions_module([("main", DIRECTIONS[direction], CONV)]), ["cudnn"], TARGET).lowered
        assert describe_convolutions([lowered])[0]["plan"].startswith("tuned: 1.50x")
        monkeypatch.setenv(VARIABLE, "tf32")
        assert "tuned" not in str(cudnn.engine(direction, CONV, NO_EPILOGUE, TARGET))
        monkeypatch.delenv(VARIABLE)
    knobs = [number for knob in engine.knobs for number in knob]
    at = numbers.index(90, 40)  # the SM, behind cuDNN's version
    assert numbers[at + 1 : at + 4 + len(knobs)] == [3, engine.index, len(engine.knobs), *knobs]
    assert plain == cudnn.numbers(direction, CONV, NO_EPILOGUE, TARGET)
    assert plain[at + 1] == 4
    assert others == [cudnn.numbers("forward", CONV, NO_EPILOGUE, TARGET), cudnn.numbers(direction, CONV, SUM, TARGET)]
    other = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
    with use_engines(store):
        assert "tuned" not in str(cudnn.engine(direction, CONV, NO_EPILOGUE, other))
        twice, _ = keep(tmp_path / "t.json", 1, "Slide rule")
    with use_engines(twice):
        said = str(cudnn.engine(direction, CONV, NO_EPILOGUE, TARGET))
        assert "tuned on Abacus and on Slide rule, of which none is here" in said
    wrong, _ = keep(tmp_path / "wrong.json", 1, index=9999)
    with use_engines(wrong):
        assert "the tuned engine 9999" in (said := str(cudnn.engine(direction, CONV, NO_EPILOGUE, TARGET)))
        assert "is refused: " in said
        assert cudnn.numbers(direction, CONV, NO_EPILOGUE, TARGET) == plain


@pytest.mark.cuda
def test_what_is_fused_is_tuned() -> None:
    def body(net: Net) -> list[Any]:
        return [net.emit(tvm.relax.op.nn.relu(net.biased(net.forward()))), net.wgrad()]

    done = offload(module_of(CONV, body)[0], ["cudnn"], TARGET)
    fused = Call("forward", CONV, Epilogue(bias=True, relu=True))
    assert sorted(calls_of_plan([*done.lowered, done.lowered[0]]), key=str) == [(CALL_OF_CONV, 1), (fused, 2)]
    assert [str(each.shape) for each in fused.operands] == ["(2, 16, 9, 9)", "(32, 16, 3, 3)", "(32,)"]
    assert calls_of_work([Work("forward", CONV, 3)]) == [(Call("forward", CONV), 3)]


@pytest.mark.cuda
def test_calls_do_not_take_an_engine_that_broke_a_gpu(tmp_path: Path) -> None:
    """Neither from the heuristics' list, nor as the winner of other settings."""
    store, engine = keep(tmp_path / "t.json", 1)
    cudnn, bench = CuDnn(), Device(name="Abacus")
    bench.version = cudnn.number()
    with use_engines(store):
        found = cudnn.engine("backward_weight", CONV, NO_EPILOGUE, TARGET)
    assert isinstance(found, Engine)
    assert "tuned: 1.50x" in found.detail
    store.record_broke(CALL_OF_CONV, bench, engine)
    with use_engines(EngineStore(tmp_path / "t.json")):
        found = cudnn.engine("backward_weight", CONV, NO_EPILOGUE, TARGET)
    assert isinstance(found, Engine)
    assert "tuned: " not in found.detail
    assert "broke the GPU when it was tuned with other settings" in found.detail
    assert f"engine {engine.index} " not in found.implementation


@pytest.mark.cuda
def test_cached_takes_tuned_engines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_TUNINGS", str(tmp_path / "t.json"))
    keep(tmp_path / "t.cudnn.json", 2)
    module = directions_module([("main", DIRECTIONS["backward_weight"], CONV)])
    other = directions_module([("main", DIRECTIONS["forward"], CONV)])
    partition(other, ["cudnn"], TARGET)
    monkeypatch.setenv(VARIABLE, "cached")
    partition(module, ["cudnn"], TARGET)
    for backends in (["cudnn"], ["auto"]):
        with pytest.raises(SetupError, match=rf"no engine is tuned for forward of {CONV.descriptor} on sm_90 .*tune"):
            offload(other, backends, TARGET)
    with use_engines(None):
        partition(other, ["cudnn"], TARGET)


@pytest.mark.cuda
def test_tune_build_explain(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands, with cuDNN's own engines for the GPU that the device of numpy says it is."""

    class Described(Device):
        def candidates(self, call: Call, most: int) -> Any:
            return tuple(CuDnn().engines(call.direction, call.problem, call.epilogue, "sm_90", 3))

        def plan(self, call: Call, engine: Listed) -> Any:
            usable = [each for each in self.candidates(call, 3) if not each.refusal]
            return super().plan(call, replace(engine, index=usable.index(engine)))

    bench = Described(Kind(3e-3, workspace=64), Kind(1e-3, "nan"), Kind(2e-3))
    bench.version = CuDnn().number()
    monkeypatch.setattr("tvm_convgrad.commands.tune_engines.device_for", lambda target: bench)
    monkeypatch.setattr("tvm_convgrad.offload.cudnn.tuner.TURN_SECONDS", 1e-3)
    convgrad, path = Command(monkeypatch, capfd), tmp_path / "t.json"
    gpu = ["--target", "cuda:sm_90", "--store", path]
    tune = ["tune", tiny_model, *gpu, "--cudnn", "--budget", "1s"]
    report = convgrad(*tune, "--json").json
    assert report["store"] == str(tmp_path / "t.cudnn.json")
    assert (report["counts"], report["device"]) == ({"better": 2}, "Abacus")
    assert {outcome["gain"] for outcome in report["outcomes"]} == {1.5}
    assert all("elements NaN" in outcome["thrown_out"][0]["reason"] for outcome in report["outcomes"])
    shown = convgrad(*tune).out
    assert "2 skipped; kept in" in shown
    found = convgrad("explain", tiny_model, *gpu, "--offload", "cudnn", "--json").json
    plans = [entry["plan"] for entry in found["gradients"] + found["forward"]]
    assert [plan.startswith("tuned: 1.50x the heuristics' first on Abacus") for plan in plans] == [True, True]
    kernels = {entry["kernel"].removeprefix("cudnn ") for entry in found["gradients"] + found["forward"]}
    assert all(any(outcome["detail"].startswith(kernel) for outcome in report["outcomes"]) for kernel in kernels)
    heuristics = convgrad("explain", tiny_model, *gpu, "--offload", "cudnn", "--no-tuned", "--json").json
    assert "tuned" not in json.dumps(heuristics)
    build = ["build", tiny_model, *gpu, "-o", tmp_path / "s.so", "--offload", "cudnn"]
    assert convgrad(*build, "--json").json["tuned"] == 2
    assert "tuned: 1.50x" in " ".join(convgrad("explain", tmp_path / "s.so", "--refused").out.split())
    monkeypatch.setenv(VARIABLE, "cached")
    assert convgrad(*build[:-2], "--offload", "cudnn", "--no-tuned").code == 2
    bench.kinds = (Kind(1e-3, "nan"),) * 3
    problem = ["--problem", "mb1ic4ih5oc4oh3kh3", "--direction", "forward"]
    failed = convgrad("tune", *problem, *gpu, "--cudnn", "--json")
    assert failed.code == 1
    assert "1 of 1 calls have no cuDNN engine that passed all checks; forward of mb1ic4ih5oc4oh3kh3: " in failed.err


@pytest.mark.cuda
def test_without_a_gpu_a_sentence(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU: make test-gpu")
    convgrad = Command(monkeypatch, capfd)
    tune = ["tune", "--problem", CONV.descriptor, "--cudnn"]
    convgrad(*tune, "--target", "cuda:sm_90").assert_sentence("GPU", "NVIDIA's driver")
    convgrad(*tune).assert_sentence("the target is llvm", "cuda:sm_90")
    assert convgrad(*tune, "--target", "cuda:sm_90", "--offload", "cudnn").code == 2
    cudnn = CuDnn()
    numbers = cudnn.numbers("forward", CONV, NO_EPILOGUE, TARGET)
    block = (ctypes.c_int64 * len(numbers))(*numbers)
    with pytest.raises(ValueError, match="cudnn: a handle cannot be made"):
        cudnn.function("prepare")(ctypes.c_void_p(ctypes.addressof(block)))
    with pytest.raises(ValueError, match="cudnn: a handle cannot be made"):
        cudnn.function("engines")(ctypes.c_void_p(ctypes.addressof(block)), "", 1)


def test_memory_is_a_tensor() -> None:
    """The GPU's memory, on a CPU: bytes go where they should, and views read them."""
    memory = TensorMemory(64, tvm.cpu())
    memory.write(np.arange(64, dtype=np.uint8), 0)
    memory.write(np.full(3, 255, np.uint8), 7)
    assert memory.read(6, 5).tolist() == [6, 255, 255, 255, 10]
    assert memory.read(0, 0).size == 0
    assert memory.view((2, 2), "uint16", 16).numpy().tolist() == [[4368, 4882], [5396, 5910]]
    with pytest.raises(EngineError, match=r"the device has no .* bytes left"):
        TensorMemory(1 << 60, tvm.cpu())
