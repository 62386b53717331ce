# SPDX-License-Identifier: Apache-2.0
"""CUTLASS on a GPU: the calls that the host has emulated, equal to the last bit, from the kernels themselves."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

from tests.offload.cutlass.emulation import Case, expected
from tests.offload.test_cutlass_kernels import cases
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.cutlass.backend import VARIABLE, kernel_library
from tvm_convgrad.offload.registry import backend, load_runtime

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target() -> Any:
    return local_target()  # a sentence where there is no GPU


def few() -> list[Case]:
    """A call for each form and math of the set; nvcc takes ten seconds and more for each."""
    found = {}
    for case in cases():
        if case.arch >= 80 and not case.slices:
            found.setdefault((case.choice.instance.form, case.choice.instance.math, case.epilogue), case)
    return list(found.values())


def test_exact(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cutlass, every = backend("cutlass"), few()
    arch = int(str(target.attrs["arch"]).removeprefix("sm_").rstrip("af"))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda case: kernel_library(replace(case.choice.instance, arch=arch)), every))
    load_runtime("cutlass", cutlass.library())
    for case in every:
        monkeypatch.setenv(VARIABLE, case.float32)
        assert isinstance(cutlass.engine(case.direction, case.problem, case.epilogue, target), Engine)
        numbers = cutlass.numbers(case.direction, case.problem, case.epilogue, target)
        block = (ctypes.c_int64 * len(numbers))(*numbers)
        operands, wanted = expected(case)
        result = tvm.runtime.tensor(np.full(wanted.shape, np.nan).astype(wanted.dtype), tvm.cuda(0))
        given = [tvm.runtime.tensor(operand, tvm.cuda(0)) for operand in operands]
        for _ in range(2):
            tvm_ffi.get_global_func(cutlass.run_function)(ctypes.c_void_p(ctypes.addressof(block)), *given, result)
            assert np.array_equal(result.numpy(), wanted), (case, case.choice.instance.name)
