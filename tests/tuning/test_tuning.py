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
from tvm_convgrad.codegen.hardware import Machine, machine_of
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.candidates import candidates
from tvm_convgrad.kernels.choice import COMPOSITION
from tvm_convgrad.kernels.transforms import allow_transforms
from tvm_convgrad.kernels.tuned import plain_tilings, use_winners, with_plain_tilings
from tvm_convgrad.kernels.version import kernels_version
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.tuning import search
from tvm_convgrad.tuning.store import Store

PROBLEMS = (
    "mb2ic20ih13iw11oc40kh3kw3ph1pw1",
    "mb2ic24ih16oc20kh3sh2ph1_lay=NHWC:OHWI:NHWC",
    "g2mb2ic16ih12oc24kh1",
    "g8mb2ic8ih12oc8kh3ph1_lay=NHWC:OHWI:NHWC",
)
DIRECTIONS = ("backward_weight", "backward_data", "forward")
PROBLEM = ConvProblem.from_descriptor(PROBLEMS[0])
TARGET = parse_target("native")


def this_machine() -> Machine:
    machine = machine_of(TARGET)
    assert machine is not None
    return machine


def other_tiling(direction: str = "backward_weight") -> chooser.Choice:
    return list(candidates(PROBLEM, direction, this_machine()))[1]


def keep(store: Store, direction: str = "backward_weight") -> chooser.Choice:
    """Put another tiling than the plan's own into a store."""
    choice = other_tiling(direction)
    store.record(PROBLEM, direction, this_machine(), choice, seconds=1.0, own_seconds=1.5, candidates=3)
    return choice


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command on one thread."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    monkeypatch.setattr("tvm_convgrad.threads.use_threads", lambda _wanted: 1)
    return Command(monkeypatch, capfd)


# ------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_candidates_compute_exactly(direction: str, descriptor: str) -> None:
    """All of them, on operands of small integers and a result full of NaN."""
    problem, machine = ConvProblem.from_descriptor(descriptor), this_machine()
    operands, wanted = numbers_of(problem, direction)
    tensors = [tvm.runtime.tensor(operand) for operand in operands]
    tilings = []
    for choice in list(candidates(problem, direction, machine))[:6]:
        assert choice.plan not in tilings
        tilings.append(choice.plan)
        function = chooser.build(problem, direction, machine, choice, "main")
        result = tvm.runtime.tensor(np.full_like(wanted, np.nan))
        compiled(function, TARGET)["main"](*tensors, result)
        np.testing.assert_array_equal(result.numpy(), wanted)
    assert tilings


def test_candidates_begin_with_the_plans_own() -> None:
    found = list(candidates(PROBLEM, "backward_weight", this_machine()))
    assert found[0] == chooser.choose(PROBLEM, "backward_weight", this_machine())
    assert len(found) > 1
    assert {choice.name for choice in found} == {found[0].name}


def test_no_candidates_without_a_kernel() -> None:
    assert list(candidates(replace(PROBLEM, batch=0), "backward_weight", this_machine())) == []


# ------------------------------------------------------------------------------------------------- Winograd's transform

SQUARE = ConvProblem.from_descriptor("mb2ic32ih12oc32kh3ph1")
needs_masks = pytest.mark.skipif(not this_machine().has_masks, reason="Winograd's kernels need masked stores")


@needs_masks
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_candidates_are_of_both_kernels_where_transforms_are_allowed(direction: str) -> None:
    machine = this_machine()
    with allow_transforms():
        found = list(itertools.islice(candidates(SQUARE, direction, machine), 6))
        assert found[0] == chooser.choose(SQUARE, direction, machine)
    assert len({choice.name for choice in found[:2]}) == len({choice.name for choice in found}) == 2
    assert len({(choice.name, choice.plan) for choice in found}) == 6
    operands, wanted = numbers_of(SQUARE, direction)
    for choice in found[2:4]:
        result = tvm.runtime.tensor(np.full_like(wanted, np.nan))
        main = compiled(chooser.build(SQUARE, direction, machine, choice, "main"), TARGET)["main"]
        main(*(tvm.runtime.tensor(operand) for operand in operands), result)
        np.testing.assert_array_equal(result.numpy(), wanted)
    assert len({choice.name for choice in candidates(SQUARE, direction, machine)}) == 1


@needs_masks
@pytest.mark.parametrize("kind", ["winograd wgrad", "implicit GEMM wgrad"])
def test_a_winner_of_two_kernels_is_for_builds_with_transforms(tmp_path: Path, kind: str) -> None:
    path, machine, direction = tmp_path / "t.json", this_machine(), "backward_weight"
    store = Store(path, 1)
    with allow_transforms():
        every = candidates(SQUARE, direction, machine)
        won = next(choice for choice in list(itertools.islice(every, 6))[2:] if choice.name == kind)
        store.record(SQUARE, direction, machine, won, seconds=1.0, own_seconds=1.5, candidates=6)
    own = chooser.choose(SQUARE, direction, machine)
    with use_winners(Store(path, 1)):
        assert chooser.choose(SQUARE, direction, machine) == own
        with allow_transforms():
            found = chooser.choose(SQUARE, direction, machine)
    assert (found.name, found.plan) == (kind, won.plan)
    assert found.reason == "tuned: 1.50x the cost model's plan"
    assert "measured to be slower" in found.refused.values()


