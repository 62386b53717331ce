# SPDX-License-Identifier: Apache-2.0
"""Kernels of CUTLASS on the host: what emulate.h does, compiled by a C++ compiler, and called with numpy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.calls import call_numbers
from tvm_convgrad.offload.cutlass import kernels, rules, source
from tvm_convgrad.offload.cutlass.kernels import Choice, Instance, choose
from tvm_convgrad.offload.cutlass.toolchain import required

HERE = Path(__file__).parent
RUNTIME = Path(kernels.__file__).parent / "runtime"
WORKERS = 2
IN_PTX = (
    "conv2d_dgrad_output_gradient_tile_access_iterator_optimized.h",
    "conv2d_dgrad_filter_tile_access_iterator_optimized.h",
)
"""Headers that choose the next tap by PTX, with the same in C++ beside it, after #if 0: that is compiled here."""

TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One call: the direction of a problem, for a GPU; `slices` of the sum, if it is not as many as are chosen."""

    direction: str
    descriptor: str
    epilogue: Epilogue = NO_EPILOGUE
    arch: int = 80
    float32: str = "simt"
    slices: int = 0

    @property
    def problem(self) -> ConvProblem:
        return ConvProblem.from_descriptor(self.descriptor)

    @property
    def found(self) -> Choice | str:
        """What computes it, or why nothing."""
        refused = rules.refusal(self.direction, self.problem, self.epilogue)
        return refused or choose(self.direction, self.problem, self.epilogue, self.arch, self.float32, 1)

    @property
    def choice(self) -> Choice:
        """What computes it, for no GPU in particular."""
        found = self.found
        assert isinstance(found, Choice), (self, found)
        return replace(found, instance=replace(found.instance, arch=0), slices=self.slices or found.slices)


class Emulated:
    """Instances on the host, by their names: compiled once, one file for all of a form."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        by_form: dict[str, list[Instance]] = {}
        for instance in dict.fromkeys(instances):
            by_form.setdefault(instance.form.name, []).append(instance)
        with ThreadPoolExecutor(WORKERS) as pool:
            libraries_made = pool.map(_compiled, by_form.values())
        self._functions = {
            instance: getattr(library, f"emulate_{place}")
            for library, group in zip(libraries_made, by_form.values(), strict=True)
            for place, instance in enumerate(group)
        }

    def run(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """What the kernel gives, and what is right."""
        problem, choice = case.problem, case.choice
        operands, wanted = expected(case)
        found = np.full(wanted.shape, np.nan).astype(wanted.dtype)
        apart = choice.instance.output != choice.instance.result
        slices = np.full((choice.slices if apart else 0, *wanted.shape), np.nan, "float32")
        tensors = [np.ascontiguousarray(array) for array in (*operands, found)]
        numbers = [*call_numbers(case.direction, problem, case.epilogue, TYPES), choice.slices, 0]
        error = self._functions[choice.instance](
            (ctypes.c_int64 * len(numbers))(*numbers),
            (ctypes.c_void_p * len(tensors))(*(array.ctypes.data for array in tensors)),
            (ctypes.c_int64 * len(tensors))(*(array.nbytes for array in tensors)),
            ctypes.c_void_p(slices.ctypes.data if apart else None),
            ctypes.c_int64(slices.nbytes),
        )
        assert error is None, f"{case.direction} {case.descriptor}, {choice.instance.name}: {error.decode()}"
        if apart:
            summand = operands[2].astype("float64") if case.epilogue.accumulate else 0
            return (slices.astype("float64").sum(0) + summand).astype(wanted.dtype), wanted
        return tensors[-1], wanted


def expected(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """The tensors that a call takes, small integers, and its result."""
    problem, epilogue = case.problem, case.epilogue
    operands, wanted = numbers_of(problem, case.direction)
    rng = np.random.default_rng(0)
    exact = wanted.astype("float64")
    for shape in ((problem.out_channels,) if epilogue.bias else None, wanted.shape if epilogue.accumulate else None):
        if shape is not None:
            operands.append(rng.integers(-9, 9, shape).astype(wanted.dtype))
            exact = exact + operands[-1].astype("float64")
    return operands, (np.maximum(exact, 0) if epilogue.relu else exact).astype(wanted.dtype)


def _compiled(group: list[Instance]) -> ctypes.CDLL:
    """The library of a form's instances, kept from run to run."""
    tools = required()
    headers, cuda = tools.headers, tools.nvcc.parents[1] / "include"
    template = group[0].form.template.lower()
    text = (
        f'#include "device.h"\n#include "emulate.h"\n#include "cutlass/conv/kernel/default_conv2d_{template}.h"\n'
        + "".join(
            f"""namespace {{
template <typename = void> struct K{place} {{ using Kernel = {source.kernel_type(instance)}; }};
}}
extern "C" const char* emulate_{place}(const convgrad::Call* call, void* const* tensors, const int64_t* bytes,
                                       void* slices, int64_t slices_bytes) {{
  return convgrad::Emulate<K{place}<>::Kernel>(*call, tensors, bytes, slices, slices_bytes);
}}
"""
            for place, instance in enumerate(group)
        )
    )
    digest = hashlib.sha256(text.encode())
    for header in sorted([*HERE.rglob("*.h"), *RUNTIME.glob("*.h")]):
        digest.update(header.read_bytes())
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "a C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        for name in IN_PTX:
            own = Path("cutlass/conv/threadblock") / name
            lines = (headers / own).read_text()
            assert lines.count("#if 0") == 1
            (Path(folder) / own).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / own).write_text(lines.replace("#if 0", "#if 1"))
        library = libraries.build(
            f"emulated-{group[0].form.name}",
            digest.hexdigest()[:16],
            "libemulated.so",
            text,
            [*(f"-I{each}" for each in (folder, HERE, RUNTIME, headers)), f"-isystem{cuda}", f"-isystem{cuda}/cccl"],
            command=[compiler, "-std=c++17", "-O1", "-w", "-fpermissive", "-fPIC", "-shared", "-x", "c++"],
        )
    loaded = ctypes.CDLL(str(library))
    for place in range(len(group)):
        getattr(loaded, f"emulate_{place}").restype = ctypes.c_char_p
    return loaded


__all__ = ["Case", "Emulated", "expected"]
