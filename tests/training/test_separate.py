# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled apart are the same code, whoever compiles them and whether they were kept."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.linked import PLAIN
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.threads import JOBS
from tvm_convgrad.training.compile import kernel_pool, kernel_worker, separate
from tvm_convgrad.training.compile.artifact_writer import save_artifact
from tvm_convgrad.training.compile.kernel_object import Settings, kernel_key, kernel_text, make_object
from tvm_convgrad.training.compile.kernel_pool import KernelPool
from tvm_convgrad.training.compile.kernel_worker import Worker
from tvm_convgrad.training.compile.linking import Linker, linker_for
from tvm_convgrad.training.compile.lower import compile_module
from tvm_convgrad.training.compile.separate import KernelBuilds, compile_apart

SHAPE = (2, 3, 6, 6)
HASWELL = {**PLAIN, "mcpu": "haswell"}


def module(factor: float = 2.0) -> tvm.IRModule:
    """Two functions with kernels in common: conv2d, relu, a product."""
    builder = relax.BlockBuilder()
    for name in ("main", "other"):
        x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
        w = relax.Var("w", relax.TensorType((4, 3, 3, 3), "float32"))
        with builder.function(name, [x, w]):
            with builder.dataflow():
                h = builder.emit(relax.op.nn.conv2d(x, w, padding=1))
                h = builder.emit(relax.op.exp(relax.op.multiply(h, relax.const(factor if name == "main" else 3.0))))
                result = builder.emit_output(relax.op.cumsum(h, axis=1))
            builder.emit_func_output(result)
    return builder.get()


def library(
    folder: Path, kept: KeptObjects | None, target: object = PLAIN, workers: int = 0
) -> tuple[Path, KernelBuilds]:
    """The linked module, and how its kernels were built."""
    builds = KernelBuilds(kept, workers=workers)
    with compile_apart(builds):
        executable = compile_module(module(), target)
    path = folder / "linked.so"
    executable.export_library(str(path))
    return path, builds


def scaled(factor: float) -> tvm.tirx.PrimFunc:
    """A kernel."""
    x = tvm.te.placeholder((16,), name="x")
    return tvm.te.create_prim_func([x, tvm.te.compute((16,), lambda n: x[n] * factor, name="y")])


def result(path: Path) -> np.ndarray:
    random = np.random.default_rng(0)
    arrays = [tvm.runtime.tensor(random.normal(size=shape).astype("float32")) for shape in (SHAPE, (4, 3, 3, 3))]
    return relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())["main"](*arrays).numpy()


