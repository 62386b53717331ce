# SPDX-License-Identifier: Apache-2.0
"""`convgrad run --distributed` in processes that torch.distributed connects."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import MAIN, Command, Done
from tests.cli.test_kill import wait_for
from tvm_convgrad.training import Session

pytest.importorskip("torch", reason="the ranks meet by torch.distributed")

SENTENCE_WITHIN = 30.0
"""Seconds in which a rank has to notice that another one has ended."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_ranks(
    arguments: Sequence[object],
    size: int,
    own: dict[int, Sequence[object]] | None = None,
    present: Sequence[int] | None = None,
) -> list[subprocess.Popen[str]]:
    """`convgrad run --distributed` on so many ranks; some may have arguments of their own, or be missing."""
    port = free_port()
    processes = []
    for rank in range(size) if present is None else present:
        place = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        given = (own or {}).get(rank, arguments)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", MAIN, "run", *map(str, given), "--distributed", "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {name: str(value) for name, value in place.items()},
            )
        )
    return processes


def finish_all(processes: Sequence[subprocess.Popen[str]], timeout: float = 300) -> list[Done]:
    done = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        done.append(Done(process.returncode, out, err))
    return done


def test_two_processes_train_as_one(convgrad: Command, full_step: Path, full_data: Path, tmp_path: Path) -> None:
    """By torchrun: losses bit for bit; only rank 0 prints, logs and writes; and the run goes on with one or three."""
    arguments = ["run", full_step, "--data", full_data, "--batch-size", 4, "--epochs", 4, "--schedule", "cosine"]
    one = convgrad(*arguments, "--accumulate", 2, "--json").json
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    # torchrun takes --log and --monitor as abbreviations of its own options.
    kept = ["--checkpoint-dir", folder, "--log-file", log, "--monitor-measure", "loss", "--json"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    program = [*launcher, "-m", "tvm_convgrad", *map(str, arguments), "--distributed", *map(str, kept)]
    alone = {name: value for name, value in os.environ.items() if name != "TVM_NUM_THREADS"}  # of this process
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300, env=alone)
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    assert two["losses"] == one["losses"]
    assert (two["ranks"], two["batches_of_an_update"], two["threads"]) == (
        2,
        2,
        max(1, len(os.sched_getaffinity(0)) // 2),
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == one["losses"]
    assert sum("validation" in line for line in lines) == 4
    assert one["best_loss"] == pytest.approx(two["best_loss"], rel=0.2)  # statistics are others
    longer = [*arguments, "--epochs", 6, "--schedule", "constant", "--checkpoint-dir", folder, "--resume", "--json"]
    on = convgrad(*longer).json
    assert (on["resumed_after"], on["batches_of_an_update"], on["ranks"]) == (len(two["losses"]), 2, 1)
    more = finish_all(start_ranks([*longer[1:-1], "--epochs", 7], 3))
    assert [each.code for each in more] == [0, 0, 0], more
    assert "1 of 3 processes have nothing to do" in more[0].err
    assert json.loads(more[0].out)["losses"][: len(on["losses"])] == on["losses"]
    assert [each.out for each in more[1:]] == ["", ""]


def test_a_model_with_its_own_loss(convgrad: Command, full_data: Path, tmp_path: Path) -> None:
    """Built with --loss model: two ranks have the losses and parameters of one process with two batches an update."""
    model, step = tmp_path / "own.py", tmp_path / "step.so"
    model.write_text(tiny.with_own_loss())
    built = convgrad(
        "build", f"{model}:make", "-o", step, "--loss", "model", "--split", "--optimizer", "adamw", "--batch", "dynamic"
    )
    assert built.code == 0, built.err
    arguments = [step, "--data", full_data, "--batch-size", 4, "--epochs", 3]
    one = convgrad("run", *arguments, "--accumulate", 2, "--save-state", tmp_path / "one.npz", "--json").json
    ranks = finish_all(start_ranks([*arguments, "--save-state", tmp_path / "two.npz"], 2))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    two = ranks[0].json
    assert len(two["losses"]) > 20
    assert two["losses"] == one["losses"]
    assert "test_accuracy" not in two
    with np.load(tmp_path / "one.npz") as alone, np.load(tmp_path / "two.npz") as shared:
        statistics = set(Session(step).statistics)  # those are averaged over the ranks
        assert set(alone.files) == set(shared.files) > statistics
        for name in set(alone.files) - statistics:
            np.testing.assert_array_equal(shared[name], alone[name], err_msg=name)


def test_a_killed_rank_ends_the_run_and_it_resumes(
    convgrad: Command, full_step: Path, full_data: Path, tmp_path: Path
) -> None:
    common = [full_step, "--data", full_data, "--batch-size", 3, "--epochs", 40]
    whole = convgrad("run", *common, "--accumulate", 2, "--json").json
    arguments = [*common, "--checkpoint-every", 1, "--statistics", "first"]
    folder = tmp_path / "checkpoints"
    endless = [*arguments, "--epochs", 100000, "--checkpoint-dir", folder]

    def newest() -> int:
        return max((int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt")), default=0)

    processes = start_ranks(endless, 2)
    wait_for(lambda: newest() >= 20, processes[0])
    processes[1].kill()
    begin = time.monotonic()
    first, second = finish_all(processes, SENTENCE_WITHIN)
    assert time.monotonic() - begin < SENTENCE_WITHIN
    assert second.code == -signal.SIGKILL
    first.assert_sentence("rank 0 of 2: another rank has ended or does not answer")
    assert "--resume goes on from it" in first.err
    assert not re.search(r"\.cc:|typically caused|GLHF", first.err)  # of gloo
    reached = newest()
    assert 20 <= reached < whole["steps"]
    done = finish_all(start_ranks([*arguments, "--checkpoint-dir", folder, "--resume"], 2))
    assert done[0].json["resumed_after"] == reached
    assert done[0].json["losses"] == whole["losses"]


def test_a_signal_to_one_rank_leaves_a_checkpoint(full_step: Path, full_data: Path, tmp_path: Path) -> None:
    """All ranks end with the same step, whichever is asked to."""
    arguments = [full_step, "--data", full_data, "--batch-size", 2, "--epochs", 100000, "--checkpoint-dir", tmp_path]
    processes = start_ranks(arguments, 2)
    wait_for(lambda: any(tmp_path.glob("*.ckpt")), processes[0])
    processes[1].send_signal(signal.SIGTERM)
    first, second = finish_all(processes, SENTENCE_WITHIN)
    assert (first.code, second.code) == (130, 130)
    assert "interrupted after step" in first.err
    assert (first.out, second.out, second.err) == ("", "", "")


def test_wrong_ranks_get_a_sentence_each(tiny_step: Path, full_step: Path, full_data: Path, tmp_path: Path) -> None:
    """Other data, a file that one rank has not, a whole step; nothing is written."""
    folder = tmp_path / "checkpoints"
    common = ["--epochs", 1, "--checkpoint-dir", folder]
    with np.load(full_data) as archive:
        np.savez(tmp_path / "other.npz", **{name: archive[name] + (name == "x_train") for name in archive.files})
    right = [full_step, "--data", full_data, *common]
    started = [
        start_ranks(right, 2, {1: [full_step, "--data", tmp_path / "other.npz", *common]}),
        start_ranks(right, 2, {1: [tiny_step, "--data", full_data, *common]}),
    ]
    (first, second), (other_first, other_second) = map(finish_all, started)
    first.assert_sentence("the ranks disagree on the training data: rank 0 has")
    second.assert_sentence("the ranks disagree on the training data: rank 0 has")
    other_first.assert_sentence("rank 1: ", "--distributed needs a step in two; build it with --split")
    other_second.assert_sentence("--distributed needs a step in two; build it with --split")
    assert not folder.exists()


def test_too_few_samples_are_refused(convgrad: Command, full_step: Path, tmp_path: Path) -> None:
    tiny.write_data(tmp_path / "few.npz", train=7)
    arguments = ["run", full_step, "--data", tmp_path / "few.npz", "--epochs", 1, "--batch-size", 4, "--accumulate", 2]
    convgrad(*arguments).assert_sentence("7 training samples do not fill the 2 batches of 4 of an update")


def test_a_run_of_fewer_batches_resumes_with_surplus_ranks(convgrad: Command, full_step: Path, tmp_path: Path) -> None:
    tiny.write_data(tmp_path / "few.npz", train=8)
    arguments = [full_step, "--data", tmp_path / "few.npz", "--batch-size", 4, "--checkpoint-dir", tmp_path / "made"]
    assert convgrad("run", *arguments, "--epochs", 1, "--accumulate", 2).code == 0
    done = finish_all(start_ranks([*arguments, "--epochs", 2, "--resume"], 3))
    assert [each.code for each in done] == [0, 0, 0], done[0].err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "5"}, "--distributed: RANK=5, but WORLD_SIZE=2; ranks are numbered from 0 to 1"),
        ({"WORLD_SIZE": "x"}, "--distributed: WORLD_SIZE=x, which must be a number from 1 to 65535"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: it is the number of ranks on this machine, at least 1"),
    ],
)
def test_numbers_of_a_launcher_that_are_wrong(
    convgrad: Command,
    full_step: Path,
    full_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
    said: str,
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    for name, value in {**given, **changed}.items():
        monkeypatch.setenv(name, value)
    arguments = ["run", full_step, "--data", full_data, "--epochs", 1, "--rank-timeout", 1]
    convgrad(*arguments, *(() if "LOCAL_WORLD_SIZE" in changed else ("--distributed",))).assert_sentence(said)


def test_without_a_launcher(
    convgrad: Command, full_step: Path, full_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["run", full_step, "--data", full_data, "--epochs", 1, "--distributed"]
    convgrad(*arguments).assert_sentence("RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set", "torchrun")


def test_a_rank_that_does_not_come(full_step: Path, full_data: Path) -> None:
    arguments = [full_step, "--data", full_data, "--epochs", 1, "--rank-timeout", 2]
    (done,) = finish_all(start_ranks(arguments, 2, present=[1]), SENTENCE_WITHIN)
    done.assert_sentence("rank 1 of 2: the ranks did not connect at 127.0.0.1:")
