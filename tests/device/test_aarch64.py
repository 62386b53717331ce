# SPDX-License-Identifier: Apache-2.0
"""aarch64, by qemu: a bundle trains in C, its checkpoint goes on here, and kernels give what float64 gives.

`make test-device` runs it. It needs qemu-aarch64-static, the C library of aarch64 (Debian's libstdc++6-arm64-cross, or
the folder that QEMU_LD_PREFIX names), ziglang or a cross compiler, and the wheels of apache-tvm and apache-tvm-ffi for
aarch64, which pip fetches unless CONVGRAD_AARCH64_WHEELS names their folder.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm

from relax_ops.single_run import QUICK_CONFIG
from tests.cli.command import Command
from tests.cli.test_guides import BLOCK, run_commands
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.device.files import INCLUDE, NAME, SOURCES, Runtime
from tvm_convgrad.kernels import chooser
from tvm_convgrad.training.compile.linking import Linker, linker_for
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.runtime.artifact import inspect_artifact
from tvm_convgrad.training.runtime.checkpoint import load
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.verify.operators import ALL_DIRECTIONS, random_problem
from tvm_convgrad.verify.suite import SUITE

pytestmark = pytest.mark.device

QEMU = "qemu-aarch64-static"
ROOTS = [Path(os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu"))]
WHEELS = os.environ.get("CONVGRAD_AARCH64_WHEELS")
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_cnn.py"
BATCH, STEPS, KERNELS = 16, 10, 132
LONGEST = BATCH * 64
"""Terms of the longest sum of a step: the pixels of a batch."""


@pytest.fixture(scope="session")
def linker() -> Linker:
    """What links for aarch64; skips where this machine cannot run it."""
    if shutil.which(QEMU) is None:
        pytest.skip(f"there is no {QEMU}")
    if not (ROOTS[0] / "lib" / "libstdc++.so.6").exists():
        pytest.skip(f"there is no C library for aarch64 in {ROOTS[0]}: install libstdc++6-arm64-cross")
    try:
        return linker_for(parse_target("aarch64-linux"))
    except SetupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def digits(linker: Linker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits model, a step of it for this machine and one for aarch64, and its bundle."""
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, "-m", "tvm_convgrad"]
    run = {"check": True, "cwd": folder}
    subprocess.run([sys.executable, EXAMPLE, "--out", folder, "--batch", str(BATCH)], check=True)
    build = [*command, "build", "digits_cnn.onnx", "--lr", "0.05", "--momentum", "0.9", "-o"]
    subprocess.run([*build, "host.so"], **run)
    subprocess.run([*build, "step.so", "--target", "aarch64-linux"], **run)
    wheels = ["--wheels", WHEELS] if WHEELS else []
    subprocess.run([*command, "bundle", "step.so", "-o", "device.tar", *wheels], **run)
    with tarfile.open(folder / "device.tar") as archive:
        archive.extractall(folder, filter="data")
    return folder


def emulate(folder: Path, *command: object, cpu: str = "max") -> subprocess.CompletedProcess[str]:
    """Run a program for aarch64, on one thread: emulated threads that wait take the time of those that work."""
    words = [QEMU, "-cpu", cpu, "-E", "TVM_NUM_THREADS=1", "-L", ROOTS[0], *command]
    return subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, check=False)


