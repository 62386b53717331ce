# SPDX-License-Identifier: Apache-2.0
"""The memory of a step, read from its code: what a handmade program takes, and what a step really allocates."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from examples.digits_cnn import OPSET, Network
from tests.cli.command import Command
from tests.conftest import build_tiny
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.artifact import read_artifact
from tvm_convgrad.training.runtime.data import random_samples
from tvm_convgrad.training.runtime.memory import Moment, memory_of, moments_of
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.vm_code import constants_of

STATISTICS = (
    'Constant pool (# 6): [shapetuple[100], uint8, "a, [text", '
    '"ErrorContext(annotation=R.Tensor((16, 1), dtype="float32")) ", shapetupl], shapetuple[8]]\n'
)
CODE = """@init:
  call  vm.builtin.alloc_storage in: %vm, c[0], i0, c[1] dst: %0
  ret   %0
@step:
  call  vm.builtin.alloc_storage in: %vm, c[0], i0, c[1] dst: %1
  call  vm.builtin.alloc_tensor in: %1, i0, c[4], c[1] dst: %2
  call  vm.builtin.null_value in:              dst: %1
  call  first_0123456789abcdef in: %0, %2 dst: %void
  call  vm.builtin.alloc_storage in: %vm, c[5], i0, c[1] dst: %1
  call  vm.builtin.make_tuple in: %2, %0       dst: %3
  call  vm.builtin.null_value in:              dst: %2
  call  second in: %1 dst: %void
  call  vm.builtin.null_value in:              dst: %3
  call  third in: %1 dst: %void
  ret   %1
@first_0123456789abcdef packed_func;
"""


def test_a_storage_lives_as_long_as_what_is_made_of_it() -> None:
    assert list(moments_of(CODE, STATISTICS)) == [Moment("first", 100), Moment("second", 108), Moment("third", 8)]


def test_constants() -> None:
    found = constants_of(STATISTICS)
    assert found[0] == "shapetuple[100]"
    assert found[2] == '"a, [text"'
    assert found[4:] == ["shapetuple[]", "shapetuple[8]"]


@pytest.mark.parametrize(
    ("code", "statistics", "message"),
    [
        (CODE, STATISTICS.replace("# 6", "# 7"), "6 constants are found where it says 7"),
        (CODE, "", "no pool of constants"),
        (CODE.replace("@step", "@other"), STATISTICS, "no function step"),
        (CODE.replace("c[5]", "%7"), STATISTICS, "%7 is not a size"),
        (CODE.replace("c[5]", "c[9]"), STATISTICS, r"c\[9\] is not a size"),
        (CODE.replace("  ret   %1", "  if    %1, i3\n  ret   %1"), STATISTICS, "branches"),
        (CODE + "\n@second:\n  ret   %0\n", STATISTICS, "calls second"),
    ],
)
def test_what_is_not_understood_is_refused(code: str, statistics: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        list(moments_of(code, statistics))


@pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "accumulate": 2}, {"split": True}])
def test_a_step_allocates_what_its_code_says(tiny_model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Beside a step that runs: the same kernels in the same order, and never less than their tensors at one time."""
    path = build_tiny(tiny_model, tmp_path / "step.so", **options)
    memory = memory_of(read_artifact(path))
    session = Session(path)
    samples = random_samples(session.inputs, session.target, session.classes, session.inputs[0].shape[0])
    names: list[str] = []
    allocated: list[int] = []
    tensors: list[int] = []
    fixed = {int(each.data_ptr()) for each in session.tensors.values()}

    def note(_function: object, name: str, before: bool, _result: object, *arguments: Any) -> int:
        if before and name == "vm.builtin.alloc_storage":
            allocated.append(math.prod(map(int, arguments[1])))
        elif before and not name.startswith(("vm.builtin.", "convgrad_entry")):
            names.append(name)
            own = {int(a.data_ptr()): a for a in arguments if hasattr(a, "data_ptr") and int(a.data_ptr()) not in fixed}
            tensors.append(sum(math.prod(a.shape) * 4 for a in own.values() if str(a.dtype) == "float32"))
        return 0

    given: list[Any] = []
    x = samples.inputs if len(samples.inputs) > 1 else samples.inputs[0]
    session.step(x, samples.target)
    with session.instrumented(note, given):
        session.step(x, samples.target)
    assert [name.startswith(moment.name) for name, moment in zip(names, memory.moments, strict=True)] == [True] * len(
        names
    )
    assert memory.peak.bytes <= sum(allocated)
    assert all(m.bytes + memory.batch + 4 >= seen for m, seen in zip(memory.moments, tensors, strict=True))
    assert memory.state == sum(math.prod(a.shape) * a.itemsize for a in session.state.values())


def test_a_free_batch_is_refused(tiny_dynamic_step: Path) -> None:
    with pytest.raises(UnsupportedError, match="--batch N"):
        memory_of(read_artifact(tiny_dynamic_step))


MEASURED = """
# Without pages of files, which the system takes and gives back as it likes: the code of libraries.
import gc, re, sys
from pathlib import Path
import numpy as np
import tvm
from tvm_convgrad.training.runtime.session import Session

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

x, y = tvm.runtime.tensor(np.ones((16, 3, 160, 160), "float32")), np.zeros(16, "int64")  # aligned: not copied
gc.collect()
before = resident("RssAnon")
session = Session(sys.argv[1])
session.step(x, y)
Path("/proc/self/clear_refs").write_text("5")
for _ in range(3):
    session.step(x, y)
print(resident("VmHWM") - resident("RssFile") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_the_planned_memory_is_what_a_process_takes(convgrad: Command, tmp_path: Path, recompute: str) -> None:
    """Within 5 % where tensors are large: beside them are kernels' panels, the library and the interpreter's own."""
    batch, size = 16, 160
    network = Network(0)
    x = network.relu(network.conv("image", "first", (3, 16)), "first_relu")
    x = network.relu(network.add("Add", [network.conv(x, "second", (16, 16)), x], "sum"), "second_relu")
    x = network.add("GlobalAveragePool", [x], "pool")
    network.linear(network.add("Flatten", [x], "flat", axis=1), "scores", (16, 10))
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("image", [batch, 3, size, size]), ("scores", [batch, 10]))
    )
    graph = helper.make_graph(network.nodes, "large", [given], [made], network.values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]), tmp_path / "model.onnx")
    step = tmp_path / "step.so"
    built = convgrad("build", tmp_path / "model.onnx", "-o", step, "--recompute", recompute, "--json").json
    assert ("recompute" in built) == (recompute == "all")
    planned = memory_of(read_artifact(step)).total
    assert planned > 90e6
    done = subprocess.run([sys.executable, "-c", MEASURED, step], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == pytest.approx(planned, rel=0.05)
