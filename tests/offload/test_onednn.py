# SPDX-License-Identifier: Apache-2.0
"""oneDNN against float64, equal to the last bit, on small integers; into memory full of NaN, with a dirty workspace."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.libraries import installed_file
from tvm_convgrad.offload.registry import backend
from tvm_convgrad.verify.suite import SUITE

pytestmark = pytest.mark.onednn

MORE = (
    "mb2ic32ih14oc48kh3ph1",  # channels in blocks
    "mb2ic32ih14oc48kh3ph1_lay=NHWC:HWIO:NHWC",
    "g32mb2ic32ih9oc32kh3sh2ph1_lay=NHWC:OHWI:NHWC",
    "g2mb2ic32ih9oc32kh3dh1ph2_lay=HWNC:HWOI:CHWN",
    "mb2ic3iw7ih9oc4kw2kh3pw0ph2rw3rh1_lay=NWHC:OWHI:NCWH",
    "mb1ic4id4oc6kd3pd1_lay=NDHWC:ODHWI:NDHWC",
    "g2mb2ic8iw16oc6kw3dw2pw2rw0",
    "mb2ic32ih9oc32kh3ph1_dt=bf16:bf16:bf16_lay=NHWC:OHWI:NHWC",
    "g8mb2ic8ih9oc8kh3sh2ph1_dt=bf16:bf16:bf16",
    "mb2ic16ih9oc16kh1_dt=bf16:bf16:bf16",
)
PROBLEMS = [text for text in (*SUITE, *MORE) if "f64" not in text and "f16:f16:f16" not in text.replace("bf16", "")]


def dirty(size: int) -> None:
    """Fill the piece of workspace that the next call on this thread gets with NaN."""
    library = ctypes.CDLL(None)
    library.TVMBackendAllocWorkspace.restype = ctypes.c_void_p
    library.TVMBackendAllocWorkspace.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    library.TVMBackendFreeWorkspace.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    data = library.TVMBackendAllocWorkspace(1, 0, size, 1, 8)
    ctypes.memset(data, 0xFF, size)
    library.TVMBackendFreeWorkspace(1, 0, data)


class Call:
    """One call of the runtime, with tensors of the test's own."""

    def __init__(self, direction: str, problem: ConvProblem, epilogue: Epilogue = NO_EPILOGUE) -> None:
        onednn = backend("onednn")
        assert onednn.refusal(direction, problem, epilogue, None) == ""
        engine = onednn.engine(direction, problem, epilogue, None)
        assert isinstance(engine, Engine), engine
        self.engine = engine
        numbers = onednn.numbers(direction, problem, epilogue, None)
        self._block = (ctypes.c_int64 * len(numbers))(*numbers)
        self._run = tvm_ffi.get_global_func(onednn.run_function)

    def __call__(self, operands: list[Any], results: list[tuple[tuple[int, ...], str]]) -> list[np.ndarray]:
        found = [tvm.runtime.tensor(np.full(shape, np.nan).astype(numpy_dtype(dtype))) for shape, dtype in results]
        self.run(*(tvm.runtime.tensor(operand) for operand in operands), *found)
        return [tensor.numpy() for tensor in found]

    def run(self, *tensors: Any) -> None:
        dirty(max(self.engine.workspace, 64))
        self._run(ctypes.c_void_p(ctypes.addressof(self._block)), *tensors)


def result_of(direction: str, problem: ConvProblem) -> tuple[tuple[int, ...], str]:
    return problem.tensors[DIRECTIONS[direction].result]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_exact(direction: str, descriptor: str) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    operands, wanted = numbers_of(problem, direction)
    call = Call(direction, problem)
    (found,) = call(operands, [result_of(direction, problem)])
    assert np.array_equal(found, wanted)
    assert np.array_equal(call(operands, [result_of(direction, problem)])[0], wanted)


