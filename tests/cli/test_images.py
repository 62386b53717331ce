# SPDX-License-Identifier: Apache-2.0
"""`convgrad run` on images: the losses of the same arrays, of any number of processes, and across kill -9."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tests.cli.test_kill import finish, start, wait_for
from tests.images.pictures import encode, write_shards

CLASSES = ("ant", "bee", "cat")
PARTS = {"train": 53, "val": 11, "test": 21}
AUGMENT = ("--augment", "flip", "--augment", "crop:padding=1", "--augment", "jitter")


def arrays(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [samples, height, width, 1] and labels, in the order in which a folder is read."""
    x, y = tiny.make_arrays(PARTS[part], list(PARTS).index(part))
    order = np.argsort(y, kind="stable")
    return (x[order].transpose(0, 2, 3, 1) * 40 + 128).clip(0, 255).astype("uint8"), y[order]


def write(folder: Path, part: str) -> None:
    """The images of a part in folders of classes."""
    for number, (image, label) in enumerate(zip(*arrays(part), strict=True)):
        path = folder / part / CLASSES[label] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(image))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for part in PARTS:
        write(folder, part)
    return folder


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as arrays, normalised with mean 0.5 and deviation 0.25."""
    found: dict[str, np.ndarray] = {}
    for part in PARTS:
        images, labels = arrays(part)
        found[f"x_{part}"] = ((images.transpose(0, 3, 1, 2) / 255.0 - 0.5) / 0.25).astype("float32")
        found[f"y_{part}"] = labels
    path = tmp_path_factory.mktemp("archive") / "data.npz"
    np.savez(path, **found)
    return path


NORMAL = ("--mean", "0.5", "--std", "0.25")
SAME = ("losses", "best_loss", "best_step", "test_loss", "test_accuracy", "train_samples", "test_samples")


def test_folders_and_shards_train_as_arrays(
    convgrad: Command, tiny_step: Path, pictures: Path, archive: Path, tmp_path: Path
) -> None:
    wanted = convgrad("run", tiny_step, "--data", archive, "--epochs", 3, "--json").json
    arguments = ["run", tiny_step, "--epochs", 3, "--json", *NORMAL]
    found = convgrad(*arguments, "--data", pictures).json
    assert [found[name] for name in SAME] == [wanted[name] for name in SAME]
    assert 0 <= found["input_share"] < 1
    # In shards, held-out samples apart, and nothing kept in memory.
    patterns = {}
    for part in PARTS:
        (tmp_path / part).mkdir()
        patterns[part] = write_shards(tmp_path / part, *arrays(part), shards=3)
    sharded = [*arguments, "--data", patterns["train"], "--validate", patterns["val"], "--test-data", patterns["test"]]
    found = convgrad(*sharded, "--workers", 2, "--image-memory", 0).json
    assert [found[name] for name in SAME] == [wanted[name] for name in SAME]


def test_killed_and_resumed_with_other_processes(
    convgrad: Command, tiny_step: Path, pictures: Path, tmp_path: Path
) -> None:
    """The order and what augmentations draw go on, whatever the number of processes is."""
    arguments = ["run", tiny_step, "--data", pictures, "--epochs", 20, "--validate-every", 4, *AUGMENT, "--json"]
    whole = convgrad(*arguments, "--workers", 0).json
    plain = [argument for argument in arguments if argument not in AUGMENT]
    assert convgrad(*plain).json["losses"][0] != whole["losses"][0]
    folder, log = tmp_path / "checkpoints", tmp_path / "log.jsonl"
    cut = [*arguments, "--log", log, "--checkpoint-dir", folder, "--checkpoint-every", 5, "--resume"]
    for goal, workers, memory in ((10, 2, 0), (60, 1, 1)):
        process = start(*cut, "--workers", workers, "--image-memory", memory)
        wait_for(lambda goal=goal: any(int(p.stem[5:]) >= goal for p in folder.glob("step-*.ckpt")), process)
        process.kill()
        finish(process)
    result = convgrad(*cut, "--workers", 3).json
    assert result["resumed_after"] >= 60
    for name in ("losses", "best_loss", "best_step", "test_accuracy"):
        assert result[name] == whole[name]
    steps = [json.loads(line)["loss"] for line in log.read_text().splitlines() if '"loss":' in line and "lr" in line]
    assert steps == whole["losses"]
    other = [*cut, "--augment", "vflip"]
    convgrad(*other).assert_sentence("the training data differs from that of the checkpoint")


def test_normalisation_of_the_build(
    convgrad: Command, tiny_model: str, tiny_step: Path, pictures: Path, tmp_path: Path
) -> None:
    step = tmp_path / "step.so"
    options = ["--momentum", 0.9, "--target", "llvm"]  # those of tiny_step: other instructions round otherwise
    built = convgrad("build", tiny_model, "-o", step, *options, *NORMAL, "--json").json
    assert (built["options"]["mean"], built["options"]["std"]) == ([0.5], [0.25])
    arguments = ["--data", pictures, "--epochs", 1, "--lr", 0.1, "--json"]
    found, wanted = convgrad("run", step, *arguments).json, convgrad("run", tiny_step, *arguments, *NORMAL).json
    assert found["losses"] == wanted["losses"]
    other = convgrad("run", step, *arguments, "--mean", "0").json
    assert other["losses"] == convgrad("run", tiny_step, *arguments, "--std", "0.25").json["losses"] != found["losses"]
    for option in (["--std", "0"], ["--mean", "nan"], ["--std", "a"]):
        assert convgrad("build", tiny_model, "-o", step, *option).code == 2


def test_lines_without_a_terminal(convgrad: Command, tiny_step: Path, pictures: Path) -> None:
    done = convgrad("run", tiny_step, "--data", pictures, "--epochs", 2, "--workers", 1)
    assert done.code == 0
    lines = done.err.splitlines()
    assert lines[0].startswith("decoded 53 images in ")
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    assert all("/s, " in line and " left, waited " in line for line in lines if line.startswith("epoch"))
    assert "input share" in done.out


def test_wrong_data(convgrad: Command, tiny_step: Path, pictures: Path, tmp_path: Path) -> None:
    """One sentence, and neither a checkpoint nor a log is written over."""
    log = tmp_path / "log.jsonl"
    log.write_text("kept\n")
    kept = ["--epochs", 1, "--log", log, "--checkpoint-dir", tmp_path / "checkpoints"]

    def run(data: Path, *others: object) -> None:
        return convgrad("run", tiny_step, "--data", data, *kept, *others)

    for number in range(5):
        path = tmp_path / "five" / f"class{number}" / "a.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(encode(arrays("val")[0][0]))
    run(tmp_path / "five").assert_sentence("there are 5 classes, but the model predicts 3")
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty").assert_sentence("a folder without classes")
    run(tmp_path / "nowhere").assert_sentence("no such data file", "folder of images")
    run(tmp_path / "s-{0..2}.tar").assert_sentence("3 of 3 shards are not there")
    write(tmp_path / "set", "train")
    write(tmp_path / "set", "val")
    (tmp_path / "set" / "val" / "bee").rename(tmp_path / "set" / "val" / "dog")
    run(tmp_path / "set").assert_sentence("the classes dog are not among the 3")
    run(tmp_path / "set" / "train", "--patience", 2).assert_sentence("a folder val")
    wrong = next((tmp_path / "set" / "train").rglob("*.png"))
    wrong.write_bytes(wrong.read_bytes()[:50])
    run(tmp_path / "set").assert_sentence("1 of 53 images cannot be used: ", wrong.name)
    run(pictures, "--mean", "0.5,0.5").assert_sentence("--mean has 2 numbers", "1 channels")
    assert log.read_text() == "kept\n"
    assert not (tmp_path / "checkpoints").exists()
    done = run(tmp_path / "set" / "train", "--image-memory", 0, "--workers", 1)
    done.assert_sentence("images cannot be used: ", wrong.name, "A run with corrected data starts from the beginning")
    for option in (["--augment", "turn"], ["--mean", "x"], ["--fit", "zoom"], ["--workers", -1]):
        assert run(pictures, *option).code == 2
