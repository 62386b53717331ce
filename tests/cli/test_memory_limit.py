# SPDX-License-Identifier: Apache-2.0
"""`build --memory`: micro-batches until the plan keeps the limit, and the least that can be where none does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tests import tiny
from tests.cli.command import Command
from tvm_convgrad.commands.memory_limit import parse_size
from tvm_convgrad.training.runtime.artifact import read_artifact
from tvm_convgrad.training.runtime.memory import memory_of
from tvm_convgrad.training.runtime.session import Session


@pytest.mark.parametrize(
    ("text", "size"), [("512MB", 512_000_000), ("1.5GB", 1_500_000_000), ("4 KiB", 4096), ("7b", 7), ("2gib", 2**31)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(None) is None


@pytest.mark.parametrize("text", ["", "12", "MB", "-1MB", "0MB", "1TB", "1e9B", "NaNMB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="give a number with a unit"):
        parse_size(text)


def test_limits(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    """The plan is that of the library; the same samples are taken in one update; a limit below all is refused."""
    output = tmp_path / "step.so"
    build: list[object] = ["build", tiny_model, "-o", output, "--json", "--recompute", "none", "--memory"]
    whole = convgrad(*build, "1GB").json["memory"]
    assert whole["total"] == whole["state"] + whole["batch"] + whole["computed"]
    assert whole["choice"].endswith("without recomputation and micro-batches")
    memory = memory_of(read_artifact(output))
    assert memory.to_json() == {key: whole[key] for key in memory.to_json()}
    refused = convgrad(*build, "1B")
    refused.assert_sentence("--memory 1 B", "the least that was found", "allow that, or build with a smaller --batch")
    output = tmp_path / "less.so"  # a library that is loaded stays the one of its path
    build[3] = output
    least = convgrad(*build, f"{whole['total'] - 1}B").json
    parts = least["options"]["accumulate"]
    assert parts > 1
    assert tiny.BATCH % parts == 0
    assert least["memory"]["total"] < whole["total"]
    assert f"each batch as {parts} micro-batches of {tiny.BATCH // parts}, by whose own" in least["memory"]["choice"]
    assert re.search(r"a step takes \d+\.\d\d times as long", least["memory"]["choice"])
    assert memory_of(read_artifact(output)).total == least["memory"]["total"]
    x, y = tiny.make_arrays(tiny.BATCH, 0)
    session = Session(output)
    losses = [session.step(x, y)[0] for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("option", [("--class-weights", "1,20,0.1"), ("--ignore-index", -1)], ids=str)
def test_a_batch_whose_loss_is_a_weighted_mean_is_not_divided(
    convgrad: Command, tiny_model: str, tmp_path: Path, option: tuple[str, object]
) -> None:
    """The mean of the micro-batches' means would be another loss."""
    build: list[object] = ["build", tiny_model, "-o", tmp_path / "step.so", "--json", *option, "--memory"]
    whole = convgrad(*build, "1GB").json["memory"]["total"]
    refused = convgrad(*build, f"{whole // 2}B")
    refused.assert_sentence("the least that was found", "without micro-batches", f"{option[0]}: it is a weighted mean")


def test_samples_that_depend_on_each_other_stay_in_one_batch(convgrad: Command, tmp_path: Path) -> None:
    """Centred over the batch: micro-batches would train another model. Where that is not known, it is said."""
    centred = ("relax.op.subtract(h, builder.emit(relax.op.mean(h, [0])))",)
    rows, columns = ("relax.op.arange(batch)", "relax.op.arange(4)")
    rows = f"builder.emit(relax.op.reshape(builder.emit({rows}), (batch, 1)))"
    indexed = (f"relax.op.index_tensor(h, [{rows}, builder.emit({columns})])",)
    for name, operators in (("centred", centred), ("indexed", indexed)):
        (tmp_path / f"{name}.py").write_text(behind_the_pool(operators))
    options: list[object] = ["--bn", "frozen", "--recompute", "none", "--json", "-o", tmp_path / "step.so", "--memory"]
    whole = convgrad("build", f"{tmp_path}/centred.py:make", *options, "1GB").json["memory"]["total"]
    refused = convgrad("build", f"{tmp_path}/centred.py:make", *options, f"{whole - 1}B")
    why = "as samples of a batch depend on each other (relax.mean: it reduces over the samples)"
    refused.assert_sentence("the least that was found", f"without micro-batches, {why}")
    whole = convgrad("build", f"{tmp_path}/indexed.py:make", *options, "1GB").json["memory"]["total"]
    divided = convgrad("build", f"{tmp_path}/indexed.py:make", *options, f"{whole - 1}B").json
    assert divided["options"]["accumulate"] > 1
    assert (
        "if samples depend on each other (relax.index_tensor: what it does to the samples is not known)"
        in divided["memory"]["choice"]
    )


