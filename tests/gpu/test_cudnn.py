# SPDX-License-Identifier: Apache-2.0
"""cuDNN on a GPU against float64, equal to the last bit, on small integers. `make test-gpu` skips nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

from tests import tiny
from tests.conftest import build_tiny
from tvm_convgrad import evaluate
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.cudnn.devices import arch_of
from tvm_convgrad.offload.cudnn.settings import VARIABLE
from tvm_convgrad.offload.registry import backend, load_runtime
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.verify.suite import SUITE

pytestmark = pytest.mark.gpu

MORE = (
    "mb2ic32ih14oc48kh3ph1_dt=f16:f16:f16_lay=NHWC:OHWI:NHWC",
    "mb2ic32ih14oc48kh3ph1_dt=bf16:bf16:bf16_lay=NHWC:OHWI:NHWC",
    "g32mb2ic32ih9oc32kh3sh2ph1_dt=f16:f16:f16_lay=NHWC:OHWI:NHWC",
    "g2mb2ic32ih9oc32kh3dh1ph2",
    "mb2ic8ih9oc8kh3ph0rh1",
)


@pytest.fixture(scope="module")
def target() -> Any:
    return local_target()  # a sentence where there is no GPU


class Call:
    """One call of the runtime, with tensors of the test's own, results full of NaN."""

    def __init__(self, target: Any, direction: str, problem: ConvProblem, epilogue: Epilogue = NO_EPILOGUE) -> None:
        cudnn = backend("cudnn")
        self.problem, self.direction = problem, direction
        load_runtime("cudnn", cudnn.library())
        numbers = cudnn.numbers(direction, problem, epilogue, target)
        self._block = (ctypes.c_int64 * len(numbers))(*numbers)
        self._run = tvm_ffi.get_global_func(cudnn.run_function)

    def __call__(
        self, operands: list[Any], problem: ConvProblem | None = None, in_place: bool = False, stream: Any = None
    ) -> Any:
        shape, dtype = (problem or self.problem).tensors[DIRECTIONS[self.direction].result]
        given = [tvm.runtime.tensor(operand, tvm.cuda(0)) for operand in operands]
        nothing = np.full(shape, np.nan).astype(numpy_dtype(dtype))
        result = given[-1] if in_place else tvm.runtime.tensor(nothing, tvm.cuda(0))
        self._run(ctypes.c_void_p(ctypes.addressof(self._block)), *given, result)
        tvm.cuda(0).sync(stream)
        return result.numpy()


def refused(target: Any, direction: str, problem: ConvProblem, epilogue: Epilogue = NO_EPILOGUE) -> str:
    cudnn = backend("cudnn")
    found = cudnn.refusal(direction, problem, epilogue, target) or cudnn.engine(direction, problem, epilogue, target)
    return "" if isinstance(found, Engine) else found


def test_exact(target: Any) -> None:
    """Every problem that the rules take, and there must be many."""
    right, wrong = 0, []
    for descriptor in (*SUITE, *MORE):
        problem = ConvProblem.from_descriptor(descriptor)
        for direction in DIRECTIONS:
            if refused(target, direction, problem):
                continue
            operands, wanted = numbers_of(problem, direction)
            call = Call(target, direction, problem)
            if all(np.array_equal(call(operands), wanted) for _ in range(2)):
                right += 1
            else:
                wrong.append(f"{direction} {descriptor}")
    assert wrong == []
    assert right >= 2 * len(SUITE)


def test_sums_and_epilogues(target: Any) -> None:
    done = set()
    narrow = "mb2ic8ih6oc16kh3ph1_dt=bf16:bf16:bf16_lay=NHWC:OHWI:NHWC"  # sums under 256
    for descriptor in ("mb2ic32ih9oc16kh3ph1", MORE[0], narrow, "g2mb2ic8ih9oc8kh3ph1"):
        problem = ConvProblem.from_descriptor(descriptor)
        rng = np.random.default_rng(0)
        for direction in DIRECTIONS:
            operands, wanted = numbers_of(problem, direction)
            acc = rng.integers(-9, 9, wanted.shape).astype(wanted.dtype)
            if not refused(target, direction, problem, Epilogue(accumulate=True)):
                call = Call(target, direction, problem, Epilogue(accumulate=True))
                for in_place in (False, True):
                    assert np.array_equal(call([*operands, acc], in_place=in_place), wanted + acc)
                done.add((direction, "accumulate"))
        operands, wanted = numbers_of(problem, "forward")
        bias = rng.integers(-9, 9, problem.out_channels).astype(wanted.dtype)
        wide = bias.reshape([-1 if letter == "C" else 1 for letter in problem.grad_layout])
        for relu in (False, True):
            epilogue = Epilogue(bias=True, relu=relu)
            if not refused(target, "forward", problem, epilogue):
                found = Call(target, "forward", problem, epilogue)([*operands, bias])
                assert np.array_equal(found, np.maximum(wanted + wide, 0) if relu else wanted + wide)
                done.add(("forward", f"bias {relu}"))
    assert {("backward_weight", "accumulate"), ("backward_data", "accumulate"), ("forward", "bias True")} <= done


