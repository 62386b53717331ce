"""Products of tiles of float16 (AMX-FP16): the kernels are those of bfloat16 (test_tile_products.py) but for the types.

Processes without such tiles run the loops that convert to float32.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm

from tests.kernels.harness import compiled, forced
from tests.kernels.test_dot_products import _blank, _problem, _types_with_float32_result
from tests.kernels.test_tile_products import WIDE, needs_dots
from tests.kernels.test_weight_tiles import PROBLEMS, STEM
from tests.kernels.tile_emulation import emulated
from tests.kernels.tile_kernels import AVX512, TileKernel, needs_avx512, run_without_tiles
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.cpu_features import tile_refusal
from tvm_convgrad.core.exact import numbers_of, reduction_length
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.roofline import roofline
from tvm_convgrad.targets import required_features
from tvm_convgrad.verify.interpreter import execute

NAME = "AMX-FP16 GEMM"
MACHINE = CPUS["AMX-FP16"]
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "cooperlake", "mattr": ["+amx-tile", "+amx-bf16", "+amx-fp16"]})
KERNEL = TileKernel(NAME, MACHINE, TARGET)
_function, _ran = KERNEL.function, KERNEL.ran
GRANITE = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "graniterapids"})
HALVES = ("float16",) * 3
needs_half_tiles = pytest.mark.skipif(
    tile_refusal("amx-fp16") != "", reason=f"no product of float16 is executed: {tile_refusal('amx-fp16')}"
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", [*WIDE[::2], *PROBLEMS[:3]])
def test_small_integers_are_exact(text, channels_last, direction):
    """Interpreted, in local memory full of NaN."""
    problem = _problem(text, *HALVES, channels_last=channels_last)
    operands, wanted = numbers_of(problem, direction, 0)
    result = _blank(problem, direction)
    assert execute(_function(problem, direction), [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@needs_avx512
@pytest.mark.parametrize("how", ["emulated", "refused", pytest.param("as it is", marks=needs_dots)])
@pytest.mark.parametrize(
    ("text", "direction", "channels_last"),
    [(WIDE[-3], "forward", True), (WIDE[-2], "backward_data", False), (STEM, "backward_weight", True)],
)
def test_machine_code_is_exact(text, direction, channels_last, how, tmp_path):
    """Emulated on the threads of the pool; without the permission; and asking CPU and Linux itself."""
    problem = _problem(text, *HALVES, channels_last=channels_last)
    operands, wanted = numbers_of(problem, direction, 3)
    function, target = _function(problem, direction), TARGET
    if how != "as it is":
        function, target = emulated(function, granted=how == "emulated"), AVX512
    np.testing.assert_array_equal(_ran(function, problem, direction, operands, tmp_path, target), wanted)


@needs_half_tiles
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", WIDE)
def test_executed_instructions_are_exact(text, direction, tmp_path):
    problem = _problem(text, *HALVES, channels_last=True)
    operands, wanted = numbers_of(problem, direction, 6)
    np.testing.assert_array_equal(_ran(_function(problem, direction), problem, direction, operands, tmp_path), wanted)


@pytest.mark.parametrize("granted", [True, pytest.param(False, marks=needs_avx512)])
def test_a_batch_of_the_call_and_an_epilogue(granted, tmp_path):
    """dW and the bias gradient, whose sums read numbers of float16, not words; with tiles and without."""
    problem = replace(_problem("mb3ic18ih5iw7oc20kh3kw3ph1pw1", *HALVES, channels_last=True), batch="n")
    function = _function(problem, "backward_weight", Epilogue(accumulate=True, bias_grad=True, bias_accumulate=True))
    known = replace(problem, batch=5)
    (grad, data), _ = numbers_of(known, "backward_weight", 1)
    before, bias = np.full(known.weight_shape, 2.0, "float16"), np.full(known.out_channels, 3.0, "float16")
    wanted = REFERENCES["backward_weight"](known, grad, data).astype("float64") + before
    wanted_bias = grad.astype("float64").sum(axis=(0, 1, 2)) + bias
    arrays = [np.ascontiguousarray(grad), np.ascontiguousarray(data), before, bias]
    if granted:
        assert execute(function, arrays, 5) == ""
    else:
        run_without_tiles(function, arrays, tmp_path)
    np.testing.assert_array_equal(before, wanted.astype("float16"))
    np.testing.assert_array_equal(bias, wanted_bias.astype("float16"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_random_floats_are_within_the_bound_of_the_sum(direction):
    """Products of two float16 are exact in float32; denormal operands count: some are as small as 2^-24."""
    types = tuple("float16" if dtype == "bfloat16" else dtype for dtype in _types_with_float32_result(direction))
    problem = _problem("mb1ic34ih6iw7oc18kh3kw3ph1pw1", *types)
    generator = np.random.default_rng(3)
    operands = []
    for name in DIRECTIONS[direction].operands:
        values = generator.standard_normal(problem.tensors[name][0])
        small = generator.random(values.shape) < 0.5
        operands.append(np.where(small, values * 2.0**-17, values).astype("float16"))
    assert any(((abs(array) < 2.0**-14) & (array != 0)).any() for array in operands)
    found = _blank(problem, direction)
    assert execute(_function(problem, direction), [*operands, found]) == ""
    wanted = REFERENCES[direction](problem, *operands).astype("float64")
    magnitudes = REFERENCES[direction](problem, *map(np.abs, operands)).astype("float64")
    unit, count = 2.0**-24, reduction_length(problem, direction) + 1
    assert (np.abs(found - wanted) <= count * unit / (1 - count * unit) * magnitudes).all()
    assert (found != wanted).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_machine_code(direction):
    """Products of float16 only; CPU and Linux are asked in functions of their own."""
    problem = _problem("mb2ic64ih14iw14oc64kh3kw3ph1pw1", *HALVES, channels_last=True)
    source = compiled(_function(problem, direction), GRANITE).mod.inspect_source("s")
    counts = {name: len(re.findall(rf"\t{name}\t?", source)) for name in ("tdpfp16ps", "ldtilecfg", "cpuid", "syscall")}
    assert counts["tdpfp16ps"] >= 4
    assert counts["ldtilecfg"] == counts["cpuid"] == counts["syscall"] == 1
    assert "tdpbf16ps" not in source
    assert "vfmadd" in source, "the loops of a process without tiles"
    called = set(re.findall(r"\tcallq?\t\*?(convgrad_tile\w*)", source))
    assert called <= {"convgrad_tile_ready", "convgrad_tile_ready_half"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_target_decides(direction):
    problem = _problem("mb8ic64ih56oc64kh3ph1", *HALVES)
    taken = chooser.choose(problem, direction, MACHINE)
    assert taken.name == f"{NAME} {DIRECTIONS[direction].short}"
    other = chooser.choose(problem, direction, CPUS["AMX-BF16"])
    assert not other.name.startswith("AMX")
    assert taken.estimate < other.estimate
    assert roofline(problem, MACHINE) < roofline(problem, CPUS["AMX-BF16"])
    mixed = problem.with_dtypes("float16", "bfloat16", "float16" if direction != "backward_weight" else "bfloat16")
    assert not chooser.choose(mixed, direction, MACHINE).name.startswith("AMX")
    assert "AMX-BF16 has no tiles of float16" in forced(NAME)(problem, direction, CPUS["AMX-BF16"]).reason


def test_artifacts_load_without_tiles():
    """Kernels of float16 have loops without tiles as well."""
    assert "amx-fp16" not in required_features(GRANITE)
