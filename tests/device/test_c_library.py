# SPDX-License-Identifier: Apache-2.0
"""The C library gives the bits that Python's Session gives, and both read each other's checkpoints."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_convgrad
from tests import tiny
from tests.cli.command import Command
from tests.conftest import build_tiny
from tests.device.binding import INPUT, PREDICTION, STATE, TARGET, Open, RefusedError
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.device.files import CMAKE, INCLUDE, SOURCES
from tvm_convgrad.training.runtime.artifact import ARTIFACT, inspect_artifact
from tvm_convgrad.training.runtime.checkpoint import load
from tvm_convgrad.training.runtime.envelope import seal
from tvm_convgrad.training.runtime.session import Session

EXAMPLE = Path(__file__).parents[2] / "examples" / "c"
STEPS = 10


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    return [tiny.make_arrays(tiny.BATCH, seed) for seed in range(STEPS)]


def test_steps_and_predictions_are_pythons(tiny_step: Path, open_c: Open) -> None:
    ours, theirs = open_c(tiny_step), Session(tiny_step)
    for number, (x, y) in enumerate(batches()):
        out = np.empty((tiny.BATCH, tiny.CLASSES), "float32")
        rate = np.float32(0.1 / (number + 1))
        ours.call("set_learning_rate", ctypes.c_float(rate))
        loss, expected = theirs.step(x, y, float(rate))
        assert ours.step(x, y, out) == np.float32(loss)
        np.testing.assert_array_equal(out, expected)
    assert_same(ours.state(), theirs.state)
    assert ours.progress() == (STEPS, 0, STEPS)
    x = batches()[0][0]
    found = ours.predict(x, np.empty((tiny.BATCH, tiny.CLASSES), "float32"))
    np.testing.assert_array_equal(found, theirs.predict(x))
    ours.call("reset")
    theirs.reset()
    assert_same(ours.state(), theirs.state)


def test_what_a_session_says_of_itself(tiny_step: Path, open_c: Open) -> None:
    session, artifact = open_c(tiny_step), inspect_artifact(tiny_step)
    assert session.get("id").decode() == artifact.id
    assert json.loads(session.get("manifest")) == artifact.manifest
    assert session.library.convgrad_version().decode() == tvm_convgrad.__version__
    assert set(session.library.convgrad_cpu_features().decode().split()) == local_features()
    assert session.tensor(INPUT, 0) == ("x", "float32", "", [tiny.BATCH, 1, tiny.SIZE, tiny.SIZE])
    assert session.tensor(TARGET, 0)[1:] == ("int64", "", [tiny.BATCH])
    assert session.tensor(PREDICTION, 0)[3] == [tiny.BATCH, tiny.CLASSES]
    state = [session.tensor(STATE, index) for index in range(session.get("count", STATE))]
    assert state == [(each.name, each.dtype, each.role, list(each.shape)) for each in artifact.state]
    with pytest.raises(RefusedError, match="no tensor of this kind"):
        session.tensor(STATE, len(state))


def test_a_step_in_two(tiny_split_step: Path, open_c: Open) -> None:
    ours, theirs = open_c(tiny_split_step), Session(tiny_split_step)
    flat = theirs.artifact.flat
    assert flat is not None
    assert ours.get("flat_size") == flat.size
    for number, (x, y) in enumerate(batches()[:4]):
        expected = theirs.gradients(x, y, number)
        loss, gradients = ours.gradients(x, y, number)
        assert loss == np.float32(expected.loss)
        np.testing.assert_array_equal(gradients, expected.flat)
        theirs.apply(gradients)
        ours.flat("apply", gradients)
        assert ours.step(x, y, name="eval_step") == np.float32(theirs.evaluate(x, y)[0])
    assert_same(ours.state(), theirs.state)
    assert ours.progress() == (4, 0, 4)
    parameters = np.empty(flat.size, "float32")
    ours.flat("get_parameters", parameters)
    for name, view in flat.views(parameters).items():
        np.testing.assert_array_equal(view, theirs.state[name])
    ours.flat("set_parameters", -parameters)
    for name in flat.views(parameters):
        np.testing.assert_array_equal(ours.state()[name], -theirs.state[name])


@pytest.mark.parametrize("samples", [1, 5, 13])
def test_a_free_batch(tiny_dynamic_step: Path, open_c: Open, samples: int) -> None:
    ours, theirs = open_c(tiny_dynamic_step), Session(tiny_dynamic_step)
    x, y = tiny.make_arrays(samples, 7)
    out = np.empty((samples, tiny.CLASSES), "float32")
    loss, expected = theirs.step(x, y)
    assert ours.step(x, y, out) == np.float32(loss)
    np.testing.assert_array_equal(out, expected)
    assert ours.tensor(INPUT, 0)[3][0] == -1


def test_the_least_batch_of_a_batch_norm(tiny_dynamic_step: Path, open_c: Open, tmp_path: Path) -> None:
    manifest = inspect_artifact(tiny_dynamic_step).manifest
    manifest["schema"]["inputs"][0]["least"] = 2
    path = tmp_path / "least.so"
    path.write_bytes(seal(ARTIFACT, tiny_dynamic_step.read_bytes(), manifest)[0])
    ours, theirs = open_c(path), Session(path)
    x, y = tiny.make_arrays(1, 7)
    with pytest.raises(ArtifactError, match=r"has 1 sample, .* give at least 2, or build with --bn frozen\.$") as error:
        theirs.step(x, y)
    with pytest.raises(RefusedError, match=re.escape(str(error.value))):
        ours.step(x, y)
    np.testing.assert_array_equal(ours.predict(x, np.empty((1, tiny.CLASSES), "float32")), theirs.predict(x))
    more = tiny.make_arrays(2, 7)
    assert ours.step(*more) == np.float32(theirs.step(*more)[0])


def test_no_samples_are_refused(tiny_dynamic_step: Path, open_c: Open) -> None:
    ours, (x, y) = open_c(tiny_dynamic_step), tiny.make_arrays(1, 7)
    before = ours.state()
    with pytest.raises(RefusedError, match="has 0 bytes"):
        ours.step(x[:0], y[:0])
    with pytest.raises(RefusedError, match="has 0 bytes"):
        ours.predict(x[:0], np.empty((0, tiny.CLASSES), "float32"))
    for name, value in ours.state().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_library_that_was_built_again_is_not_the_old_one(tiny_model: str, tmp_path: Path, open_c: Open) -> None:
    """The dynamic loader answers a name that it knows with the library that it has."""
    path, x, y = tmp_path / "step.so", *tiny.make_arrays(tiny.BATCH, 7)
    first = open_c(build_tiny(tiny_model, path, lr=0.1, momentum=0.9))
    build_tiny(tiny_model, path, lr=0.1, momentum=0.0)
    with pytest.raises(RefusedError, match="another build of this file is open; close its sessions first"):
        open_c(path)
    losses = [first.step(x, y) for _ in range(3)]
    first.close()
    again = open_c(path)
    assert [again.step(x, y) for _ in range(2)] == losses[:2]
    assert again.step(x, y) != losses[2]


def test_arrays_may_begin_anywhere(tiny_step: Path, open_c: Open) -> None:
    x, y = tiny.make_arrays(tiny.BATCH, 3)
    losses = set()
    for offset in (0, 1, 64):
        memory = np.zeros(x.nbytes + 256, "uint8")
        start = -memory.ctypes.data % 64 + offset
        moved = memory[start : start + x.nbytes].view("float32") if offset != 1 else memory[start : start + x.nbytes]
        moved[...] = x.ravel() if offset != 1 else x.view("uint8").ravel()
        losses.add(open_c(tiny_step).step(moved, y))
    assert losses == {np.float32(Session(tiny_step).step(x, y)[0])}


def test_inference_libraries(convgrad: Command, tmp_path: Path, open_c: Open, tiny_model: str) -> None:
    step, library = tmp_path / "step.so", tmp_path / "predict.so"
    assert convgrad("build", tiny_model, "-o", step).code == 0
    checkpoint = tmp_path / "a.ckpt"
    open_c(step).call("save_checkpoint", str(checkpoint).encode())
    done = convgrad("export", step, "--checkpoint", checkpoint, "-o", library, "--model", tiny_model, "--inference")
    assert done.code == 0, done.err
    session, x = open_c(library), batches()[0][0]
    out = session.predict(x, np.empty((tiny.BATCH, tiny.CLASSES), "float32"))
    np.testing.assert_array_equal(out, Session(library).predict(x))
    assert (session.get("count", TARGET), session.get("count", STATE), session.get("flat_size")) == (0, 0, 0)
    with pytest.raises(RefusedError, match="an inference library, which has predict alone"):
        session.step(x, batches()[0][1])
    with pytest.raises(RefusedError, match="no state to save"):
        session.call("save_checkpoint", str(tmp_path / "a.ckpt").encode())


def test_a_checkpoint_of_c_goes_on_in_python(
    convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, open_c: Open
) -> None:
    """The batches are those of `convgrad run`, so that the run is the one that Python would have made."""
    folder, whole = tmp_path / "c", tmp_path / "whole"
    folder.mkdir()
    run = ["run", tiny_step, "--data", tiny_data, "--epochs", 2, "--seed", 5, "--checkpoint-dir"]
    assert convgrad(*run, whole).code == 0
    expected = max(whole.glob("step-*.ckpt"))
    session = open_c(tiny_step)
    session.call("set_seed", ctypes.c_int64(5))
    first = tmp_path / "one"
    assert convgrad(*[1 if part == 2 else part for part in run], first).code == 0
    session.call("load_checkpoint", str(max(first.glob("step-*.ckpt"))).encode())
    assert session.progress()[1:] == (1, 0)
    session.call("save_checkpoint", str(folder / "step-0000000006.ckpt").encode())
    done = convgrad(*run, folder, "--resume")
    assert done.code == 0, done.err
    found, wanted = load(max(folder.glob("step-*.ckpt"))), load(expected)
    assert found.progress == wanted.progress
    assert_same(found.state, wanted.state)


def test_data_of_a_c_program(convgrad: Command, tiny_step: Path, tiny_data: Path, tmp_path: Path, open_c: Open) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    session, theirs = open_c(tiny_step), Session(tiny_step)
    for x, y in batches():
        session.step(x, y)
        theirs.step(x, y)
    session.call("end_epoch")
    path = folder / f"step-{STEPS:010d}.ckpt"
    session.call("save_checkpoint", str(path).encode())
    saved = load(path)
    assert (saved.progress.data, saved.progress.epoch, saved.progress.position) == ("", 1, 0)
    assert len(saved.progress.losses) == STEPS
    assert_same(saved.state, theirs.state)
    run = ["run", tiny_step, "--data", tiny_data, "--epochs", 2, "--checkpoint-dir", folder, "--resume"]
    done = convgrad(*run)
    assert done.code == 0, done.err
    assert "a C program has trained on data of its own" in " ".join(done.err.split())  # wrapped at 80 columns
    newest = load(max(folder.glob("step-*.ckpt")))
    assert newest.progress.epoch == 2
    other = open_c(tiny_step)
    other.call("load_checkpoint", str(newest.path).encode())
    assert_same(other.state(), newest.state)
    assert other.progress() == (len(newest.progress.losses), 2, 0)


def test_refusals_leave_a_session_as_it_is(tiny_step: Path, tiny_model: str, tmp_path: Path, open_c: Open) -> None:
    session, (x, y) = open_c(tiny_step), batches()[0]
    before = session.state()
    out = np.empty((tiny.BATCH, tiny.CLASSES), "float32")
    for match, call in {
        "has 1008 bytes, but x of the model is float32": lambda: session.step(x[:7], y),
        r"the target has the value 3 at \[0\], .*; the model takes it as one of 3 classes \(0 to 2\)\.$": lambda: (
            session.step(x, y * 0 + 3)
        ),
        r"value -1 at \[7\], .* \(0 to 2\); build with --ignore-index -1 if it marks what has no loss": lambda: (
            session.step(x, np.where(np.arange(tiny.BATCH) == 7, -1, y))
        ),
        "the buffer for the predictions has 48 bytes, and they take 96": lambda: session.step(x, y, out[:4]),
        "functions gradients, apply and evaluate; build it with --split": lambda: session.gradients(x, y),
        "flat vector has 3 floats, and": lambda: session.flat("set_parameters", np.zeros(3, "float32")),
        "no tensor nothing": lambda: session.call("set_state", b"nothing", session.given[2][0]),
        "the learning rate must be": lambda: session.call("set_learning_rate", ctypes.c_float(float("nan"))),
        "cannot be written": lambda: session.call("save_checkpoint", str(tmp_path / "no" / "a").encode()),
        "cannot be read": lambda: session.call("load_checkpoint", str(tmp_path / "none").encode()),
        "this is not a file": lambda: session.call("load_checkpoint", str(tmp_path).encode()),
        "the path is NULL": lambda: session.call("load_checkpoint", None),
    }.items():
        with pytest.raises(RefusedError, match=match):
            call()
    assert_same(session.state(), before)
    assert session.progress() == (0, 0, 0)
    other = open_c(build_tiny(tiny_model, tmp_path / "other.so", lr=0.2))
    other.call("save_checkpoint", str(tmp_path / "other.ckpt").encode())
    with pytest.raises(RefusedError, match="a checkpoint of another artifact"):
        session.call("load_checkpoint", str(tmp_path / "other.ckpt").encode())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"cpu_features": ["avx", "quantum"]}, "compiled for a CPU with quantum, which this one lacks"),
        (
            {"versions": {"tvm_ffi": "9.9.0", "tvm": "0.27.0", "tvm_convgrad": "1"}},
            "compiled with apache-tvm-ffi 9.9.0",
        ),
        ({"versions": {"tvm_ffi": "0.1.14", "tvm": "0.3.0", "tvm_convgrad": "1"}}, "compiled with Apache TVM 0.3.0"),
        ({"target": '{"kind": "cuda"}'}, "compiled for cuda, and this library runs on CPUs"),
    ],
)
def test_artifacts_of_other_machines(
    tiny_step: Path, tmp_path: Path, open_c: Open, change: dict[str, object], match: str
) -> None:
    artifact = inspect_artifact(tiny_step)
    path = tmp_path / "step.so"
    path.write_bytes(seal(ARTIFACT, tiny_step.read_bytes(), artifact.manifest | change)[0])
    with pytest.raises(RefusedError, match=match):
        open_c(path)
    payload = bytearray(tiny_step.read_bytes())
    payload[18] = 183
    path.write_bytes(seal(ARTIFACT, bytes(payload), artifact.manifest)[0])
    with pytest.raises(RefusedError, match="not a shared library for x86_64"):
        open_c(path)


@pytest.fixture(scope="module")
def example(c_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C, by the strictest compiler; no header of TVM is on its path."""
    program = tmp_path_factory.mktemp("example") / "train"
    command = ["cc", "-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", EXAMPLE / "train.c"]
    link = [f"-L{c_library.parent}", "-lconvgrad", f"-Wl,-rpath,{c_library.parent}", "-Wl,--allow-shlib-undefined"]
    subprocess.run([*command, "-o", program, *link], check=True)
    return program