@pytest.mark.parametrize("descriptor", ["mb2ic16ih9oc16kh3ph1", "mb2ic16ih9oc16kh1_lay=NHWC:OHWI:NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bfloat16_with_a_float32_result(direction: str, descriptor: str) -> None:
    plain = ConvProblem.from_descriptor(descriptor)
    types = {name: "float32" if name == DIRECTIONS[direction].result else "bfloat16" for name in plain.tensors}
    problem = plain.with_dtypes(types["data"], types["weight"], types["grad"])
    operands, wanted = numbers_of(problem, direction)
    assert np.array_equal(Call(direction, problem)(operands, [result_of(direction, problem)])[0], wanted)


EPILOGUES = (
    "mb2ic32ih9oc16kh3ph1",
    "mb2ic32ih9oc16kh1",
    "mb2ic8ih9oc12kh3ph1_lay=NHWC:HWIO:NHWC",
    "g8mb2ic8ih9oc8kh3ph1",
    "mb2ic16ih9oc16kh3ph1_dt=bf16:bf16:bf16",
)


@pytest.mark.parametrize("descriptor", EPILOGUES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sums(direction: str, descriptor: str) -> None:
    """In memory of their own, and in the place of the summand, more than once."""
    problem = ConvProblem.from_descriptor(descriptor)
    operands, wanted = numbers_of(problem, direction)
    acc = np.random.default_rng(0).integers(-9, 9, wanted.shape).astype(wanted.dtype)
    call = Call(direction, problem, Epilogue(accumulate=True))
    (found,) = call([*operands, acc], [result_of(direction, problem)])
    assert np.array_equal(found, wanted + acc)
    place, given = tvm.runtime.tensor(acc), [tvm.runtime.tensor(operand) for operand in operands]
    for _ in range(2):
        call.run(*given, place, place)
        acc = acc + wanted
        assert np.array_equal(place.numpy(), acc)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("descriptor", EPILOGUES[:4])
def test_bias(descriptor: str, accumulate: bool) -> None:
    problem = ConvProblem.from_descriptor(descriptor)
    operands, wanted = numbers_of(problem, "forward")
    rng = np.random.default_rng(0)
    bias = rng.integers(-9, 9, problem.out_channels).astype("float32")
    acc = rng.integers(-9, 9, wanted.shape).astype("float32") * accumulate
    wide = bias.reshape([-1 if letter == "C" else 1 for letter in problem.grad_layout])
    call = Call("forward", problem, Epilogue(bias=True, accumulate=accumulate))
    (found,) = call([*operands, bias, *([acc] if accumulate else [])], [result_of("forward", problem)])
    assert np.array_equal(found, wanted + wide + acc)


@pytest.mark.parametrize("descriptor", [*EPILOGUES, "mb2ic16ih9oc16kh3ph1_dt=bf16:f32:bf16"])
def test_bias_gradient(descriptor: str) -> None:
    """Alone, and with sums in place: of the weight's, and of both."""
    problem = ConvProblem.from_descriptor(descriptor)
    operands, wanted = numbers_of(problem, "backward_weight")
    results = [result_of("backward_weight", problem), ((problem.out_channels,), problem.kernel_dtype)]
    dw, db = Call("backward_weight", problem, Epilogue(bias_grad=True))(operands, results)
    axes = tuple(axis for axis, letter in enumerate(problem.grad_layout) if letter != "C")
    assert np.array_equal(dw, wanted)
    wanted_bias = operands[0].astype("float64").sum(axes).astype(db.dtype)
    assert np.array_equal(db, wanted_bias)
    given, sums = [tvm.runtime.tensor(operand) for operand in operands], [tvm.runtime.tensor(each) for each in (dw, db)]
    fresh = tvm.runtime.tensor(np.full_like(db, np.nan))
    Call("backward_weight", problem, Epilogue(accumulate=True, bias_grad=True)).run(*given, sums[0], sums[0], fresh)
    assert np.array_equal(fresh.numpy(), wanted_bias)
    both = Epilogue(accumulate=True, bias_grad=True, bias_accumulate=True)
    Call("backward_weight", problem, both).run(*given, *sums, *sums)
    assert np.array_equal(sums[0].numpy(), wanted + wanted + wanted)
    assert np.array_equal(sums[1].numpy(), wanted_bias + wanted_bias)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bitwise_repeatable(direction: str) -> None:
    problem = ConvProblem.from_descriptor("mb3ic40ih15oc24kh3ph1")
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(problem.tensors[name][0], "float32") for name in DIRECTIONS[direction].operands]
    call = Call(direction, problem)
    first = call(operands, [result_of(direction, problem)])[0]
    for _ in range(5):
        assert call(operands, [result_of(direction, problem)])[0].tobytes() == first.tobytes()


def test_threads_call_at_the_same_time() -> None:
    """Primitives for a batch are made by whoever meets it first, sums go to a place of each thread's own."""
    text, batches = "mb{}ic32ih14oc48kh3ph1", (2, 3)
    calls = {
        direction: Call(direction, ConvProblem.from_descriptor(text.format("{n}")), Epilogue(accumulate=True))
        for direction in DIRECTIONS
    }
    known = {
        (direction, n): numbers_of(ConvProblem.from_descriptor(text.format(n)), direction)
        for n in batches
        for direction in DIRECTIONS
    }
    together, right = threading.Barrier(4), []

    def work() -> None:
        for (direction, n), (operands, wanted) in known.items():
            given, place = [tvm.runtime.tensor(o) for o in operands], tvm.runtime.tensor(np.zeros_like(wanted))
            together.wait(60)
            for times in range(1, 6):
                calls[direction].run(*given, place, place)
                right.append((direction, n, times, np.array_equal(place.numpy(), times * wanted)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 4 * 5 * len(known)
    assert [entry for entry in right if not entry[-1]] == []


def test_primitives_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN says itself what it makes and what it executes."""
    problem = ConvProblem.from_descriptor("mb2ic24ih15oc40kh3ph1")
    library, c = ctypes.CDLL(str(installed_file("onednn-cpu-gomp", "libdnnl.so.3"))), ctypes.CDLL(None)
    operands, wanted = numbers_of(problem, "backward_weight")
    said = []
    library.dnnl_set_verbose(2)
    try:
        call = Call("backward_weight", problem)
        for _ in range(2):
            assert np.array_equal(call(operands, [result_of("backward_weight", problem)])[0], wanted)
            c.fflush(None)
            said.append(capfd.readouterr().out)
    finally:
        library.dnnl_set_verbose(0)
    for text, made in zip(said, (True, False), strict=True):
        assert (",create" in text) == made
        assert ",exec" in text


def test_tensors_that_are_missing() -> None:
    problem = ConvProblem.from_descriptor("mb2ic16ih9oc16kh3ph1")
    operands, _ = numbers_of(problem, "forward")
    with pytest.raises(ValueError, match=r"onednn: 2 tensors where 3 are expected"):
        Call("forward", problem)(operands, [])


def test_any_batch_reads_it_from_the_first_tensor() -> None:
    text = "mb{}ic8ih9oc12kh3ph1_lay=CNHW:OIHW:NHWC"
    call = Call("backward_data", ConvProblem.from_descriptor(text.format("{n}")))
    for batch in (1, 5):
        problem = ConvProblem.from_descriptor(text.format(batch))
        operands, wanted = numbers_of(problem, "backward_data")
        assert np.array_equal(call(operands, [result_of("backward_data", problem)])[0], wanted)


def test_the_runtime_lies_in_the_cache() -> None:
    library = backend("onednn").library()
    assert library.parent.parent == libraries.cache_folder()
    assert libraries.built(library.parent, library.name) == library