def behind_the_pool(operators: tuple[str, ...]) -> str:
    """The tiny network with operators on the pooled channels `h`."""
    pooled = "            h = builder.emit(relax.op.mean(h, [2, 3]))\n"
    return tiny.SOURCE.replace(
        pooled, pooled + "".join(f"            h = builder.emit({text})\n" for text in operators)
    )


def test_recomputation_comes_before_micro_batches_that_change_statistics(
    convgrad: Command, tiny_data: Path, tmp_path: Path
) -> None:
    """It says what it costs; a run goes on from a checkpoint of the same step without it, and gives the same losses."""
    (tmp_path / "net.py").write_text(deep(tiny.SOURCE))
    build: list[object] = ["build", f"{tmp_path}/net.py:make", "--momentum", "0.9", "--json", "-o"]
    plain = convgrad(*build, tmp_path / "plain.so", "--memory", "1GB").json
    assert "recompute" not in plain
    limit = plain["memory"]["total"] * 9 // 10
    less = convgrad(*build, tmp_path / "less.so", "--memory", f"{limit}B").json
    assert less["memory"]["total"] <= limit
    assert less["options"] == plain["options"], "no micro-batches, and the same training"
    repeated = less["recompute"]
    assert repeated["calls"] > 0
    assert f"{repeated['calls']} values" in less["memory"]["choice"]
    assert f"{1 + repeated['share']:.2f} times as long" in less["memory"]["choice"]
    assert memory_of(read_artifact(tmp_path / "less.so")).total == less["memory"]["total"]
    asked = convgrad(*build, tmp_path / "cheap.so", "--recompute", "cheap").json["recompute"]
    assert 0 < asked["share"] < 1 / 3
    run: list[object] = ["--data", tiny_data, "--epochs", 2, "--checkpoint-every", 3, "--json"]
    whole = convgrad("run", tmp_path / "plain.so", *run, "--checkpoint-dir", tmp_path / "whole").json["losses"]
    convgrad("run", tmp_path / "plain.so", *run[:2], "--epochs", 1, "--checkpoint-dir", tmp_path / "parts")
    rest = convgrad("run", tmp_path / "less.so", *run, "--checkpoint-dir", tmp_path / "parts", "--resume").json
    assert rest["losses"] == whole


def deep(source: str) -> str:
    """The tiny network with four more convolutions at its full resolution."""
    source = source.replace('"out": (4,', '"v": (4, 4, 3, 3), "out": (4,').replace("strides=2", "strides=1")
    more = """
            for _ in range(4):
                h = builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.conv2d(h, p["v"], padding=1))))
"""
    pooled = "            h = builder.emit(relax.op.mean("
    return source.replace(pooled, more.lstrip("\n") + pooled)


def test_a_batch_that_is_fixed_is_not_divided(convgrad: Command, tmp_path: Path) -> None:
    """Recomputation may do without; else the least without micro-batches is named, and why there are none."""
    fixed = deep(tiny.SOURCE).replace(f"def make(batch={tiny.BATCH}):", f"def make():\n    batch = {tiny.BATCH}")
    (tmp_path / "net.py").write_text(fixed)
    build: list[object] = ["build", f"{tmp_path}/net.py:make", "--bn", "frozen", "-o", tmp_path / "step.so", "--memory"]
    refused = convgrad(*build, "1B")
    refused.assert_sentence(
        "the least that was found", "without micro-batches, which the model does not take", "smaller --batch"
    )
    assert not (tmp_path / "step.so").exists()
    whole = convgrad(*build, "1GB", "--json").json["memory"]["total"]
    less = convgrad(*build, f"{whole * 19 // 20}B", "--json").json
    assert less["options"]["accumulate"] == 1
    assert less["recompute"]["calls"] > 0


def test_the_cheaper_way_is_chosen_where_results_stay(convgrad: Command, tmp_path: Path) -> None:
    """Without statistics of a batch, micro-batches and recomputation are compared by their estimates."""
    (tmp_path / "net.py").write_text(deep(tiny.SOURCE))
    build: list[object] = ["build", f"{tmp_path}/net.py:make", "--bn", "frozen", "--json", "-o"]
    whole = convgrad(*build, tmp_path / "whole.so", "--memory", "1GB").json["memory"]["total"]
    limit = f"{whole * 4 // 5}B"
    both = convgrad(*build, tmp_path / "both.so", "--memory", limit).json
    divided = convgrad(*build, tmp_path / "divided.so", "--memory", limit, "--recompute", "none").json
    times = [re.findall(r"takes (\d+\.\d\d) times", each["memory"]["choice"]) for each in (both, divided)]
    assert float(*times[0]) <= float(*times[1])
    assert max(both["memory"]["total"], divided["memory"]["total"]) <= whole * 4 // 5
    assert "statistics" not in divided["memory"]["choice"]


def test_a_free_batch_has_no_plan(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    output = tmp_path / "step.so"
    done = convgrad("build", tiny_model, "-o", output, "--batch", "dynamic", "--memory", "1GB")
    done.assert_sentence("--memory: the batch is symbolic", "add --batch N")
    assert not output.exists()