def test_bitwise_repeatable(target: Any) -> None:
    problem = ConvProblem.from_descriptor("mb16ic40ih15oc24kh3ph1")
    rng = np.random.default_rng(0)
    for direction in DIRECTIONS:
        operands = [rng.standard_normal(problem.tensors[name][0], "float32") for name in DIRECTIONS[direction].operands]
        call = Call(target, direction, problem)
        assert len({call(operands).tobytes() for _ in range(10)}) == 1


def test_any_batch(target: Any) -> None:
    text = "mb{}ic8ih9oc12kh3ph1"
    call = Call(target, "backward_data", ConvProblem.from_descriptor(text.format("{n}")))
    for batch in (1, 5):
        problem = ConvProblem.from_descriptor(text.format(batch))
        operands, wanted = numbers_of(problem, "backward_data")
        assert np.array_equal(call(operands, problem), wanted)


def test_memory_that_is_not_aligned(target: Any) -> None:
    """A view that begins one element behind a boundary."""
    problem = ConvProblem.from_descriptor("mb2ic8ih9oc12kh3ph1")
    operands, wanted = numbers_of(problem, "forward")
    call = Call(target, "forward", problem)
    whole = np.concatenate([np.zeros(1, "float32"), operands[0].ravel()])
    base = tvm.runtime.tensor(whole, tvm.cuda(0))
    view = base._create_view(operands[0].shape, "float32", 4)
    result = tvm.runtime.tensor(np.full(wanted.shape, np.nan, "float32"), tvm.cuda(0))
    call._run(
        ctypes.c_void_p(ctypes.addressof(call._block)), view, tvm.runtime.tensor(operands[1], tvm.cuda(0)), result
    )
    assert np.array_equal(result.numpy(), wanted)


def test_the_current_stream(target: Any) -> None:
    device = tvm.cuda(0)
    problem = ConvProblem.from_descriptor("mb2ic32ih14oc48kh3ph1")
    operands, wanted = numbers_of(problem, "backward_weight")
    call = Call(target, "backward_weight", problem)
    stream = device.create_raw_stream()
    device.set_raw_stream(stream)
    try:
        found = call(operands, stream=stream)
    finally:
        device.set_raw_stream(0)
        device.free_raw_stream(stream)
    assert np.array_equal(found, wanted)


def test_workspace_limit(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "workspace=0")
    problem = ConvProblem.from_descriptor("mb2ic32ih14oc48kh3ph1")
    for direction in DIRECTIONS:
        found = backend("cudnn").engine(direction, problem, NO_EPILOGUE, target)
        assert not isinstance(found, Engine) or found.workspace == 0


def test_programs(target: Any) -> None:
    """Compiled, on this GPU: the call among TVM's own kernels."""
    for descriptor in ("mb2ic16ih9oc32kh3ph1", "g4mb2ic4ih9oc12kh3sh2ph1"):
        problem = ConvProblem.from_descriptor(descriptor)
        operands, wanted = numbers_of(problem, "forward")
        attributes = {"strides": problem.strides, "padding": 1, "groups": problem.groups}
        found = evaluate("conv2d", *operands, impl="cudnn", target=target, **attributes)
        assert np.array_equal(found, wanted)


def test_the_properties_of_this_gpu(target: Any) -> None:
    from tvm_convgrad.offload.cudnn.devices import DEVICES

    arch = arch_of(target)
    assert arch in DEVICES, f"{arch} is not among {', '.join(DEVICES)}: rules and lists are not checked for it"
    text = backend("cudnn").function("properties")(0)
    print(text)
    assert "json" not in str(text)


def test_a_step(target: Any, tiny_model: str, tiny_step: Path, tmp_path: Path) -> None:
    """The losses of a step on the GPU are those of the CPU's."""
    step = build_tiny(tiny_model, tmp_path / "gpu.so", backends=("cudnn",), target=target, lr=0.1, momentum=0.9)
    x, y = tiny.make_arrays(tiny.BATCH, 3)
    found = [[session.step(x, y)[0] for _ in range(8)] for session in (Session(step), Session(tiny_step))]
    np.testing.assert_allclose(*found, rtol=1e-4)