def batch(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(folder / "digits.npz") as data:
        return data["x_train"][:BATCH].astype("float32"), data["y_train"][:BATCH].astype("int64")


def test_the_bundle_trains(convgrad: Command, digits: Path) -> None:
    """Ten steps of C, with the losses of this machine; then two epochs more here, from the checkpoint."""
    bundle = digits / "device"
    assert (digits / "device.tar").stat().st_size < 8_000_000
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", bundle / "lib" / NAME], capture_output=True, text=True, check=True
    )
    assert all(line.split()[-1].startswith("convgrad_") for line in shown.stdout.splitlines())
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=bundle, check=False).returncode == 0
    x, y = batch(digits)
    x.tofile(bundle / "x.raw")
    y.tofile(bundle / "y.raw")
    saved = digits / "checkpoints" / f"step-{STEPS:010d}.ckpt"
    saved.parent.mkdir()
    done = emulate(bundle, "bin/train", "step.so", STEPS, "x.raw", "y.raw", "--save", saved)
    assert done.returncode == 0, done.stderr
    losses = [np.float32(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]
    session = Session(digits / "host.so")
    expected = [session.step(x, y)[0] for _ in range(STEPS)]
    np.testing.assert_allclose(losses, expected, rtol=LONGEST * np.finfo("float32").eps)
    assert losses[-1] < losses[0] / 2
    found = load(saved)
    assert [np.float32(loss) for loss in found.progress.losses] == losses
    data = ["--data", digits / "digits.npz", "--checkpoint-dir", saved.parent, "--resume", "--epochs", 2]
    ended = convgrad("run", digits / "host.so", *data, "--require-accuracy", 0.8)
    assert ended.code == 0, ended.err
    assert "of a build for another machine" in " ".join(ended.err.split())
    # and back: the aarch64 step goes on from the checkpoint that was written here
    newest = max(saved.parent.glob("step-*.ckpt"))
    again = emulate(bundle, "bin/train", "step.so", 1, "x.raw", "y.raw", "--load", newest)
    assert again.returncode == 0, again.stderr
    session.state = load(newest).state
    (loss,) = re.findall(r"loss (\S+)", again.stdout)
    assert float(loss) == pytest.approx(session.step(x, y)[0], rel=LONGEST * float(np.finfo("float32").eps))


def test_recomputed_steps_have_the_same_bits(convgrad: Command, digits: Path) -> None:
    """Of aarch64's code without recomputation; x86's losses differ by rounding only."""
    step, x, y = digits / "recomputed.so", digits / "x.raw", digits / "y.raw"
    options = ("--lr", 0.05, "--momentum", 0.9, "--target", "aarch64-linux", "--recompute", "all")
    built = convgrad("build", digits / "digits_cnn.onnx", "-o", step, *options)
    assert built.code == 0, built.err
    assert inspect_artifact(step).manifest["recompute"]["calls"] > 0
    for array, path in zip(batch(digits), (x, y), strict=True):
        array.tofile(path)
    ran = [emulate(digits / "device", "bin/train", each, 3, x, y) for each in (step, "step.so")]
    assert [done.returncode for done in ran] == [0, 0], [done.stderr for done in ran]
    assert ran[0].stdout == ran[1].stdout
    session = Session(digits / "host.so")
    expected = [session.step(*batch(digits))[0] for _ in range(3)]
    losses = [np.float32(loss) for loss in re.findall(r"loss (\S+)", ran[0].stdout)]
    np.testing.assert_allclose(losses, expected, rtol=LONGEST * np.finfo("float32").eps)


def test_instruction_sets_are_checked(convgrad: Command, digits: Path, tiny_model: str, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    assert convgrad("build", tiny_model, "-o", step, "--target", "armv8.2-a+fp16+dotprod").code == 0
    train = (digits / "device", "bin/train", step, 2)
    assert emulate(*train).returncode == 0
    refused = emulate(*train, cpu="cortex-a53")
    assert refused.returncode == 1
    assert "compiled for a CPU with dotprod, fullfp16, which this one lacks" in refused.stderr
    host = emulate(digits / "device", "bin/train", digits / "host.so", 2)
    assert "its code is not a shared library for aarch64" in host.stderr


def test_the_guide_of_the_raspberry_pi(
    convgrad: Command, digits: Path, linker: Linker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of docs/guides/raspberry-pi.md on a small network whose last layer is called as MobileNetV2's."""
    model = onnx.load(digits / "digits_cnn.onnx")
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("scores.", "classifier.1.")
    for node in model.graph.node:
        node.input[:] = [name.replace("scores.", "classifier.1.") for name in node.input]
    onnx.save(model, tmp_path / "model.onnx")
    with np.load(digits / "digits.npz") as whole:  # samples for the batches of 8 of the guide and of 16 of the network
        np.savez(tmp_path / "data.npz", **{name: whole[name][: 6 * BATCH] for name in whole})
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    wheels = f" --wheels {WHEELS}" if WHEELS else ""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "raspberry-pi.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", guide, flags=re.MULTILINE):
        for language, text in BLOCK.findall(section):
            if language == "python":
                exec(compile(text, "docs/guides/raspberry-pi.md", "exec"), names)
            else:
                run_commands(text.replace("-o device.tar", f"-o device.tar{wheels}"), convgrad)
        if section.startswith("On the Raspberry Pi"):
            run_there(re.findall(r"^    (.*)$", section, re.MULTILINE), tmp_path, linker)
    saved = load(tmp_path / "tuned.ckpt").progress
    assert (saved.epoch, len(saved.losses)) == (2, 12)
    assert saved.losses[-1] < saved.losses[0]
    before, after = (
        {t.name: t.raw_data for t in onnx.load(f"{name}.onnx").graph.initializer} for name in ("model", "trained")
    )
    assert {name for name in before if before[name] != after[name]} == {"classifier.1.weight", "classifier.1.bias"}
    assert inspect_artifact(tmp_path / "predict.so").state == ()


def run_there(commands: list[str], folder: Path, linker: Linker) -> None:
    """The commands of the Pi: its programs by qemu, its compiler by the one for it, all others as they are."""
    bundle = folder / "device"
    for command in commands:
        words = shlex.split(command)
        if words[0] == "cc":
            source = next(word for word in words if word.endswith(".c"))
            rest = [word for word in words[1:] if word != source]
            command_of_c = [*linker.command, "-x", "c", "-std=c11", source, "-x", "none", *rest]
            subprocess.run(command_of_c, cwd=bundle, check=True)
        elif words[0].startswith("bin/"):
            done = emulate(bundle, *words)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("mean loss") == 2
        else:
            subprocess.run(command, shell=True, cwd=folder, check=True)


def problems(dtype: str = "") -> list[ConvProblem]:
    """Those of the suite, and random ones up to a third of `KERNELS`; or some with another element type."""
    texts = list(SUITE)
    if dtype:
        plain = [text for text in texts if "dt=" not in text]
        return [ConvProblem.from_descriptor(f"{text}_dt={dtype}") for text in plain[:6]]
    dice = random.Random(22)
    found = [ConvProblem.from_descriptor(text) for text in texts]
    while len(found) < KERNELS // len(ALL_DIRECTIONS):
        found.append(random_problem(dice, dtypes=("float32",)))
    return found


@pytest.mark.parametrize(("target", "dtype"), [("aarch64-linux", ""), ("armv8.2-a+fp16+dotprod", "f16:f16:f16")])
def test_kernels_are_exact(linker: Linker, digits: Path, tmp_path: Path, target: str, dtype: str) -> None:
    compiled_for = parse_target(target)
    machine = machine_of(compiled_for)
    functions, jobs, content, wanted = {}, [], b"", []
    for problem in problems(dtype):
        for direction in ALL_DIRECTIONS:
            choice = chooser.choose(problem, direction, machine)
            if not choice.is_kernel:  # such as empty results
                continue
            name = f"kernel_{len(functions)}"
            functions[name] = chooser.build(problem, direction, machine, choice, name)
            operands, expected = numbers_of(problem, direction, 0)
            words = [name, str(len(operands) + 1)]
            for array in operands:
                words += tensor_words(array, len(content))
                content += array.tobytes()
            jobs.append(" ".join([*words, *tensor_words(expected, -1)]))
            wanted.append((problem, direction, expected))
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        library = tvm.compile(tvm.IRModule(functions), compiled_for)
    library.export_library(str(tmp_path / "kernels.so"), fcompile=linker)
    (tmp_path / "jobs").write_text("\n".join(jobs))
    (tmp_path / "data").write_bytes(content)
    program = driver(linker, digits / "device" / "lib", tmp_path)
    done = emulate(tmp_path, program, "./kernels.so", "jobs", "data", "results")
    assert done.returncode == 0, done.stderr
    results, at = (tmp_path / "results").read_bytes(), 0
    for problem, direction, expected in wanted:
        found = np.frombuffer(results, expected.dtype, expected.size, at).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected, f"{direction} {problem.descriptor}")
        at += expected.nbytes
    assert at == len(results)
    assert len(wanted) > (KERNELS * 9 // 10 if not dtype else 12)


def tensor_words(array: np.ndarray, offset: int) -> list[str]:
    """DLPack's type code and bits, rank, extents, offset."""
    code = 4 if array.dtype == numpy_dtype("bfloat16") else 2
    return list(map(str, (code, array.itemsize * 8, array.ndim, *array.shape, offset)))


def driver(linker: Linker, libraries: Path, folder: Path) -> Path:
    """The program that runs kernels."""
    program = folder / "kernels"
    sources = [Path(__file__).with_suffix("").parent / "kernels.cc", SOURCES / "runtime.cc"]
    headers = [f"-I{SOURCES}", f"-I{INCLUDE}", "-isystem", Runtime.installed().include]
    links = [libraries / "libtvm_runtime.so", libraries / "libtvm_ffi.so", f"-Wl,-rpath,{libraries}"]
    options = ["-std=c++17", "-O1", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    options.append(f"-Wl,--version-script,{SOURCES / 'exports.map'}")  # TVM's libraries have a C++ library of their own
    command = [*linker.for_cpp().command, *sources, *headers, *options, *links, "-o", program]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return program
