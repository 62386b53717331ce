# SPDX-License-Identifier: Apache-2.0
"""The graph of a step, read from its code: that of a handmade program, and of a step that also runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import build_tiny
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.artifact import read_artifact
from tvm_convgrad.training.runtime.data import random_samples
from tvm_convgrad.training.runtime.dataflow import KernelCall, calls_of, dataflow_of, with_shapes
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.timeline import record

STATISTICS = "Constant pool (# 2): [shapetuple[4, 2], float32]\n"
CODE = """@step:
  call  vm.builtin.tuple_getitem in: %3, i0       dst: %4
  call  vm.builtin.tuple_getitem in: %3, i1       dst: %5
  call  convgrad_entry__0123456789abcdef in: %0, %1, %2   dst: %void
  call  vm.builtin.alloc_tensor in: %9, i0, c[0], c[1] dst: %6
  call  first_0123456789abcdef in: %0, %4, %6 dst: %void
  call  vm.builtin.reshape in: %6, c[0] dst: %7
  call  vm.builtin.alloc_tensor in: %9, i0, %8, c[1] dst: %10
  call  loss in: %7, %1, %10 dst: %void
  call  vm.builtin.null_value in:              dst: %6
  call  sum_in_place in: %10, %7 dst: %void
  call  vm.builtin.alloc_tensor in: %9, i0, c[0], c[1] dst: %6
  call  last in: %10, %6 dst: %void
  call  update_in_place in: %4, %2, %6 dst: %void
  call  momentum_in_place in: %5, %6 dst: %void
  ret   %5
"""


def test_calls_read_what_others_wrote() -> None:
    """Through views and registers that are used again; what works in place both reads and writes."""
    assert calls_of(CODE, STATISTICS, [(4, 3)], [(3, 2), None], [1]) == (
        KernelCall("first", "forward", ((4, 3), (3, 2), (4, 2)), ()),
        KernelCall("loss", "forward", ((4, 2),), (0,)),
        KernelCall("sum_in_place", "backward", ((4, 2),), (0, 1)),
        KernelCall("last", "backward", ((4, 2),), (1, 2)),
        KernelCall("update_in_place", "optimizer", ((3, 2), (4, 2)), (3,)),
        KernelCall("momentum_in_place", "optimizer", ((4, 2),), (3,)),
    )


@pytest.mark.parametrize(
    ("code", "message"), [(CODE.replace("@step", "@other"), "no function step"), (CODE + "  goto  i3\n", "branches")]
)
def test_what_is_not_understood_is_refused(code: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        calls_of(code, STATISTICS, [(4, 3)], [(3, 2), None], [])


@pytest.mark.parametrize("batch", [None, "dynamic"])
def test_a_step_runs_as_its_code_says(tiny_model: str, tmp_path: Path, batch: str | None) -> None:
    """The names and phases are those that were measured, and of a fixed batch the shapes are, too."""
    path = build_tiny(tiny_model, tmp_path / "step.so", optimizer="adam", **({"batch": batch} if batch else {}))
    calls = dataflow_of(read_artifact(path))
    session = Session(path)
    samples = random_samples(session.inputs, session.target, session.classes, session.batch or 8)
    timeline = record(session, samples.inputs, samples.target, steps=1, warm=1)
    known = with_shapes(calls, timeline)
    assert [call.phase for call in known] == [call.phase for call in calls]
    for call, timed in zip(calls, timeline.calls, strict=True):
        assert set(call.shapes) <= set(timed.shapes)
    assert all(source < place for place, call in enumerate(calls) for source in call.sources)
    assert sum(not call.sources for call in calls) < len(calls) / 2
    with pytest.raises(UnsupportedError, match="other calls"):
        with_shapes(calls[1:], timeline)