def test_the_header_is_c_and_the_example_runs(example: Path, tiny_step: Path, tmp_path: Path) -> None:
    x, y = batches()[0]
    x.tofile(tmp_path / "x.raw")
    y.tofile(tmp_path / "y.raw")

    def losses(*options: object) -> list[tuple[int, np.float32]]:
        given = [example, tiny_step, 5, tmp_path / "x.raw", tmp_path / "y.raw", *options]
        done = subprocess.run(list(map(str, given)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
        return [(int(number), np.float32(loss)) for number, loss in found]

    session = Session(tiny_step)
    expected = [(number + 1, np.float32(session.step(x, y)[0])) for number in range(10)]
    assert losses("--save", tmp_path / "five.ckpt") == expected[:5]
    assert losses("--load", tmp_path / "five.ckpt") == expected[5:]
    done = subprocess.run([example, tmp_path / "none.so", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, "cannot be read" in done.stderr) == (1, True)


def exported(torch: Any, kind: str) -> Any:
    """A small model of one kind of batch, exported by torch.export."""

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.tokens = torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Embedding(9, 5)
            self.many = torch.nn.Linear(3, 200)

        def forward(self, x: Any, target: Any = None) -> Any:
            if kind == "tokens":
                return self.tokens(x).mean(1)
            if kind == "classes":
                return self.many(x)
            found = self.conv(x.float() / 255)
            found = found if kind == "pixels" else found.mean((2, 3))
            return found if target is None else torch.nn.functional.cross_entropy(found, target)

    image = torch.zeros(4, 3, 6, 6)
    inputs = {
        "pixels": (image,),
        "classes": (torch.zeros(150, 3),),
        "loss": (image, torch.zeros(4, dtype=torch.int64)),
        "tokens": (torch.zeros(4, 7, dtype=torch.int32),),
        "bytes": (image.to(torch.uint8),),
        "halves": (image.half(),),
    }
    return torch.export.export(Net(), inputs[kind])


@pytest.mark.parametrize("kind", ["pixels", "classes", "loss", "tokens", "bytes", "halves"])
def test_the_example_makes_batches_of_all_types(kind: str, example: Path, convgrad: Command, tmp_path: Path) -> None:
    """Classes that are not the last axis, a step that tells of no predictions, and elements of 1, 2 and 4 bytes."""
    torch = pytest.importorskip("torch")
    torch.export.save(exported(torch, kind), tmp_path / "net.pt2")
    options = ["--loss", "model"] if kind == "loss" else []
    built = convgrad("build", str(tmp_path / "net.pt2"), "-o", str(tmp_path / "step.so"), *options)
    assert built.code == 0, built.err
    done = subprocess.run([example, tmp_path / "step.so", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    if kind == "classes":
        x = ((np.arange(450) * 7919 % 1001 - 500) / np.float32(500)).astype("float32").reshape(150, 3)
        assert np.float32(losses[0]) == np.float32(Session(tmp_path / "step.so").step(x, np.arange(150))[0])


OPENED = """
import ctypes, sys
library, session = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
assert library.convgrad_open(sys.argv[2].encode(), ctypes.byref(session)) == 0
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"TVM_NUM_THREADS").decode())
"""


def test_a_session_uses_all_cpus_unless_told_otherwise(c_library: Path, tiny_step: Path) -> None:
    """TVM's own default is half of them."""

    def threads(given: dict[str, str]) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "TVM_NUM_THREADS"} | given
        command = [sys.executable, "-c", OPENED, str(c_library), str(tiny_step)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert threads({}) == str(len(os.sched_getaffinity(0)))
    assert threads({"TVM_NUM_THREADS": "1"}) == "1"


def test_the_cmake_package(convgrad: Command, tmp_path: Path) -> None:
    """It configures; compiling is the same as in the other tests."""
    listed = convgrad("config").out.splitlines()
    assert listed[:3] == [f"cmakedir {CMAKE}", f"includedir {INCLUDE}", f"sourcedir {SOURCES}"]
    assert convgrad("config", "--tvm-version", "--cmakedir").out.splitlines()[0] == str(CMAKE)
    configure = [
        "cmake",
        "-S",
        EXAMPLE,
        "-B",
        tmp_path,
        f"-Dconvgrad_ROOT={CMAKE}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    try:
        done = subprocess.run(configure, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no cmake")
    assert done.returncode == 0, done.stderr
