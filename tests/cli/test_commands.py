# SPDX-License-Identifier: Apache-2.0
"""Each command does its work, and its JSON says the same as its table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_convgrad
from relax_ops import rules as operators
from tests.cli.command import MAIN, Command
from tvm_convgrad import cli
from tvm_convgrad.threads import available_cores
from tvm_convgrad.training.runtime.session import Session


def test_build_run_explain(convgrad: Command, tiny_model: str, tiny_data: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    build = ["build", tiny_model, "-o", step, "--lr", 0.05, "--optimizer", "adam", "--seed", 3]
    report = convgrad(*build, "--json").json
    assert report["bytes"] == step.stat().st_size
    assert report["options"]["lr"] == 0.05
    assert report["options"]["optimizer"] == "adam"
    table = convgrad(*build)
    assert table.code == 0
    assert str(step) in table.out.replace("\n", "")

    picture, state = tmp_path / "loss.png", tmp_path / "state.npz"
    arguments = ["run", step, "--data", tiny_data, "--epochs", 30, "--plot", picture, "--save-state", state]
    result = convgrad(*arguments, "--json").json
    assert result["steps"] == len(result["losses"]) == 30 * 6
    assert result["test_samples"] == 21
    assert result["test_accuracy"] > 0.9
    assert picture.read_bytes().startswith(b"\x89PNG")
    with np.load(state) as arrays:
        assert {"w", "out", "mean", "var"} <= set(arrays.files)
    shown = convgrad(*arguments)
    assert shown.code == 0
    assert f"{result['test_accuracy']:.4f}" in shown.out
    assert len(re.findall(r"^epoch \d+/30: mean loss", shown.err, re.MULTILINE)) == 30

    from_step = convgrad("explain", step, "--json").json["gradients"]
    from_model = convgrad("explain", tiny_model, "--json").json["gradients"]
    assert from_step == from_model
    assert [row["share"] for row in from_step] == [1.0]
    assert from_step[0]["descriptor"] in convgrad("explain", step).out


def test_accumulate(convgrad: Command, tiny_model: str, tiny_data: Path, tmp_path: Path) -> None:
    """A step takes two micro-batches, `run` feeds them, and a run that is resumed repeats the same losses."""
    step = tmp_path / "step.so"
    report = convgrad("build", tiny_model, "-o", step, "--accumulate", 2, "--momentum", 0.9, "--json").json
    assert report["options"]["accumulate"] == 2
    assert Session(step).batch == 16
    run = ["run", step, "--data", tiny_data, "--json"]
    whole = convgrad(*run, "--epochs", 4).json
    assert whole["steps"] == 4 * (53 // 16)
    assert whole["test_samples"] == 21
    checkpointed = [*run, "--checkpoint-dir", tmp_path / "checkpoints"]
    assert convgrad(*checkpointed, "--epochs", 2).code == 0
    assert convgrad(*checkpointed, "--epochs", 4, "--resume").json["losses"] == whole["losses"]
    rows = convgrad("explain", step, "--json").json["gradients"]
    assert [row["fused"] for row in rows] == [[], ["accumulate"]]


def test_explain_tells_what_the_build_recorded(convgrad: Command, tiny_model: str, tiny_dynamic_step: Path) -> None:
    report = convgrad("explain", tiny_model, "--json").json
    assert [row["op"] for row in report["forward"]] == ["conv2d"]
    for row in (*report["gradients"], *report["forward"]):
        assert row["kernel"].endswith(("wgrad", "forward"))
        assert row["reason"]
        assert row["plan"].startswith("tile of ")
    riscv = '{"kind": "llvm", "mtriple": "riscv64-linux-gnu", "mcpu": "generic-rv64"}'
    (row,) = convgrad("explain", tiny_model, "--json", "--target", riscv).json["gradients"]
    assert row["kernel"] == "composition:swapped"
    assert "not a CPU that kernels are made for" in row["reason"]
    assert [other["kernel"] for other in row["refused"]] == ["onednn", "composition:tiled"]
    (row,) = convgrad("explain", tiny_dynamic_step, "--json").json["forward"]
    assert row["kernel"] == "implicit GEMM forward"


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--nesterov", "--momentum", 0.9], "nesterov", True),
        (["--optimizer", "adamw", "--betas", 0.8, 0.9], "betas", [0.8, 0.9]),
        (["--dtype", "float16", "--loss-scale", 256], "loss_scale", 256.0),
        (["--dtype", "float16", "--loss-scale", "dynamic"], "loss_scale", "dynamic"),
        (["--dtype", "bfloat16", "--results", "operands"], "results", "operands"),
        (["--bn", "frozen"], "bn", "frozen"),
        (["--dropout", "off"], "dropout", "off"),
    ],
)
def test_build_options_reach_the_step(
    convgrad: Command, tiny_model: str, tmp_path: Path, arguments: list[Any], name: str, value: Any
) -> None:
    report = convgrad("build", tiny_model, "-o", tmp_path / "step.so", *arguments, "--json").json
    assert report["options"][name] == value


def test_equal_runs_have_equal_losses(convgrad: Command, tiny_step: Path, tiny_data: Path) -> None:
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 3, "--json"]
    first, second, other = (convgrad(*arguments, "--seed", seed).json["losses"] for seed in (0, 0, 1))
    assert first == second
    assert first != other


def test_losses_do_not_depend_on_threads(tiny_step: Path, tiny_data: Path) -> None:
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 2, "--json"]
    results = []
    cores = len(os.sched_getaffinity(0))
    for threads in (1, cores):
        command = [sys.executable, "-c", MAIN, *map(str, [*arguments, "--threads", threads])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert [result["threads"] for result in results] == [1, cores]
    assert results[0]["losses"] == results[1]["losses"]


SESSION = """
import sys
from tvm_convgrad.training import Session
print(Session(sys.argv[1]).threads)
print(Session(sys.argv[1], threads=int(sys.argv[2])).threads)
"""


@pytest.mark.parametrize(("ranks", "stated"), [(None, None), (1, None), (10**6, None), (None, 1)])
def test_a_session_takes_its_share_of_the_cores(tiny_step: Path, ranks: int | None, stated: int | None) -> None:
    """Not half of them, as TVM does; a second session has the pool of the first, and cannot ask for another number."""
    cores = available_cores()
    want = stated or (cores if ranks in (None, 1) else 1)
    environment = {name: value for name, value in os.environ.items() if name != "TVM_NUM_THREADS"}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks)} if ranks else {}
    environment |= {"TVM_NUM_THREADS": str(stated)} if stated else {}
    command = [sys.executable, "-c", SESSION, str(tiny_step), str(want + 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == f"{want}\n"
    reasons = (f"TVM's pool has {want}", f"this process may use {want} CPUs")
    assert any(f"SetupError: {want + 1} threads: {reason}" in done.stderr for reason in reasons)


def test_dynamic_batch(convgrad: Command, tiny_model: str, tiny_data: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    report = convgrad("build", tiny_model, "-o", step, "--batch", "dynamic", "--json").json
    assert report["gradients"][0]["per"] == "sample"
    for size, steps in ((16, 3), (53, 1)):
        result = convgrad("run", step, "--data", tiny_data, "--epochs", 1, "--batch-size", size, "--json").json
        assert result["steps"] == steps


def test_other_batch(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    convgrad("build", tiny_model, "-o", step, "--batch", 3)
    assert Session(step).batch == 3


def test_checkpoints_need_resume(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path) -> None:
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 2, "--checkpoint-dir", tmp_path]
    assert convgrad(*arguments).code == 0
    convgrad(*arguments).assert_sentence("add --resume")
    assert convgrad(*arguments, "--resume", "--json").json["resumed_after"] == 12


@pytest.mark.parametrize("change", [["--seed", "9"], ["--data", "other"], ["STEP", "dynamic"]])
def test_resume_with_something_else(
    convgrad: Command,
    tiny_step: Path,
    tiny_dynamic_step: Path,
    tiny_data: Path,
    tmp_path: Path,
    change: list[str],
) -> None:
    folder, other = tmp_path / "ckpt", tmp_path / "other.npz"
    with np.load(tiny_data) as arrays:
        np.savez(other, **{**arrays, "x_train": arrays["x_train"] * 2})
    assert convgrad("run", tiny_step, "--data", tiny_data, "--epochs", 1, "--checkpoint-dir", folder).code == 0
    step = tiny_dynamic_step if change[0] == "STEP" else tiny_step
    data = other if change[0] == "--data" else tiny_data
    rest = change if change[0] == "--seed" else []
    convgrad("run", step, "--data", data, "--epochs", 2, "--checkpoint-dir", folder, "--resume", *rest).assert_sentence(
        "differs from that of the checkpoint"
    )


def test_damaged_checkpoint_is_passed_over(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path) -> None:
    arguments = ["run", tiny_step, "--data", tiny_data, "--epochs", 3, "--json"]
    whole = convgrad(*arguments).json["losses"]
    checkpointed = [*arguments, "--checkpoint-dir", tmp_path]
    convgrad(*checkpointed)
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    again = convgrad(*checkpointed, "--resume")
    assert again.json["losses"] == whole
    assert again.json["resumed_after"] == 12
    assert "passed over" in again.err.replace("\n", " ")


def test_explain_models_with_options(convgrad: Command, tiny_model: str) -> None:
    for layout, kernel in (("NHWC", "OIHW"), ("NHWC:OHWI", "OHWI")):
        (row,) = convgrad("explain", tiny_model, "--layout", layout, "--batch", 2, "--json").json["gradients"]
        assert row["descriptor"] == f"mb2ic1ih6oc4oh3kh3sh2ph1_lay=NHWC:{kernel}:NHWC"


def test_verify(convgrad: Command) -> None:
    report = convgrad("verify", "--problem", "g2mb2ic4ih5oc2kh3sh2ph1", "--direction", "wgrad", "--json").json
    assert report["counts"] == {"right": len(report["verdicts"])}
    assert {verdict["impl"] for verdict in report["verdicts"]} >= {"auto", "composition:swapped", "composition:tiled"}
    one = convgrad("verify", "--problem", "mb1ic2ih4oc2kh3", "--direction", "dgrad", "--impl", "composition:dilated")
    assert one.code == 0
    assert "1 right" in one.out


def test_earlier_names_of_options_work(convgrad: Command) -> None:
    """Each with a note that names the option of today; help lists that one only."""
    new = convgrad("verify", "--problem", "mb1ic2ih4oc2kh3", "--direction", "wgrad", "--json")
    for option in (["--op", "wgrad"], ["--op=wgrad"], ["--op", "backward_weight"]):
        old = convgrad("verify", "--problem", "mb1ic2ih4oc2kh3", *option, "--json")
        assert old.json == new.json
        assert old.err == "convgrad: note: --op is called --direction now.\n"
    assert new.err == ""
    for command, names in cli.OLD_OPTIONS.items():
        shown = convgrad(command, "--help").out
        for old_name, name in names.items():
            assert name in shown
            assert f"{old_name} " not in shown
            done = convgrad(command, old_name, "sideways", "--problem", "mb1ic2ih4oc2kh3")
            assert f"{old_name} is called {name} now" in done.err
            assert done.code == 2
            assert "use forward, wgrad, dgrad, or all" in " ".join(done.err.replace("│", " ").split())
    assert "No such option" in convgrad("build", "m.onnx", "-o", "s.so", "--face", "forward").err


def test_verify_fuzz_repeats(convgrad: Command) -> None:
    first, second = (
        convgrad("verify", "--fuzz", 3, "--seed", 11, "--direction", "dgrad", "--json").json for _ in range(2)
    )
    assert first == second
    assert len({verdict["descriptor"] for verdict in first["verdicts"]}) == 3


def test_verify_finds_what_is_wrong(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_convgrad import evaluate  # noqa: F401  (the module is replaced by name below)

    monkeypatch.setattr(
        "tvm_convgrad.core.exact.REFERENCE",
        {"backward_weight": lambda problem, grad, data: np.full(problem.weight_shape, 77.0)},
    )
    done = convgrad("verify", "--problem", "mb1ic1ih3oc1kh3", "--direction", "wgrad")
    assert done.code == 1
    assert "9 of 9 elements differ" in " ".join(done.out.split())
    assert "comparisons with float64 failed" in done.err


def test_env(convgrad: Command) -> None:
    report = convgrad("env", "--json").json
    assert report["tvm-convgrad"] == tvm_convgrad.__version__
    assert report["extras"]["onnx"] is True
    assert report["cores"] >= 1
    assert report["apache-tvm"] in convgrad("env").out


def test_env_lists_rules_for_operators_that_this_tvm_lacks(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convgrad("env", "--json").json["gradient rules left out"] == operators.missing_operators()
    rules = {**operators.operator_rules(), "relax.of_tomorrow": None}
    monkeypatch.setattr(operators, "operator_rules", lambda: rules)
    assert "relax.of_tomorrow" in convgrad("env", "--json").json["gradient rules left out"]
    assert "relax.of_tomorrow" in convgrad("env").out


def test_version_and_help(convgrad: Command) -> None:
    assert convgrad("--version").out.strip() == tvm_convgrad.__version__
    shown = convgrad("--help").out
    assert all(name in shown for name in ("build", "run", "explain", "verify", "env"))


def test_help_is_light() -> None:
    program = f"{MAIN.replace('main()', '')}\nimport atexit, json\n" + (
        "heavy = ('tvm', 'tvm_ffi', 'torch', 'onnx', 'matplotlib', 'numpy')\n"
        "atexit.register(lambda: print(json.dumps([name for name in heavy if name in sys.modules])))\nmain()\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5
    assert json.loads(done.stdout.splitlines()[-1]) == []
