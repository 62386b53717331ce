# SPDX-License-Identifier: Apache-2.0
"""cuDNN and CUTLASS in Relay, without a GPU: verdicts are those of Relax, and generated code is compiled for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.ir import call_of
from relay_ops.partition import partition, partition_for_cudnn, verdicts
from tests.relay_ops.harness import call_program, typed, variables
from tvm_convgrad import ConvProblem
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.registry import verdict

TARGET = "cuda -arch=sm_90"
HALF = "mb2ic16ih9oc8kh3ph1_dt=f16:f16:f16_lay=NHWC:OHWI:NHWC"
PROBLEMS = (
    HALF,
    "mb2ic64ih14oc64kh3ph1",
    "g2mb2ic4ih9oc6kh3sh2ph1",
    "g8mb2ic8ih9oc8kh3sh2dh1ph1_lay=NHWC:OHWI:NHWC",
    "mb2ic4ih9oc6kh3sh2ph1_dt=f64:f64:f64",
    "mb2ic8ih9oc8kh3sh2ph1_dt=bf16:bf16:bf16",
    "mb1ic4id5oc6kd3pd1",
    "mb2ic4iw9oc6kw3pw0rw1",
    "mb2ic4ih9oc6kh3ph1_dt=f16:f32:f16",
)
SAID = """
import json, sys
import tvm
from tvm_convgrad import ConvProblem
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.offload.registry import verdict
target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
said = {}
for text in sys.argv[1:]:
    for direction in ("forward", "backward_weight", "backward_data"):
        for accumulate in (False, True):
            problem, epilogue = ConvProblem.from_descriptor(text), Epilogue(accumulate=accumulate)
            said[f"{text} {direction} {accumulate}"] = str(verdict("cudnn", direction, problem, epilogue, target))
print(json.dumps(said))
"""


def exported(module, folder):
    """The only region of a module, in a library."""
    ((variable, region),) = ((v, f) for v, f in module.functions.items() if f.attrs and "Compiler" in f.attrs)
    path = str(folder / "region.so")
    tvm.get_global_func(f"relay.ext.{region.attrs['Compiler']}")(region).export_library(path)
    shapes = [
        [int(extent) for extent in ty.shape] for ty in (*(p.checked_type for p in region.params), region.ret_type)
    ]
    return tvm.runtime.load_module(path)[variable.name_hint], shapes, region


def test_verdicts_of_cudnn_are_those_of_relax():
    """Engines and reasons, word by word, from the TVM of today in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TVM_LIBRARY_PATH"}  # of Relay's TVM
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] += os.pathsep + os.environ["CONVGRAD_GPU_PACKAGES"]
    python = os.environ["CONVGRAD_RELAX_PYTHON"]
    done = subprocess.run([python, "-c", SAID, *PROBLEMS], check=True, capture_output=True, text=True, env=environment)
    relax, target = json.loads(done.stdout), tvm.target.Target(TARGET)
    assert len(relax) == 6 * len(PROBLEMS)
    taken = 0
    for key, wanted in relax.items():
        text, direction, accumulate = key.split()
        epilogue = Epilogue(accumulate=accumulate == "True")
        found = verdict("cudnn", direction, ConvProblem.from_descriptor(text), epilogue, target)
        taken += isinstance(found, Engine)
        assert str(found) == wanted, key
    assert taken >= len(relax) // 2


def test_cutlass_refuses_what_it_has_no_kernel_for():
    """Groups above all, of which upstream's own code generator knows nothing."""
    for direction in (BACKWARD_WEIGHT, BACKWARD_DATA):
        program = call_program(direction, ConvProblem.from_descriptor(PROBLEMS[3]))
        (found,) = verdicts(program, ["cutlass", "cudnn"], TARGET)
        assert found.backend == "cudnn"
        assert "the kernel has no groups" in found.refused["cutlass"]
        (unasked,) = verdicts(program, None, TARGET)
        assert unasked.backend == "cudnn"
    (found,) = verdicts(
        call_program(FORWARD, ConvProblem.from_descriptor("mb2ic8ih9oc8kh3")), ["cutlass", "cudnn"], TARGET
    )
    assert "layouts NCHW" in found.refused["cutlass"]


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=lambda direction: direction.name)
@pytest.mark.parametrize("text", [HALF, PROBLEMS[4]])
def test_regions_of_cudnn(text, direction, tmp_path):
    """With their epilogues: the generated code is compiled, opens the runtime, and finds that there is no GPU."""
    problem = ConvProblem.from_descriptor(text)
    operands = variables(problem, *direction.operands)
    expr = call_of(direction, problem, *operands)
    shape, dtype = problem.tensors[direction.result]
    if direction is FORWARD:
        operands.append(relay.var("bias", shape=(problem.out_channels,), dtype=dtype))
        expr = relay.nn.relu(relay.nn.bias_add(expr, operands[-1], axis=problem.grad_layout.index("C")))
    else:
        operands.append(relay.var("summand", shape=shape, dtype=dtype))
        expr = relay.add(operands[-1], expr)
    module = partition_for_cudnn(typed(relay.Function(operands, expr)), target=TARGET)
    function, shapes, region = exported(module, tmp_path)
    assert len(shapes) == 4, "the epilogue is in the region"
    assert str(region.attrs["convgrad.target"]).endswith("-arch=sm_90 -max_num_threads=1024 -thread_warp_size=32")
    with pytest.raises(ValueError, match="is not on an NVIDIA GPU"):
        function(*(tvm.nd.array(np.zeros(each, dtype)) for each in shapes))


def test_a_region_of_cutlass(tmp_path):
    """One kernel, compiled by nvcc for sm_90."""
    module = partition(call_program(BACKWARD_WEIGHT, ConvProblem.from_descriptor(HALF)), ["cutlass"], TARGET)
    function, shapes, _ = exported(module, tmp_path)
    with pytest.raises(ValueError, match="not in the memory of an NVIDIA GPU"):
        function(*(tvm.nd.array(np.zeros(each, "float16")) for each in shapes))
