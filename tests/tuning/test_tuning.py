# SPDX-License-Identifier: Apache-2.0
"""Candidates compute exactly, winners are kept whole and found again, and the plan takes them only when asked."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from relax_ops.lowering import choose as lowering_choice
from relax_ops.lowering import forced_forms
from tests.cli.command import Command
from tests.kernels.harness import compiled
from tvm_convgrad.errors import ArtifactError
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.candidates import candidates, refusal
from tvm_convgrad.kernels.target import Machine, machine_of
from tvm_convgrad.kernels.transforms import allow_transforms
from tvm_convgrad.kernels.tuned import plain_tilings, tilings_of, use_winners, with_plain_tilings, with_tilings
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.training.cpu import parse_target
from tvm_convgrad.tuning import search
from tvm_convgrad.tuning.store import Store, kernels_version
from tvm_convgrad.verification import numbers_of

PROBLEMS = (
    "mb2ic20ih13iw11oc40kh3kw3ph1pw1",
    "mb2ic24ih16oc20kh3sh2ph1_lay=NHWC:OHWI:NHWC",
    "g2mb2ic16ih12oc24kh1",
    "g8mb2ic8ih12oc8kh3ph1_lay=NHWC:OHWI:NHWC",
)
FACES = ("backward_weight", "backward_data", "forward")
PROBLEM = ConvProblem.from_descriptor(PROBLEMS[0])
TARGET = parse_target("native")


def this_machine() -> Machine:
    machine = machine_of(TARGET)
    assert machine is not None
    return machine


def other_cut(face: str = "backward_weight") -> plan.Choice:
    return list(candidates(PROBLEM, face, this_machine()))[1]


def keep(store: Store, face: str = "backward_weight") -> plan.Choice:
    """Put another cut than the plan's own into a store."""
    choice = other_cut(face)
    store.record(PROBLEM, face, this_machine(), choice, seconds=1.0, own_seconds=1.5, candidates=3)
    return choice


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command on one thread."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    monkeypatch.setattr("tvm_convgrad.threads.use_threads", lambda _wanted: 1)
    return Command(monkeypatch, capfd)


# ------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_candidates_compute_exactly(face: str, descriptor: str) -> None:
    """All of them, on operands of small integers and a result full of NaN."""
    problem, machine = ConvProblem.from_descriptor(descriptor), this_machine()
    operands, wanted = numbers_of(problem, face)
    tensors = [tvm.runtime.tensor(operand) for operand in operands]
    cuts = []
    for choice in list(candidates(problem, face, machine))[:6]:
        assert tilings_of(choice.detail) not in cuts
        cuts.append(tilings_of(choice.detail))
        function = plan.build(problem, face, machine, choice, "main")
        result = tvm.runtime.tensor(np.full_like(wanted, np.nan))
        compiled(function, TARGET)["main"](*tensors, result)
        np.testing.assert_array_equal(result.numpy(), wanted)
    assert cuts


def test_candidates_begin_with_the_plans_own() -> None:
    found = list(candidates(PROBLEM, "backward_weight", this_machine()))
    assert found[0] == plan.choose(PROBLEM, "backward_weight", this_machine())
    assert len(found) > 1
    assert {choice.kind for choice in found} == {found[0].kind}


def test_no_candidates_without_a_kernel() -> None:
    assert list(candidates(replace(PROBLEM, batch=0), "backward_weight", this_machine())) == []


# ------------------------------------------------------------------------------------------------- Winograd's transform

SQUARE = ConvProblem.from_descriptor("mb2ic32ih12oc32kh3ph1")
needs_masks = pytest.mark.skipif(not this_machine().has_masks, reason="Winograd's kernels need masked stores")


@needs_masks
@pytest.mark.parametrize("face", FACES)
def test_candidates_are_of_both_kernels_where_transforms_are_allowed(face: str) -> None:
    machine = this_machine()
    with allow_transforms():
        found = list(itertools.islice(candidates(SQUARE, face, machine), 6))
        assert found[0] == plan.choose(SQUARE, face, machine)
    assert len({choice.kind for choice in found[:2]}) == len({choice.kind for choice in found}) == 2
    assert len({(choice.kind, str(choice.detail)) for choice in found}) == 6
    operands, wanted = numbers_of(SQUARE, face)
    for choice in found[2:4]:
        result = tvm.runtime.tensor(np.full_like(wanted, np.nan))
        main = compiled(plan.build(SQUARE, face, machine, choice, "main"), TARGET)["main"]
        main(*(tvm.runtime.tensor(operand) for operand in operands), result)
        np.testing.assert_array_equal(result.numpy(), wanted)
    assert len({choice.kind for choice in candidates(SQUARE, face, machine)}) == 1


