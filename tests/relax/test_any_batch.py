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
from relax_ops.program import direction_call
from relax_ops.single_run import quick_machine
from tests.relax.programs import tensor
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem

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


def module_of(direction: str, problem: ConvProblem) -> Any:
    """The direction with a symbolic batch."""
    n = tvm.tirx.Var("n", "int64")

    def operand(name: str) -> Any:
        shape, dtype = problem.tensors[name]
        return tensor(name, [extent if isinstance(extent, int) else n for extent in shape], dtype)

    operands = [operand(name) for name in DIRECTIONS[direction].operands]
    named = _Named(problem, n)
    builder = relax.BlockBuilder()
    with builder.function("main", operands):
        with builder.dataflow():
            result = builder.emit_output(direction_call(builder, DIRECTIONS[direction], named, *operands))
        builder.emit_func_output(result)
    return builder.get()


class _Named:
    """A problem whose symbolic batch is a variable of the program, for `direction_call`."""

    def __init__(self, problem: ConvProblem, batch: Any) -> None:
        self._problem = problem
        self.data_shape = tuple(extent if isinstance(extent, int) else batch for extent in problem.data_shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


def check(direction: str, problem: ConvProblem) -> None:
    with recorded_choices() as record:
        machine = quick_machine(module_of(direction, problem), "native")
    (entry,) = record
    assert entry.choice.is_kernel, entry.choice
    for batch in (1, 3, 8, 17):
        operands, wanted = numbers_of(replace(problem, batch=batch), direction)
        found = machine["main"](*map(tvm.runtime.tensor, operands)).numpy()
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_one_kernel_for_every_batch(text: str, channels_last: bool, direction: str) -> None:
    problem = ConvProblem.from_descriptor(text)
    if channels_last:
        axes = problem.data_layout[2:]
        problem = problem.with_layouts(f"N{axes}C", f"O{axes}I", f"N{axes}C")
    check(direction, problem)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_for_every_batch(direction: str) -> None:
    check(direction, ConvProblem.from_descriptor(PROBLEMS[0]).with_dtypes("float16", "float16", "float16"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mb{n}ic4ih{h}oc4kh3", "the height or width is known only at run time"),
        ("mb{n}ic24ih7oc24kh3_lay=CNHW:OIHW:CNHW", "a batch known only at run time must be the outermost axis"),
    ],
)
def test_what_else_is_symbolic_is_refused(text: str, reason: str) -> None:
    from tests.relax.test_default_kernels import TARGETS
    from tvm_convgrad.codegen.hardware import machine_of
    from tvm_convgrad.kernels import chooser

    for direction in DIRECTIONS:
        choice = chooser.choose(
            ConvProblem.from_descriptor(text), direction, machine_of(tvm.target.Target(TARGETS["AVX2"]))
        )
        assert not choice.is_kernel
        assert reason in choice.reason