def test_cold_warm_damaged_and_without_give_the_same_library(tmp_path: Path) -> None:
    """Bit for bit; and it computes what a module compiled as a whole computes."""
    kept = KeptObjects(tmp_path / "objects")
    path, cold = library(tmp_path, kept)
    whole = path.read_bytes()
    own = result(path)
    assert (cold.taken, kept.size()[0]) == (0, cold.found)

    path, warm = library(tmp_path, kept)
    assert warm.taken == warm.found
    assert path.read_bytes() == whole

    damaged = min(kept.folder.glob("*/*.object"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    path, again = library(tmp_path, kept)
    assert again.taken == again.found - 1
    assert path.read_bytes() == whole

    (tmp_path / "file").write_text("")
    unwritable = KeptObjects(tmp_path / "file")
    assert library(tmp_path, unwritable)[0].read_bytes() == whole
    assert unwritable.problem
    assert library(tmp_path, None)[0].read_bytes() == whole

    together = tmp_path / "together.so"
    compile_module(module(), PLAIN).export_library(str(together))
    np.testing.assert_array_equal(result(together), own)


def test_another_target_shares_nothing(tmp_path: Path) -> None:
    kept = KeptObjects(tmp_path / "objects")
    library(tmp_path, kept)
    _, other = library(tmp_path, kept, HASWELL)
    assert other.taken == 0
    assert library(tmp_path, kept, HASWELL)[1].taken == other.found


def test_kernels_are_found_by_their_code() -> None:
    """A kernel's name in a module does not matter, and all else does."""

    def function(name: str, factor: float) -> tvm.tirx.PrimFunc:
        made = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((4,), "float32"))
        with made.function("main", [x]):
            made.emit_func_output(made.emit_te(lambda a: tvm.te.compute((4,), lambda i: a[i] * factor), x))
        (kernel,) = [f for _, f in made.get().functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
        return kernel.with_attr("global_symbol", name)

    target = tvm.target.Target("llvm")
    settings = Settings.current(target)
    assert kernel_text(function("a", 2.0)) == kernel_text(function("b", 2.0))
    text = kernel_text(function("a", 2.0))
    with tvm.transform.PassContext(opt_level=1):
        level = Settings.current(target)
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        option = Settings.current(target)
    keys = [
        kernel_key(text, "a", settings),
        kernel_key(kernel_text(function("a", 3.0)), "a", settings),
        kernel_key(text, "b", settings),
        kernel_key(text, "a", Settings.current(tvm.target.Target(HASWELL))),
        kernel_key(text, "a", level),
        kernel_key(text, "a", option),
    ]
    assert len(set(keys)) == len(keys)
    assert kernel_key(text, "a", Settings.current(target)) == keys[0]


def test_equal_kernels_of_a_module_are_one(tmp_path: Path) -> None:
    """The convolution and the sum of both functions; the products differ."""
    lowered_names = library(tmp_path, None)[1].found
    builds = KernelBuilds(None, workers=0)
    with compile_apart(builds):
        compile_module(module(3.0), PLAIN)
    assert builds.found < lowered_names


def test_no_weight_is_written_as_source(tmp_path: Path) -> None:
    """A C++ compiler takes minutes and gigabytes for an array of a ResNet-18's weights."""
    given = []

    class Watching(Linker):
        def __call__(self, output: str, objects: Sequence[str], options: Sequence[str] = (), **_: object) -> None:
            given.extend(Path(each).name for each in objects)
            super().__call__(output, objects, options)

    target = tvm.target.Target(PLAIN)
    with compile_apart(KernelBuilds(None, workers=0)):
        executable = compile_module(module(), target)
    linker = Watching(linker_for(target).command)
    save_artifact(executable, {"target": str(target)}, tmp_path / "step.so", linker)
    assert "imports.o" in given
    assert "devc.c" not in given  # the name of TVM's array
    assert result(tmp_path / "step.so").shape == (2, 4, 6, 6)


def test_a_worker_makes_the_same_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a job that it has failed at."""
    target = tvm.target.Target(PLAIN)
    settings = Settings.current(target)
    function = scaled(2.0)
    text = kernel_text(function)
    worker = Worker()
    try:
        answer = worker.make(text, "twice", settings, tmp_path)
        assert answer == make_object(function, "twice", settings, tmp_path)
        assert worker.make("{}", "nothing", settings, tmp_path) is None  # it failed, and still serves
        assert worker.make(text, "twice", settings, tmp_path) == answer
    finally:
        worker.stop()
    assert worker.make(text, "twice", settings, tmp_path) is None


class Asked(Worker):
    """A worker that says how many kernels it was asked for, and dies at a certain one; at 0 it is dead at once."""

    asked = 0
    last = 1000

    def __init__(self) -> None:
        super().__init__()
        if self.last == 0:
            self.stop()

    def make(self, text: str, name: str, settings: Settings, folder: Path) -> bytes | None:
        Asked.asked += 1
        if Asked.asked == self.last:
            self._process.kill()
        return super().make(text, name, settings, folder)


@pytest.mark.parametrize("last", [0, 1, 2, 1000])
def test_who_makes_a_kernel_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Workers begin before the module is lowered; what one that is killed leaves, others make: the same library."""
    own = library(tmp_path, None)[0].read_bytes()
    monkeypatch.setattr(kernel_pool, "Worker", Asked)
    monkeypatch.setattr(kernel_pool, "_FEW_BYTES", 0)
    monkeypatch.setattr(Asked, "asked", 0)
    monkeypatch.setattr(Asked, "last", last)
    path, builds = library(tmp_path, None, workers=2)
    assert path.read_bytes() == own
    assert 0 < Asked.asked <= builds.found
    assert builds.taken == 0


def test_processes_are_as_many_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one included, and never more than `MOST_WORKERS` beside it."""
    monkeypatch.setattr(separate, "available_cores", lambda: 4)
    for stated, others in (("", 3), ("1", 0), ("2", 1), ("64", separate.MOST_WORKERS)):
        monkeypatch.setenv(JOBS, stated)
        assert KernelBuilds().workers == others
    for stated in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv(JOBS, stated)
        with pytest.raises(SetupError, match=f"CONVGRAD_JOBS is '{stated}'; it must be how many processes"):
            KernelBuilds()


class Stopped(Worker):
    """A worker that never answers."""

    def __init__(self) -> None:
        super().__init__()
        self._process.send_signal(signal.SIGSTOP)


def test_a_worker_that_does_not_answer_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's name, and with no process left; kernels that nobody asks for may take as long as they like."""
    started: list[Worker] = []
    monkeypatch.setattr(kernel_worker, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(kernel_pool, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(kernel_pool, "Worker", lambda: started.append(Stopped()) or started[-1])
    with KernelPool(Settings.current(tvm.target.Target(PLAIN)), workers=1) as pool:
        functions = [scaled(factor) for factor in (2.0, 3.0)]
        pool.expect(functions[0], "twice")
        pool.start()
        begun = time.monotonic()
        while pool._waiting:
            assert time.monotonic() < begun + 10
            time.sleep(0.01)
        wanted = [pool.kernel(function, "twice") for function in functions]
        assert len(pool.objects(wanted[1:], lambda _: None)) == 1
        with pytest.raises(SetupError, match=rf"kernel {wanted[0].name}: .* has not answered for 0\.5 s"):
            pool.objects(wanted, lambda _: None)
    assert [worker._process.returncode for worker in started] == [-signal.SIGKILL]


def test_a_worker_is_started_before_the_module_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes kernels of the first module; without a module it is ended."""
    own = library(tmp_path, None)[0].read_bytes()
    monkeypatch.setattr(separate, "Worker", Asked)
    monkeypatch.setattr(Asked, "asked", 0)
    builds = KernelBuilds(None, workers=1)
    with compile_apart(builds):
        builds.start()
        (worker,) = builds._started
        compile_module(module(), PLAIN).export_library(str(tmp_path / "linked.so"))
        assert worker._process.returncode == -signal.SIGKILL
    assert Asked.asked > 0
    assert (tmp_path / "linked.so").read_bytes() == own
    with compile_apart(builds):
        builds.start()
        (worker,) = builds._started
    assert worker._process.returncode == -signal.SIGKILL


class Third(Worker):
    """Workers of which the third cannot be started, and the second is stopped with an error."""

    started: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        if len(self.started) == 2:
            raise OSError("there are too many processes")
        super().__init__()
        self.started.append(self)

    def stop(self) -> None:
        super().stop()
        if self is self.started[1]:
            raise KeyboardInterrupt


def test_no_process_is_left_when_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_pool, "Worker", Third)
    monkeypatch.setattr(Third, "started", [])
    pool = kernel_pool.KernelPool(Settings.current(tvm.target.Target(PLAIN)), workers=3)
    folder = pool.__enter__()._folder
    with pytest.raises(OSError, match="too many processes"):
        pool.start()
    with pytest.raises(KeyboardInterrupt):
        pool.__exit__()
    assert [worker._process.returncode for worker in Third.started] == [-signal.SIGKILL] * 2
    assert not folder.exists()


def test_a_kernel_is_written_as_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution when it is generated, and not again when passes have put attributes on it."""
    texts = []
    monkeypatch.setattr(kernel_pool, "kernel_text", lambda function: texts.append(kernel_text(function)) or texts[-1])
    _, builds = library(tmp_path, None, workers=1)
    assert len(texts) >= builds.found
    longest = max(texts, key=len)
    assert texts.count(longest) == 1
    assert texts.index(longest) == 0
