# SPDX-License-Identifier: Apache-2.0
"""cuDNN's runtime and its tuning, run: on a GPU that is the host (host_gpu/), with engines right and wrong."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DESCRIPTORS = (
    "mb2ic3ih5oc4kh3ph1",
    "g2mb2ic4ih6oc6kh3sh2ph0rh1_lay=NHWC:OHWI:NHWC",
    "mb2ic2iw9oc3kw3dw1pw1",
    "mb1ic2id4oc2kd2_dt=f64:f64:f64",
)


def calls() -> str:
    """What runs in a process of its own: calls of every direction and epilogue against float64, then the tuner."""
    import tests.gpu.test_cudnn as gpu_tests
    from tests.offload import host_gpu
    from tvm_convgrad.core.catalogue import DIRECTIONS
    from tvm_convgrad.core.exact import numbers_of
    from tvm_convgrad.core.problem import ConvProblem
    from tvm_convgrad.kernels.epilogue import Epilogue
    from tvm_convgrad.offload.cuda import local_target

    host_gpu.load()
    target = local_target()
    for descriptor, direction in itertools.product(DESCRIPTORS, DIRECTIONS):
        problem = ConvProblem.from_descriptor(descriptor)
        operands, wanted = numbers_of(problem, direction)
        assert np.array_equal(gpu_tests.Call(target, direction, problem)(operands), wanted), (direction, descriptor)
        acc = np.random.default_rng(0).integers(-9, 9, wanted.shape).astype(wanted.dtype)
        call = gpu_tests.Call(target, direction, problem, Epilogue(accumulate=True))
        for in_place in (False, True):
            assert np.array_equal(call([*operands, acc], in_place=in_place), wanted + acc), (direction, descriptor)
        if direction == "forward":
            bias = acc.ravel()[: problem.out_channels].copy()
            wide = bias.reshape([-1 if letter == "C" else 1 for letter in problem.grad_layout])
            call = gpu_tests.Call(target, direction, problem, Epilogue(bias=True, relu=True, accumulate=True))
            assert np.array_equal(call([*operands, bias, acc]), np.maximum(wanted + wide + acc, 0)), descriptor
    check_gradients_summed_in_place(target)
    gpu_tests.test_any_batch(target)
    gpu_tests.test_memory_that_is_not_aligned(target)
    return tuned(target)


def check_gradients_summed_in_place(target: object) -> None:
    """A program of two wgrads and their sum: the second call adds to the first one's result."""
    import tvm
    from tvm import relax

    from tvm_convgrad import op, partition
    from tvm_convgrad.core import reference
    from tvm_convgrad.core.problem import ConvProblem

    problem = ConvProblem.from_descriptor(DESCRIPTORS[0])
    builder, names = relax.BlockBuilder(), ("grad", "data") * 2
    params = [relax.Var(name, relax.TensorType(problem.tensors[name][0], "float32")) for name in names]
    with builder.function("main", params):
        with builder.dataflow():
            pairs = (params[:2], params[2:])
            made = [builder.emit(op.conv2d_backward_weight(*pair, kernel_size=3, padding=1)) for pair in pairs]
            total = builder.emit_output(relax.op.add(*made))
        builder.emit_func_output(total)
    module = partition(builder.get(), backends=["cudnn"], target=target)
    assert str(module).count("call_tir_inplace") == 1
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, problem.tensors[name][0]).astype("float32") for name in names]
    machine = relax.VirtualMachine(tvm.compile(module, target), tvm.cuda())
    found = machine["main"](*(tvm.runtime.tensor(array, tvm.cuda()) for array in arrays)).numpy()
    wanted = reference.backward_weight(problem, *arrays[:2]) + reference.backward_weight(problem, *arrays[2:])
    assert np.array_equal(found, wanted)


def tuned(target: object) -> str:
    """What the tuner finds, as JSON."""
    import tempfile

    from tvm_convgrad.core.problem import ConvProblem
    from tvm_convgrad.kernels.epilogue import Epilogue
    from tvm_convgrad.offload.cudnn.call import Call, Tensor
    from tvm_convgrad.offload.cudnn.gpu import Gpu
    from tvm_convgrad.offload.cudnn.settings import settings
    from tvm_convgrad.offload.cudnn.store import EngineStore, use_engines
    from tvm_convgrad.offload.cudnn.tuner import tune
    from tvm_convgrad.offload.cudnn.tuning_device import EngineError, Place

    gpu, problem = Gpu(target), ConvProblem.from_descriptor(DESCRIPTORS[0])
    work = [(Call("backward_weight", problem), 1), (Call("forward", problem, Epilogue(bias=True, relu=True)), 1)]
    with tempfile.TemporaryDirectory() as folder:
        store = EngineStore(Path(folder) / "t.json")
        outcomes = list(tune(work, gpu, settings(), store, 0.5))
        with use_engines(store):
            engine = gpu._library.engine("backward_weight", problem, Epilogue(), target)
    listed = gpu.candidates(work[0][0], 4)
    plan = gpu.plan(work[0][0], listed[1])
    places = [Place(gpu.memory(each.bytes), 0, each) for each in (*work[0][0].operands, work[0][0].result)]
    try:
        plan.run(places, Place(gpu.memory(99), 0, Tensor((99,), "uint8")), 1)
        short = "ran"
    except EngineError as error:
        short = str(error)
    told = [
        [o.status, o.gain, o.tried, o.detail, {str(each.index): reason for each, reason in o.thrown_out}]
        for o in outcomes
    ]
    return json.dumps({"outcomes": told, "device": gpu.device, "engine": str(engine), "short": short})


@pytest.mark.cuda
def test_on_the_host() -> None:
    program = "import tvm; from tests.offload.test_cudnn_on_the_host import calls; print(calls())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["outcomes"]) == 2
    for status, gain, tried, detail, thrown_out in found["outcomes"]:
        assert (status, tried) == ("better", 2)
        assert gain > 2
        assert detail.startswith("engine 1 (")
        assert "elements NaN" in thrown_out["2"]
        assert thrown_out["3"] == "writes outside: 1 bytes behind its result"
        assert thrown_out["4"].startswith("fails: cudnn: a convolution could not be run: the host refuses")
        assert set(thrown_out) == {"2", "3", "4"}
    assert found["device"] == "the host"
    assert "tuned: " in found["engine"]
    assert "the heuristics' first on the host; deterministic; 2 engines ranked for sm_90" in found["engine"]
    assert "99 bytes of workspace for an engine that needs 100" in found["short"]