@needs_masks
@pytest.mark.parametrize("kind", ["winograd wgrad", "implicit GEMM wgrad"])
def test_a_winner_of_two_kernels_is_for_builds_with_transforms(tmp_path: Path, kind: str) -> None:
    path, machine, face = tmp_path / "t.json", this_machine(), "backward_weight"
    store = Store(path, 1)
    with allow_transforms():
        every = candidates(SQUARE, face, machine)
        won = next(choice for choice in list(itertools.islice(every, 6))[2:] if choice.kind == kind)
        store.record(SQUARE, face, machine, won, seconds=1.0, own_seconds=1.5, candidates=6)
    own = plan.choose(SQUARE, face, machine)
    with use_winners(Store(path, 1)):
        assert plan.choose(SQUARE, face, machine) == own
        with allow_transforms():
            found = plan.choose(SQUARE, face, machine)
    assert (found.kind, found.detail) == (kind, won.detail)
    assert found.reason == "tuned: 1.50x the cost model's cut"
    assert "measured to be slower" in found.refused.values()


@needs_masks
def test_a_cut_that_winograd_cannot_have(tmp_path: Path) -> None:
    path, machine, face = tmp_path / "t.json", this_machine(), "forward"
    with allow_transforms():
        (_, made) = plan.kernels(SQUARE, face, machine)
        Store(path, 1).record(SQUARE, face, machine, made, seconds=1.0, own_seconds=1.5, candidates=6)
        content = json.loads(path.read_text())
        (entry,) = content["entries"].values()
        entry["tilings"][0]["rows"] = 77
        path.write_text(json.dumps(content))
        with use_winners(Store(path, 1)), pytest.raises(ArtifactError, match="cannot be cut as tile of 77 x"):
            plan.choose(SQUARE, face, machine)


# ------------------------------------------------------------------------------------------------- plain values


def test_tilings_survive_json() -> None:
    own, other = plan.choose(PROBLEM, "backward_weight", this_machine()), other_cut()
    plain = json.loads(json.dumps(plain_tilings(other)))
    again = with_plain_tilings(own, plain, "tuned")
    assert again.detail == other.detail != own.detail
    assert again.reason == "tuned"
    assert with_tilings(own.detail, tilings_of(other.detail)) == other.detail


@pytest.mark.parametrize(
    "change",
    [
        lambda tilings: tilings * 2,
        lambda tilings: [],
        lambda tilings: [{**tilings[0], "type": "OtherTiling"}],
        lambda tilings: [{**tilings[0], "rows": "7"}],
        lambda tilings: [{**tilings[0], "more": 1}],
        lambda tilings: [{name: value for name, value in tilings[0].items() if name != "rows"}],
    ],
)
def test_tilings_of_something_else(change: Any) -> None:
    own = plan.choose(PROBLEM, "backward_weight", this_machine())
    with pytest.raises(ValueError, match=r"tiling|field"):
        with_plain_tilings(own, change(plain_tilings(own)), "tuned")


# ------------------------------------------------------------------------------------------------- lookup order


def test_forced_then_tuned_then_cost_model(tmp_path: Path) -> None:
    store = Store(tmp_path / "t.json", 2)
    kept = keep(store)
    op, face = "conv2d_backward_weight", "backward_weight"
    with TARGET:
        own, _ = lowering_choice(op, face, PROBLEM)
        assert "tuned" not in own.reason
        with use_winners(store):
            tuned, _ = lowering_choice(op, face, PROBLEM)
            assert tuned.detail == kept.detail != own.detail
            assert tuned.reason.startswith("tuned: 1.50x")
            with forced_forms(backward_weight="composition"):
                assert lowering_choice(op, face, PROBLEM)[0].kind == plan.COMPOSITION
            with forced_forms(backward_weight="kernel"):
                assert lowering_choice(op, face, PROBLEM)[0] == tuned
            other = replace(PROBLEM, batch=3)
            assert "tuned" not in lowering_choice(op, face, other)[0].reason
        assert lowering_choice(op, face, PROBLEM)[0] == own
    assert len(store.used) == 1


@pytest.mark.parametrize("what", ["threads", "machine", "version", "face"])
def test_winners_of_others_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = tmp_path / "t.json"
    keep(Store(path, 2))
    machine, threads, face = this_machine(), 2, "backward_weight"
    assert Store(path, threads).entry(PROBLEM, face, machine) is not None
    if what == "threads":
        threads = 3
    elif what == "machine":
        machine = replace(machine, l2_bytes=machine.l2_bytes + 1)
    elif what == "version":
        monkeypatch.setattr("tvm_convgrad.tuning.store.kernels_version", lambda: kernels_version() + "x")
    else:
        face = "forward"
    assert Store(path, threads).entry(PROBLEM, face, machine) is None


