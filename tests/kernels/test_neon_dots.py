# SPDX-License-Identifier: Apache-2.0
"""Dot products of bfloat16 on Armv8.6 (bfdot): interpreted, as machine code, and run by an emulator if there is one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm

from tests.kernels.harness import compiled, forced
from tests.kernels.test_dot_products import SHAPES, _blank, _problem, _types_with_float32_result
from tvm_convgrad.codegen.hardware import CPUS, machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.exact import numbers_of, reduction_length
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.verify.interpreter import execute

NAME = "dot product GEMM"
TARGET = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v2"})
MACHINE = CPUS["NEON-BF16"]
CODES = {"float32": (2, 32), "bfloat16": (4, 16)}
"""Codes and bits of DLPack's types."""


def _function(problem: ConvProblem, direction: str, epilogue: Epilogue = NO_EPILOGUE):
    choice = forced(NAME)(problem, direction, MACHINE)
    assert choice.is_kernel, choice
    return chooser.build(problem, direction, MACHINE, choice, "main", epilogue)


def test_the_target_decides():
    wanted = {"neoverse-v2": "NEON-BF16", "neoverse-n2": "NEON-BF16", "cortex-a76": "NEON"}
    triple = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    found = {mcpu: machine_of(tvm.target.Target({**triple, "mcpu": mcpu})).name for mcpu in wanted}
    assert found == wanted
    assert machine_of(tvm.target.Target({**triple, "mattr": ["+v8.2a", "+bf16"]})).name == "NEON-BF16"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("text", SHAPES)
def test_small_integers_are_exact(text, channels_last, direction):
    """Interpreted: no masked loads, so that words are made one by one, in vectors of four words."""
    problem = _problem(text, channels_last=channels_last)
    operands, wanted = numbers_of(problem, direction, 0)
    result = _blank(problem, direction)
    assert execute(_function(problem, direction), [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


def test_fused_operations():
    problem = _problem("mb2ic19ih7oc18kh3ph1", channels_last=True)
    epilogue = Epilogue(accumulate=True, bias_grad=True)
    operands, sums = numbers_of(problem, "backward_weight", 1)
    result, bias = np.full_like(sums, 2), np.full(problem.out_channels, np.nan, sums.dtype)
    function = _function(problem, "backward_weight", epilogue)
    assert execute(function, [*map(np.ascontiguousarray, operands), result, bias]) == ""
    wanted = (REFERENCES["backward_weight"](problem, *operands).astype("float64") + 2).astype(sums.dtype)
    np.testing.assert_array_equal(result, wanted)
    np.testing.assert_array_equal(bias, operands[0].astype("float64").sum((0, 1, 2)).astype(sums.dtype))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_machine_code(direction):
    """The inner loops are the instruction; nothing is multiplied in float32, and no helper is called."""
    source = compiled(_function(_problem(SHAPES[0]), direction), TARGET).mod.inspect_source("s")
    assert len(re.findall(r"\tbfdot\t", source)) > 16
    assert not re.findall(r"\tfmla\t|\tbl\t.*convgrad_dot", source)


def _compiler() -> list[str]:
    """A C compiler for aarch64, or nothing."""
    cross = shutil.which("aarch64-linux-gnu-gcc")
    if cross is not None:
        return [cross]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu"]
    return []


EMULATOR = next(filter(None, map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64"))), None)
needs_emulator = pytest.mark.skipif(
    EMULATOR is None or not _compiler(),
    reason="compiled only: an emulator (qemu-aarch64) or a compiler for aarch64 (pip install '.[cross]') is missing",
)


def _emulated(function, arrays: list[np.ndarray], folder: Path) -> np.ndarray:
    """What a kernel stores to the last of some arrays, run by the emulator."""
    compiled(function, TARGET).mod.write_to_file(str(folder / "kernel.o"), "o")
    program, source = folder / "kernel", Path(__file__).with_name("call_kernel.c")
    alone = ["-O1", "-nostdlib", "-static", "-ffreestanding"]
    command = [*_compiler(), *alone, "-o", str(program), str(source), str(folder / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = np.int64(len(arrays)).tobytes()
    for array in arrays:
        code, bits = CODES[array.dtype.name]
        text += np.array([code, bits, array.ndim, array.nbytes, *array.shape], np.int64).tobytes() + array.tobytes()
    ran = subprocess.run([EMULATOR, "-cpu", "max", str(program)], input=text, capture_output=True, check=False)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    return np.frombuffer(ran.stdout, arrays[-1].dtype).reshape(arrays[-1].shape)


@pytest.mark.cross
@needs_emulator
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_emulated_code_is_exact(channels_last, direction, tmp_path):
    problem = _problem(SHAPES[1], channels_last=channels_last)
    operands, wanted = numbers_of(problem, direction, 3)
    arrays = [*map(np.ascontiguousarray, operands), _blank(problem, direction)]
    np.testing.assert_array_equal(_emulated(_function(problem, direction), arrays, tmp_path), wanted)


@pytest.mark.cross
@needs_emulator
def test_emulated_floats_are_within_the_bound_of_the_sum(tmp_path):
    """A sum of n products is rounded to odd 2 n times at most, by 2^-23 of the magnitudes each time."""
    problem = _problem("mb2ic33ih9oc18kh3ph1", *_types_with_float32_result("forward"))
    generator = np.random.default_rng(3)
    operands = [
        generator.standard_normal(problem.tensors[name][0]).astype(ml_dtypes.bfloat16)
        for name in DIRECTIONS["forward"].operands
    ]
    found = _emulated(_function(problem, "forward"), [*operands, _blank(problem, "forward")], tmp_path)
    wanted = REFERENCES["forward"](problem, *operands).astype("float64")
    magnitudes = REFERENCES["forward"](problem, *map(np.abs, operands)).astype("float64")
    unit, count = 2.0**-23, 2 * (reduction_length(problem, "forward") + 1)
    assert (np.abs(found - wanted) <= count * unit / (1 - count * unit) * magnitudes).all()
    assert (found != wanted).any()
