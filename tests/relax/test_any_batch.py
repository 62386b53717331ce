# SPDX-License-Identifier: Apache-2.0
"""One program for every batch: kernels whose batch is known only when they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.lowering import recorded_choices
from relax_ops.program import face_call
from tests.relax.programs import tensor
from tvm_convgrad.bulk import quick_machine
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.verification import numbers_of

PROBLEMS = [
    "mb{n}ic17ih9iw11oc11kh3kw3ph1pw1",  # ragged channels
    "mb{n}ic24ih8iw7oc40kh1kw1",  # 1x1
    "mb{n}ic16ih8oc12kh3sh2ph1",
    "mb{n}ic3ih19oc20kh5sh2ph2",  # pairs of tap and channel as rows of wgrad
    "g4mb{n}ic16ih7oc24kh3ph1",
    "g18mb{n}ic18ih9iw20oc18kh3kw3sh2sw2ph1pw1",  # depthwise
    "mb{n}ic9ih13oc11kh3dh2ph2",
    "mb{n}ic18iw30oc20kw5sw2pw3",
    "mb{n}ic10id5ih6iw6oc12kd3kh3kw3pd1ph1pw1",
]


def module_of(face: str, problem: ConvProblem) -> Any:
    """The face with a symbolic batch."""
    n = tvm.tirx.Var("n", "int64")

    def operand(name: str) -> Any:
        shape, dtype = problem.tensors[name]
        return tensor(name, [extent if isinstance(extent, int) else n for extent in shape], dtype)

    operands = [operand(name) for name in FACES[face].operands]
    named = _Named(problem, n)
    builder = relax.BlockBuilder()
    with builder.function("main", operands):
        with builder.dataflow():
            result = builder.emit_output(face_call(builder, FACES[face], named, *operands))
        builder.emit_func_output(result)
    return builder.get()


class _Named:
    """A problem whose symbolic batch is a variable of the program, for `face_call`."""

    def __init__(self, problem: ConvProblem, batch: Any) -> None:
        self._problem = problem
        self.data_shape = tuple(extent if isinstance(extent, int) else batch for extent in problem.data_shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


def check(face: str, problem: ConvProblem) -> None:
    with recorded_choices() as record:
        machine = quick_machine(module_of(face, problem), "native")
    (entry,) = record
    assert entry.choice.is_kernel, entry.choice
    for batch in (1, 3, 8, 17):
        operands, wanted = numbers_of(replace(problem, batch=batch), face)
        found = machine["main"](*map(tvm.runtime.tensor, operands)).numpy()
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_one_kernel_for_every_batch(text: str, channels_last: bool, face: str) -> None:
    problem = ConvProblem.from_descriptor(text)
    if channels_last:
        axes = problem.data_layout[2:]
        problem = problem.with_layouts(f"N{axes}C", f"O{axes}I", f"N{axes}C")
    check(face, problem)


@pytest.mark.parametrize("face", FACES)
def test_half_precision_for_every_batch(face: str) -> None:
    check(face, ConvProblem.from_descriptor(PROBLEMS[0]).with_dtypes("float16", "float16", "float16"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mb{n}ic4ih{h}oc4kh3", "the height or width is known only at run time"),
        ("mb{n}ic24ih7oc24kh3_lay=CNHW:OIHW:CNHW", "a batch known only at run time must be the outermost axis"),
    ],
)
def test_what_else_is_symbolic_is_refused(text: str, reason: str) -> None:
    from tests.relax.test_default_kernels import TARGETS
    from tvm_convgrad.kernels import plan
    from tvm_convgrad.kernels.target import machine_of

    for face in FACES:
        choice = plan.choose(ConvProblem.from_descriptor(text), face, machine_of(tvm.target.Target(TARGETS["AVX2"])))
        assert not choice.is_kernel
        assert reason in choice.reason