# ------------------------------------------------------------------------------------------------- the file


def test_entries_of_other_processes_stay(tmp_path: Path) -> None:
    """Both stores are opened before either writes."""
    path = tmp_path / "folder" / "t.json"
    first, second = Store(path, 1), Store(path, 2)
    keep(first)
    keep(second)
    assert len(Store(path, 1)) == 2


def test_many_writers(tmp_path: Path) -> None:
    """Processes that write at the same time lose nothing."""
    path = tmp_path / "t.json"
    program = (
        "import sys; from pathlib import Path; from tests.tuning.test_tuning import keep; "
        "from tvm_convgrad.tuning.store import Store\n"
        "for i in range(5): keep(Store(Path(sys.argv[1]), int(sys.argv[2]) * 10 + i))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), str(n)]) for n in (1, 2)]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    assert len(Store(path, 1)) == 10


@pytest.mark.parametrize("place", ["os.fsync", "pathlib.Path.replace"])
def test_killed_while_writing(tmp_path: Path, place: str) -> None:
    """The file of before is there, whole, and its lock does not stay."""
    path = tmp_path / "t.json"
    keep(Store(path, 1))
    before = path.read_bytes()
    program = (
        "import os, pathlib, signal, sys; from tests.tuning.test_tuning import keep; "
        "from tvm_convgrad.tuning.store import Store; store = Store(pathlib.Path(sys.argv[1]), 2)\n"
        f"{place} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nkeep(store)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    keep(Store(path, 3))
    assert len(Store(path, 1)) == 2


def damaged_files() -> Iterator[tuple[str, str]]:
    yield "empty", ""
    yield "cut", '{"format": 1, "entries": {"a": '
    yield "list", "[]"
    yield "format", '{"format": 99, "entries": {}}'
    yield "no entries", '{"format": 1}'
    good = {"kind": "k", "tilings": [{}], "seconds": 1.0, "own_seconds": 1.0, "candidates": 1}
    for name, change in {
        "field": {"more": 1},
        "type": {"seconds": "1"},
        "zero": {"seconds": 0.0},
        "tilings": {"tilings": [1]},
    }.items():
        yield name, json.dumps({"format": 1, "entries": {"key": good | change}})


@pytest.mark.parametrize("text", [text for _, text in damaged_files()], ids=[name for name, _ in damaged_files()])
def test_damaged_file_is_one_sentence(convgrad: Command, tmp_path: Path, tiny_model: str, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    build = ["build", tiny_model, "-o", tmp_path / "step.so", "--store", path]
    convgrad(*build).assert_sentence(str(path), "remove the file", "--no-tuned")
    convgrad("tune", "--problem", PROBLEMS[0], "--store", path).assert_sentence(str(path))
    assert path.read_text() == text


def test_an_entry_of_another_kernel(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    keep(Store(path, 1))
    content = json.loads(path.read_text())
    (entry,) = content["entries"].values()
    entry["kind"] = "another"
    path.write_text(json.dumps(content))
    with use_winners(Store(path, 1)), pytest.raises(ArtifactError, match="another"):
        plan.choose(PROBLEM, "backward_weight", this_machine())


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("orientation", "sideways", "sideways"), ("lines", 5, "do not divide"), ("rows", 31, "do not fit")],
)
def test_a_cut_that_cannot_be_built(tmp_path: Path, field: str, value: Any, reason: str) -> None:
    path = tmp_path / "t.json"
    keep(Store(path, 1), "forward")
    content = json.loads(path.read_text())
    (entry,) = content["entries"].values()
    entry["tilings"][0][field] = value
    path.write_text(json.dumps(content))
    with use_winners(Store(path, 1)), pytest.raises(ArtifactError, match=reason):
        plan.choose(PROBLEM, "forward", this_machine())


def test_other_cuts_are_valid_and_differ() -> None:
    """Those of a strided dgrad, whose phases are several groups."""
    machine = this_machine()
    problem = ConvProblem.from_descriptor("mb2ic20ih13oc40kh3sh2ph1")
    found = list(candidates(problem, "backward_data", machine))
    assert len(found) > 10
    cuts = [tuple(tilings_of(choice.detail)) for choice in found]
    assert len(set(cuts)) == len(cuts)
    assert all(refusal(problem, "backward_data", choice, machine) == "" and choice.estimate > 0 for choice in found)


# ------------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of candidates for each problem: what is kept of them is tested, not how many there are."""
    for name in ("gather_plan", "weight_plan"):
        monkeypatch.setattr(f"tvm_convgrad.kernels.{name}.MOST_CUTS", 3)


@pytest.mark.usefixtures("few_cuts")
def test_tune_then_build(convgrad: Command, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is made to win over the one before, so that the last one is kept, whatever the clock says."""
    monkeypatch.setattr(search, "_gain", lambda _reference, _call: 2.0)
    path, step = tmp_path / "t.json", tmp_path / "step.so"
    tune = ["tune", tiny_model, "--budget", "1h", "--store", path, "--json"]
    report = convgrad(*tune).json
    assert report["store"] == str(path)
    better = [outcome for outcome in report["outcomes"] if outcome["status"] == "better"]
    assert better
    assert all(outcome["gain"] == 2.0 and outcome["tried"] > 1 for outcome in better)
    again = convgrad(*tune).json["outcomes"]
    assert all(outcome["status"] == "skipped" for outcome in again if outcome["detail"] == "tuned before")
    assert len([outcome for outcome in again if outcome["detail"] == "tuned before"]) >= len(better)
    build = ["build", tiny_model, "-o", step, "--target", "native", "--store", path]
    assert convgrad(*build, "--json").json["tuned"] >= len(better)
    rows = convgrad("explain", step, "--json").json
    reasons = [row["reason"] for row in rows["gradients"] + rows["forward"]]
    assert any(reason.startswith("tuned: 2.00x") for reason in reasons)
    assert "tuned: 2.00x" in " ".join(
        convgrad("explain", tiny_model, "--target", "native", "--store", path).out.split()
    )
    assert convgrad(*build, "--no-tuned", "--json").json["tuned"] == 0
    assert "tuned" not in json.dumps(convgrad("explain", step, "--json").json)


@pytest.mark.usefixtures("few_cuts")
def test_the_environment_names_the_store(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_gain", lambda _reference, _call: 1.0)
    monkeypatch.setenv("CONVGRAD_TUNINGS", str(tmp_path / "mine.json"))
    arguments = ["tune", "--problem", "mb1ic8ih6oc16kh1", "--face", "backward_weight", "--budget", "5m", "--json"]
    report = convgrad(*arguments).json
    assert report["counts"] == {"own": 1}
    assert report["store"] == str(tmp_path / "mine.json")


@needs_masks
def test_tuned_with_transforms(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate that is not the plan's is made to win, so that it is the other kernel's own cut."""
    monkeypatch.setattr(search, "_gain", lambda _reference, _call: 2.0)
    with allow_transforms():
        own = plan.choose(SQUARE, "forward", this_machine())
        (other,) = (each for each in plan.kernels(SQUARE, "forward", this_machine()) if each.kind != own.kind)
    arguments = ["tune", "--problem", SQUARE.descriptor, "--face", "forward", "--budget", "0.01s", "--transforms"]
    (outcome,) = convgrad(*arguments, "--store", tmp_path / "t.json", "--json").json["outcomes"]
    assert (outcome["status"], outcome["tried"]) == ("better", 2)
    ((key, entry),) = json.loads((tmp_path / "t.json").read_text())["entries"].items()
    assert entry["kind"] == other.kind
    assert key.endswith(" or winograd forward")
    done = convgrad(*arguments, "--offload", "onednn")
    assert done.code == 2
    assert "--transforms is about generated kernels" in done.err


def test_budget_and_refusals(convgrad: Command, tmp_path: Path) -> None:
    arguments = ["tune", "--problem", PROBLEMS[0], "--problem", "mb{n}ic4ih6oc8kh3", "--store", tmp_path / "t.json"]
    outcomes = convgrad(*arguments, "--budget", "0s", "--json").json["outcomes"]
    assert {(outcome["status"], outcome["detail"]) for outcome in outcomes} == {
        ("skipped", "the budget is spent"),
        ("skipped", "an extent is known only at run time"),
    }
    assert not (tmp_path / "t.json").exists()


def test_wrong_candidates_are_a_defect(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed or kept before it has computed exactly."""
    monkeypatch.setattr(
        search, "numbers_of", lambda problem, face: (numbers_of(problem, face)[0], wrong(problem, face))
    )
    monkeypatch.setattr(search, "_turn", lambda _call: pytest.fail("timed"))

    def wrong(problem: ConvProblem, face: str) -> Any:
        return numbers_of(problem, face)[1] + 1

    done = convgrad("tune", "--problem", PROBLEMS[0], "--store", tmp_path / "t.json")
    done.assert_sentence("defect of the kernel")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x.onnx", "--suite", "vgg16"],
        ["--problem", PROBLEMS[0], "--budget", "soon"],
        ["--problem", PROBLEMS[0], "--face", "sideways"],
        ["--suite", "vgg17"],
        ["--suite", "vgg16", "--batch", "dynamic"],
    ],
)
def test_wrong_usage(convgrad: Command, arguments: list[str], tmp_path: Path) -> None:
    assert convgrad("tune", *arguments, "--store", tmp_path / "t.json").code == 2
