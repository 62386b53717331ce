# SPDX-License-Identifier: Apache-2.0
"""Generated kernels equal float64 bit for bit on small integers, and write every element of the result, no other."""

import random

import pytest
import tvm
from tvm.target import codegen

from tests.kernels.harness import NATIVE, check_exact, check_machine_code
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.operators import ALL_DIRECTIONS, random_problem

SHAPES = [
    "mb2ic4ih4oc6oh1kh3sh2",  # one pixel a channel: both pixels and channels are contiguous
    "mb3ic6ih1oc10kh1",  # the same on both sides
    "mb2ic5ih1oc7kh3ph1",
    "g2mb2ic12ih1oc14kh3ph1",
    "mb2ic17ih9iw11oc19oh9ow11kh3kw3ph1pw1",  # ragged channels
    "mb1ic3ih33iw33oc20oh17ow17kh7kw7sh2sw2ph3pw3",  # stem, batch 1
    "mb2ic40ih8iw8oc24oh8ow8kh1kw1",  # 1x1, more channels than a register
    "mb3ic8ih15iw15oc12oh8ow8kh1kw1sh2sw2",  # strided 1x1
    "mb2ic16ih12iw12oc32oh3ow3kh3kw3sh4sw4ph1pw1",  # positions of X that no tap reads
    "mb2ic40ih20iw37oc24oh11ow20kh1kw1sh2sw2ph1pw1",  # columns two apart, and borders
    "mb1ic3ih21iw26oc40kh5kw5ph2pw2",  # few channels, more taps than registers
    "g4mb2ic16ih9iw9oc24oh9ow9kh3kw3ph1pw1",  # 1 < groups < channels
    "g20mb2ic20ih10iw10oc20oh10ow10kh3kw3ph1pw1",  # depthwise
    "g6mb2ic6ih9iw9oc18oh5ow5kh3kw3sh2sw2ph1pw1",  # depthwise with a multiplier
    "g16mb2ic16ih7iw7oc16oh7ow7kh7kw7ph3pw3",  # depthwise, no pixel has all taps in bounds
    "g24mb1ic24ih30iw33oc24oh30ow33kh7kw7ph3pw3",  # depthwise, slabs of rows, several pieces of a row
    "g40mb3ic40ih13iw50oc40oh7ow25kh3kw3sh2sw2ph1pw1",  # depthwise, strided, ragged channels
    "g20mb2ic20ih9iw9oc60oh5ow5kh3kw3sh2sw2ph1pw1",  # depthwise, more channels than a register, with a multiplier
    "g16mb1ic16ih40iw40oc16oh40ow40kh3kw3ph18pw18dh17dw17",  # depthwise, dilation
    "g32mb2ic32id5ih6iw7oc32od3oh3ow4kd3kh3kw3sd2sh2sw2pd1ph1pw1",  # depthwise, 3-d
    "g33mb2ic33iw50oc33ow26kw5sw2pw3",  # depthwise, 1-d
    "g3mb2ic3ih33iw35oc3oh33ow35kh3kw3ph1pw1",  # depthwise, fewer channels than lanes, tiles of rows at both borders
    "g2mb1ic2ih18iw37oc4oh9ow19kh3kw3sh2sw2ph1pw1",  # depthwise, strided with a multiplier, few slices
    "g5mb2ic5ih31iw17oc5oh16ow17kh5kw4sh2ph2pw2",  # depthwise, even kernel, strided over rows only
    "g4mb2ic4ih9iw64oc4oh5ow32kh2kw2sh2sw2ph1",  # depthwise, a tap for each phase
    "g4mb2ic4ih5iw36oc8oh2ow18kh1kw1sh3sw2",  # depthwise, positions that no tap reads
    "g4mb1ic4id4ih6iw20oc4od4oh6ow20kd3kh3kw3pd1ph1pw1",  # depthwise, 3-d, columns
    "mb2ic9ih13iw13oc11oh9ow9kh3kw3ph2pw2dh3dw3rh2rw2",  # dilation
    "mb1ic18ih2iw3oc17oh5ow4kh5kw6ph3pw4rh4rw2",  # kernel larger than the data
    "mb5ic33iw50oc34ow26kw5sw2pw3",  # 1-d
    "mb2ic5id6ih7iw8oc18od3oh4ow4kd3kh3kw3sd2sh2sw2pd1ph1pw1",  # 3-d
]


def _problem(text: str, channels_last: bool) -> ConvProblem:
    problem = ConvProblem.from_descriptor(text)
    if not channels_last:
        return problem
    axes = problem.data_layout[2:]
    return problem.with_layouts(f"N{axes}C", f"O{axes}I" if problem.groups > 1 else f"{axes}IO", f"N{axes}C")


@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", SHAPES)
def test_shapes_where_tiles_do_not_fit(text, channels_last, direction):
    check_exact(_problem(text, channels_last), direction)


@pytest.mark.parametrize(
    "dtypes", [("float64",) * 3, ("float16",) * 3, ("bfloat16",) * 3, ("bfloat16", "float32", "float16")]
)
@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
def test_types_sum_in_the_accumulator(direction, dtypes):
    problem = ConvProblem.from_descriptor("mb2ic18ih7iw7oc20oh4ow4kh3kw3sh2sw2ph1pw1")
    check_exact(problem.with_dtypes(*dtypes), direction)
    check_exact(_problem(problem.descriptor, True).with_dtypes(*dtypes), direction)


TYPES_OF_GROUPS = {
    "g40mb2ic40ih13iw20oc40oh7ow10kh3kw3sh2sw2ph1pw1": "f64:f64:f64 f16:f16:f16 bf16:f32:f16",
    "g16mb1ic16ih9iw9oc32oh9ow9kh3kw3ph1pw1": "f64:f64:f64 f16:f16:f16 bf16:f32:f16",
    "g16mb1ic16ih9iw9oc16kh3kw3ph1pw1": "bf16:bf16:bf16 f32:bf16:f32",  # in place, and columns
    "g4mb1ic16ih9iw9oc16kh3kw3ph1pw1": "bf16:bf16:bf16 f64:f64:bf16 bf16:f64:f64 f64:f16:bf16",  # small groups
}


@pytest.mark.parametrize(("text", "dtypes"), [(t, d) for t, types in TYPES_OF_GROUPS.items() for d in types.split()])
@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
def test_types_of_groups(direction, text, dtypes):
    for channels_last in (False, True):
        problem = _problem(text, channels_last)
        check_exact(ConvProblem.from_descriptor(f"{problem.descriptor}_dt={dtypes}"), direction)


@pytest.mark.skipif(
    "avx512bw" not in set(map(str, codegen.llvm_get_cpu_features(tvm.target.Target(NATIVE)))), reason="needs AVX-512"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
@pytest.mark.parametrize("width", [3, 5, 9, 13])
def test_short_loops_of_narrow_results(width, direction, dtype):
    """LLVM's masked stores of one lane that is left (see loops._bfloat16), which it makes where gathers are cheap."""
    for text in (f"g16mb1ic16ih{width}oc32oh{width}kh3ph1", f"mb2ic7ih{width}oc{width}oh{width}kh3ph1"):
        problem = ConvProblem.from_descriptor(text).with_dtypes(*(dtype,) * 3)
        check_machine_code(problem, direction, {"kind": "llvm", "mcpu": "skylake-avx512"})


@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed):
    problem = random_problem(random.Random(1000 + seed))
    for direction in ALL_DIRECTIONS:
        check_exact(problem, direction)
