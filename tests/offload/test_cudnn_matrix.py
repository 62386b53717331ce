# SPDX-License-Identifier: Apache-2.0
"""Our rules against cuDNN's own answers for GPUs of five architectures, without a GPU: the same yes and no."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cases.load import ABSENT, FILES, FOLDER, cases
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.cudnn import rules
from tvm_convgrad.offload.cudnn.backend import CuDnn
from tvm_convgrad.offload.cudnn.devices import DEVICES, version_of
from tvm_convgrad.offload.cudnn.settings import VARIABLE

pytestmark = pytest.mark.cuda

TYPES = ("float32", "float16", "bfloat16", "float64")
EPILOGUES = {
    "forward": [
        Epilogue(bias=bias, relu=relu, accumulate=accumulate)
        for bias, relu, accumulate in itertools.product((False, True), repeat=3)
    ],
    "backward_weight": [NO_EPILOGUE, Epilogue(accumulate=True)],
    "backward_data": [NO_EPILOGUE, Epilogue(accumulate=True)],
}
Question = tuple[str, ConvProblem, Epilogue]


@pytest.fixture(autouse=True)
def in_compiled_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only engines that cuDNN need not compile, as more of them take bfloat16 on sm_75, and relu without a bias."""
    monkeypatch.setenv(VARIABLE, "precompiled")


def answer(direction: str, problem: ConvProblem, epilogue: Epilogue, arch: str) -> tuple[bool, str]:
    """Whether cuDNN has an engine, and what it says if not."""
    found = CuDnn().engines(direction, problem, epilogue, arch, 1)
    if isinstance(found, str):
        return False, found
    return any(not each.refusal for each in found), "; ".join(sorted({each.refusal for each in found}))


def disagreements(questions: Iterator[Question], arch: str) -> tuple[list[str], Counter[bool]]:
    """Where rules and library differ, and how many yes and no both say.

    Layouts with which cuDNN computes something else, although it says yes, are no question.
    """
    wrong, agreed = [], Counter[bool]()
    for direction, problem, epilogue in questions:
        if rules.layout_refusal(problem):
            continue
        reason = rules.refusal(direction, problem, epilogue, version_of(arch))
        has, why = answer(direction, problem, epilogue, arch)
        if has == (not reason):
            agreed[has] += 1
        else:
            wrong.append(
                f"{direction} {problem.descriptor} {epilogue} on {arch}: rules {reason or 'yes'!r}, cuDNN {why!r}"
            )
    return wrong, agreed


GRID = (
    "mb4ic32ih14oc64kh3ph1",
    "mb3ic3ih15oc5kh3ph1",  # odd channels
    "mb3ic7ih15oc5kh3sh2dh1ph1",  # strided and dilated
    "g4mb4ic32ih14oc64kh3ph1",
    "g3mb4ic9ih14oc6kh3ph1",
    "g32mb4ic32ih14oc32kh3ph1",  # depthwise
    "mb4ic32ih14oc64kh3ph0rh1",  # asymmetric padding
    "mb2ic4ih5oc4kh5ph4",  # padding longer than half of the kernel
    "mb1ic2ih12oc3kh2sh4",  # stride longer than the kernel
    "mb4ic32iw14oc64kw3pw1",
    "g32mb4ic32iw14oc32kw3pw1",
    "mb4ic32id8oc64kd3pd1",
    "g4mb4ic32id8oc64kd3pd1sd2",
)
LAYOUTS = {
    1: ("NCW:OIW:NCW", "NWC:OWI:NWC"),
    2: ("NCHW:OIHW:NCHW", "NHWC:OHWI:NHWC", "NHWC:OIHW:NHWC", "NHWC:OIHW:NCHW", "NCHW:OHWI:NCHW"),
    3: ("NCDHW:OIDHW:NCDHW", "NDHWC:ODHWI:NDHWC"),
}


def grid() -> Iterator[Question]:
    for descriptor in GRID:
        plain = ConvProblem.from_descriptor(descriptor)
        for layouts, dtype, direction in itertools.product(LAYOUTS[plain.rank], TYPES, DIRECTIONS):
            problem = plain.with_layouts(*layouts.split(":")).with_dtypes(dtype, dtype, dtype)
            some = (
                EPILOGUES[direction]
                if descriptor == GRID[0]
                else EPILOGUES[direction][:: 7 if direction == "forward" else 1]
            )
            for epilogue in some:
                yield direction, problem, epilogue
    plain = ConvProblem.from_descriptor(GRID[0])
    for dtype, direction in itertools.product(("float16", "bfloat16"), DIRECTIONS):  # a wider result
        types = {name: "float32" if name == DIRECTIONS[direction].result else dtype for name in plain.tensors}
        mixed = plain.with_dtypes(types["data"], types["weight"], types["grad"])
        for epilogue in EPILOGUES[direction]:
            yield direction, mixed, epilogue
            yield direction, mixed.with_layouts("NHWC", "OHWI", "NHWC"), epilogue
    for extremes in ("mb40000ic64ih32oc8kh1sh4", "mb0ic64ih9oc8kh3"):  # more elements than an int32 counts, and none
        for dtype, direction in itertools.product(TYPES, DIRECTIONS):
            yield direction, ConvProblem.from_descriptor(extremes).with_dtypes(dtype, dtype, dtype), NO_EPILOGUE


@pytest.mark.parametrize("arch", DEVICES)
def test_the_grid(arch: str) -> None:
    wrong, agreed = disagreements(grid(), arch)
    assert wrong == []
    assert agreed[True] > 500
    assert agreed[False] > 90


def test_layouts_that_cudnn_misreads() -> None:
    """cuDNN has engines for these. On an H100 none was right for HWIO; orders such as CHWN were not tried there."""
    for layouts, named in (("NHWC:HWIO:NHWC", "HWIO of weight"), ("CHWN:OIHW:CHWN", "CHWN of data")):
        problem = ConvProblem.from_descriptor(GRID[0]).with_layouts(*layouts.split(":"))
        assert f"the layout {named}" in rules.refusal("forward", problem, NO_EPILOGUE, 90)


def others() -> list[ConvProblem]:
    """The convolutions of other projects' suites, in their own size, each once."""
    made = (problem for file in FILES for _, problem in cases(file))
    return list(dict.fromkeys(problem for problem in made if isinstance(problem, ConvProblem)))


@pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)
@pytest.mark.parametrize("arch", DEVICES)
def test_the_shapes_of_others(arch: str) -> None:
    """Each problem as it is on every architecture; direction, type, layout and epilogue differ from one to the next."""
    first = list(DEVICES).index(arch)

    def questions() -> Iterator[Question]:
        for number, plain in enumerate(others(), first):
            direction = list(DIRECTIONS)[number % 3]
            dtype = TYPES[number // 3 % 4]
            problem = plain.with_dtypes(dtype, dtype, dtype)
            if number // 12 % 2 and plain.rank == 2:
                last = plain.data_layout != "NHWC"
                problem = (
                    replace(problem, data_layout="NHWC", kernel_layout="OHWI", grad_layout="NHWC")
                    if last
                    else (problem.with_layouts())
                )
            yield direction, problem, EPILOGUES[direction][number // 24 % len(EPILOGUES[direction])]

    wrong, agreed = disagreements(questions(), arch)
    assert wrong == []
    assert agreed.total() > 1000