@needs_masks
def test_a_cut_that_winograd_cannot_have(tmp_path: Path) -> None:
    path, machine, direction = tmp_path / "t.json", this_machine(), "forward"
    with allow_transforms():
        (_, made) = chooser.choices(SQUARE, direction, machine)
        Store(path, 1).record(SQUARE, direction, machine, made, seconds=1.0, own_seconds=1.5, candidates=6)
        content = json.loads(path.read_text())
        (entry,) = content["entries"].values()
        entry["tilings"][0]["tile_m"] = 77
        path.write_text(json.dumps(content))
        with use_winners(Store(path, 1)), pytest.raises(ArtifactError, match="tile of 77 x"):
            chooser.choose(SQUARE, direction, machine)


# ------------------------------------------------------------------------------------------------- plain values


def test_tilings_survive_json() -> None:
    own, other = chooser.choose(PROBLEM, "backward_weight", this_machine()), other_tiling()
    plain = json.loads(json.dumps(plain_tilings(other.plan)))
    assert with_plain_tilings(own.plan, plain) == other.plan != own.plan


def test_tunings_of_an_older_format_are_replaced(tmp_path: Path) -> None:
    """Their entries are of other versions of the kernels, and would not be looked up."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"format": 1, "entries": {"old": {"kind": "implicit GEMM wgrad"}}}))
    assert len(Store(path, 1)) == 0
    keep(Store(path, 1))
    assert len(Store(path, 1)) == 1
    assert "old" not in path.read_text()


@pytest.mark.parametrize(
    "change",
    [
        lambda tilings: tilings * 2,
        lambda tilings: [],
        lambda tilings: [{**tilings[0], "type": "OtherTiling"}],
        lambda tilings: [{**tilings[0], "tile_m": "7"}],
        lambda tilings: [{**tilings[0], "more": 1}],
        lambda tilings: [{name: value for name, value in tilings[0].items() if name != "tile_m"}],
    ],
)
def test_tilings_of_something_else(change: Any) -> None:
    own = chooser.choose(PROBLEM, "backward_weight", this_machine())
    with pytest.raises(ValueError, match=r"tiling|field"):
        with_plain_tilings(own.plan, change(plain_tilings(own.plan)))


# ------------------------------------------------------------------------------------------------- lookup order


def test_forced_then_tuned_then_cost_model(tmp_path: Path) -> None:
    store = Store(tmp_path / "t.json", 2)
    kept = keep(store)
    op, direction = "conv2d_backward_weight", "backward_weight"
    with TARGET:
        own, _ = lowering_choice(op, direction, PROBLEM)
        assert "tuned" not in own.reason
        with use_winners(store):
            tuned, _ = lowering_choice(op, direction, PROBLEM)
            assert tuned.plan == kept.plan != own.plan
            assert tuned.reason.startswith("tuned: 1.50x")
            with forced_forms(backward_weight="composition"):
                assert lowering_choice(op, direction, PROBLEM)[0].name == COMPOSITION
            with forced_forms(backward_weight="kernel"):
                assert lowering_choice(op, direction, PROBLEM)[0] == tuned
            other = replace(PROBLEM, batch=3)
            assert "tuned" not in lowering_choice(op, direction, other)[0].reason
        assert lowering_choice(op, direction, PROBLEM)[0] == own
    assert len(store.used) == 1


@pytest.mark.parametrize("what", ["threads", "machine", "version", "direction"])
def test_winners_of_others_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = tmp_path / "t.json"
    keep(Store(path, 2))
    machine, threads, direction = this_machine(), 2, "backward_weight"
    assert Store(path, threads).entry(PROBLEM, direction, machine) is not None
    if what == "threads":
        threads = 3
    elif what == "machine":
        machine = replace(machine, l2_bytes=machine.l2_bytes + 1)
    elif what == "version":
        monkeypatch.setattr("tvm_convgrad.tuning.store.kernels_version", lambda: kernels_version() + "x")
    else:
        direction = "forward"
    assert Store(path, threads).entry(PROBLEM, direction, machine) is None


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
    yield "cut", '{"format": 2, "entries": {"a": '
    yield "list", "[]"
    yield "format", '{"format": 99, "entries": {}}'
    yield "no entries", '{"format": 2}'
    good = {"kernel": "k", "tilings": [{}], "seconds": 1.0, "own_seconds": 1.0, "candidates": 1}
    for name, change in {
        "field": {"more": 1},
        "type": {"seconds": "1"},
        "zero": {"seconds": 0.0},
        "tilings": {"tilings": [1]},
    }.items():
        yield name, json.dumps({"format": 2, "entries": {"key": good | change}})


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
    entry["kernel"] = "another"
    path.write_text(json.dumps(content))
    with use_winners(Store(path, 1)), pytest.raises(ArtifactError, match="another"):
        chooser.choose(PROBLEM, "backward_weight", this_machine())


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("vector_axis", "sideways", "sideways"), ("block_h", 5, "must divide"), ("tile_m", 31, "do not fit")],
)
def test_a_cut_that_cannot_be_built(tmp_path: Path, field: str, value: Any, reason: str) -> None:
    path = tmp_path / "t.json"
    keep(Store(path, 1), "forward")
    content = json.loads(path.read_text())
    (entry,) = content["entries"].values()
    entry["tilings"][0][field] = value
    path.write_text(json.dumps(content))
    with use_winners(Store(path, 1)), pytest.raises(ArtifactError, match=reason):
        chooser.choose(PROBLEM, "forward", this_machine())


def test_other_tilings_are_valid_and_differ() -> None:
    """Those of a strided dgrad, whose phases are several groups."""
    machine = this_machine()
    problem = ConvProblem.from_descriptor("mb2ic20ih13oc40kh3sh2ph1")
    found = list(candidates(problem, "backward_data", machine))
    assert len(found) > 10
    plans = [choice.plan for choice in found]
    assert len(set(plans)) == len(plans)
    assert all(
        choice.kernel.invalid(problem, "backward_data", choice.plan, machine) == "" and choice.estimate > 0
        for choice in found
    )


# ------------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def few_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of candidates for each problem: what is kept of them is tested, not how many there are."""
    for name in ("gemm", "wgrad"):
        monkeypatch.setattr(f"tvm_convgrad.kernels.{name}.plan.MAX_CANDIDATES", 3)


@pytest.mark.usefixtures("few_tilings")
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
        convgrad("explain", tiny_model, "--refused", "--target", "native", "--store", path).out.split()
    )
    assert convgrad(*build, "--no-tuned", "--json").json["tuned"] == 0
    assert "tuned" not in json.dumps(convgrad("explain", step, "--json").json)


@pytest.mark.usefixtures("few_tilings")
def test_the_environment_names_the_store(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_gain", lambda _reference, _call: 1.0)
    monkeypatch.setenv("CONVGRAD_TUNINGS", str(tmp_path / "mine.json"))
    arguments = ["tune", "--problem", "mb1ic8ih6oc16kh1", "--direction", "backward_weight", "--budget", "5m", "--json"]
    report = convgrad(*arguments).json
    assert report["counts"] == {"own": 1}
    assert report["store"] == str(tmp_path / "mine.json")


@needs_masks
def test_tuned_with_transforms(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate that is not the plan's is made to win, so that it is the other kernel's own tiling."""
    monkeypatch.setattr(search, "_gain", lambda _reference, _call: 2.0)
    with allow_transforms():
        own = chooser.choose(SQUARE, "forward", this_machine())
        (other,) = (each for each in chooser.choices(SQUARE, "forward", this_machine()) if each.name != own.name)
    arguments = ["tune", "--problem", SQUARE.descriptor, "--direction", "forward", "--budget", "0.01s", "--transforms"]
    (outcome,) = convgrad(*arguments, "--store", tmp_path / "t.json", "--json").json["outcomes"]
    assert (outcome["status"], outcome["tried"]) == ("better", 2)
    ((key, entry),) = json.loads((tmp_path / "t.json").read_text())["entries"].items()
    assert entry["kernel"] == other.name
    assert key.endswith(" or winograd forward")
    done = convgrad(*arguments, "--offload", "onednn")
    assert done.code == 2
    assert "--transforms is for generated kernels" in done.err


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
        search, "numbers_of", lambda problem, direction: (numbers_of(problem, direction)[0], wrong(problem, direction))
    )
    monkeypatch.setattr(search, "_turn", lambda _call: pytest.fail("timed"))

    def wrong(problem: ConvProblem, direction: str) -> Any:
        return numbers_of(problem, direction)[1] + 1

    done = convgrad("tune", "--problem", PROBLEMS[0], "--store", tmp_path / "t.json")
    done.assert_sentence("defect of the kernel")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x.onnx", "--suite", "vgg16"],
        ["--problem", PROBLEMS[0], "--budget", "soon"],
        ["--problem", PROBLEMS[0], "--direction", "sideways"],
        ["--suite", "vgg17"],
        ["--suite", "vgg16", "--batch", "dynamic"],
    ],
)
def test_wrong_usage(convgrad: Command, arguments: list[str], tmp_path: Path) -> None:
    assert convgrad("tune", *arguments, "--store", tmp_path / "t.json").code == 2
