# SPDX-License-Identifier: Apache-2.0
"""Offload in Relay: the pattern table, the regions, the C source, and libraries that need nothing of this package."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.ir import call_of
from relay_ops.partition import NAME, partition, verdicts
from tests.relay_ops.harness import assert_equal, call_program, calls, execute, integers, typed, variables
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.offload.registry import ENTRIES

STRIDED = ConvProblem.from_descriptor("g2mb2ic4ih9oc6kh3sh2dh1ph1")


def regions(module):
    return {v.name_hint: f for v, f in module.functions.items() if f.attrs and str(f.attrs.get("Compiler", "")) == NAME}


def exported(module, path):
    with tvm.transform.PassContext(opt_level=3):
        relay.build(module, "llvm").export_library(str(path))
    return tvm.runtime.load_module(str(path))


def test_table_is_registered_under_the_compilers_name():
    names = [name for name, *_ in relay.op.contrib.get_pattern_table(NAME)]
    wanted = [f"{NAME}.conv{r}d_backward_{f}" for r in (1, 2, 3) for f in ("weight", "data")]
    assert sorted(names) == sorted([*wanted, *(f"{name}_accumulate" for name in wanted)])
    for name in ENTRIES:
        compiler = f"{NAME}_{name}"
        table = [label for label, *_ in relay.op.contrib.get_pattern_table(compiler)]
        assert f"{compiler}.conv2d_backward_weight_accumulate" in table
        assert tvm.get_global_func(f"relay.ext.{compiler}")


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=lambda direction: direction.name)
@pytest.mark.parametrize(
    "text",
    [
        "g2mb2ic4ih9oc6kh3sh2dh1ph1_dt=f64:f64:f64",
        "mb2ic20ih23oc3kh3ph1",
        "mb2ic4ih9iw37oc6kh3kw3sh1sw2ph1pw1_lay=NHWC:OHWI:NHWC",
        "g2mb2ic4ih9oc6kh3ph1_lay=NHWC:HWIO:NCHW",
        "g3mb2ic3iw40oc6kw3dw2pw1_lay=NWC:WIO:NWC",
        "g2mb1ic4id6oc4kd2sd3pd1",
        "mb1ic2ih4oc3kh3sh5ph0rh2",
        "mb1ic1ih2oc1kh3ph2",
    ],
)
def test_c_loops_are_right(text, direction, tmp_path):
    problem = ConvProblem.from_descriptor(text)
    module = partition(call_program(direction, problem), ["c"], forward=True)
    assert len(regions(module)) == 1
    arrays = integers(problem)
    (found,) = execute(exported(module, tmp_path / "region.so"), {n: arrays[n] for n in direction.operands})
    assert_equal(found, reference.DIRECTIONS[direction.name](problem, *(arrays[n] for n in direction.operands)))


def chain():
    """Two dgrads and two wgrads in a row: one region with buffers between, three results, one of them used inside."""
    problem = ConvProblem.from_descriptor("mb2ic4ih9oc4kh3ph1")
    grad, weight, data = variables(problem, "grad", "weight", "data")
    first = call_of(BACKWARD_DATA, problem, grad, weight)
    second = call_of(BACKWARD_DATA, problem, first, weight)
    third = call_of(BACKWARD_DATA, problem, second, weight)
    kernel = call_of(BACKWARD_WEIGHT, problem, third, data)
    module = typed(relay.Function([grad, weight, data], relay.Tuple([second, kernel, third])))
    arrays = {name: np.sign(array) for name, array in integers(problem).items()}
    a = reference.backward_data(problem, arrays["grad"], arrays["weight"])
    b = reference.backward_data(problem, a, arrays["weight"])
    c = reference.backward_data(problem, b, arrays["weight"])
    return module, arrays, [b, reference.backward_weight(problem, c, arrays["data"]), c]


def test_a_region_of_several_operators(tmp_path):
    program, arrays, wanted = chain()
    module = partition(program, ["c"])
    (region,) = regions(module).values()
    assert len(calls(tvm.IRModule.from_expr(region), "nn.conv2d_backward_data")) == 3
    for found, want in zip(execute(exported(module, tmp_path / "chain.so"), arrays), wanted, strict=True):
        assert_equal(found, want)


def test_constants_become_arguments_of_the_region(tmp_path):
    arrays = integers(STRIDED)
    (grad,) = variables(STRIDED, "grad")
    weight = relay.const(arrays["weight"])
    module = partition(typed(relay.Function([grad], call_of(BACKWARD_DATA, STRIDED, grad, weight))), ["c"])
    (region,) = regions(module).values()
    assert len(region.params) == 2
    (found,) = execute(exported(module, tmp_path / "constant.so"), {"grad": arrays["grad"]})
    assert_equal(found, reference.backward_data(STRIDED, arrays["grad"], arrays["weight"]))


def test_what_c_cannot_do_stays_with_relay():
    half = ConvProblem.from_descriptor("mb2ic4ih9oc6kh3ph1_dt=f16:f16:f16")
    program = call_program(BACKWARD_DATA, half)
    assert not regions(partition(program, ["c"]))
    (found,) = verdicts(program, ["c"])
    assert (found.backend, found.direction, found.problem) == ("", "backward_data", half.descriptor)
    assert "not for float16" in found.refused["c"]
    forward = call_program(FORWARD, STRIDED)
    assert not regions(partition(forward, ["c"]))
    assert regions(partition(forward, ["c"], forward=True))


WITHOUT = """
import sys
import numpy as np, tvm
from tvm.contrib import graph_executor
library, arrays, out = sys.argv[1:]
executor = graph_executor.GraphModule(tvm.runtime.load_module(library)["default"](tvm.cpu()))
for name, array in np.load(arrays).items():
    executor.set_input(name, array)
executor.run()
assert not [m for m in sys.modules if m.split(".")[0] in ("tvm_convgrad", "relay_ops", "legalize")]
np.savez(out, *(executor.get_output(i).numpy() for i in range(executor.get_num_outputs())))
"""


def test_library_runs_in_a_process_without_this_package(tmp_path):
    program, arrays, wanted = chain()
    with tvm.transform.PassContext(opt_level=3):
        relay.build(partition(program, ["c"]), "llvm").export_library(str(tmp_path / "step.so"))
    inputs = {name: arrays[name] for name in ("grad", "weight", "data")}
    np.savez(tmp_path / "arrays.npz", **inputs)
    files = [str(tmp_path / name) for name in ("step.so", "arrays.npz", "out.npz")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", WITHOUT, *files], check=True, cwd=tmp_path, env=environment)
    with np.load(tmp_path / "out.npz") as found:
        for i, want in enumerate(wanted):
            assert_equal(found[f"arr_{i}"], want)


def test_region_refuses_other_tensors(tmp_path):
    module = partition(call_program(BACKWARD_DATA, STRIDED), ["c"])
    ((symbol, region),) = regions(module).items()
    source = tvm.get_global_func(f"relay.ext.{NAME}")(region)
    path = str(tmp_path / "region.so")
    source.export_library(path)
    function = tvm.runtime.load_module(path)[symbol]
    arrays = integers(STRIDED)
    grad, weight = tvm.nd.array(arrays["grad"]), tvm.nd.array(arrays["weight"])
    out = tvm.nd.array(np.full(STRIDED.data_shape, np.nan, "float32"))
    function(grad, weight, out)
    assert_equal(out.numpy(), reference.backward_data(STRIDED, arrays["grad"], arrays["weight"]))
    with pytest.raises(tvm.error.TVMError, match="takes 3 tensors"):
        function(grad, out)
    with pytest.raises(tvm.error.TVMError, match=re.escape("tensor 1 is not a compact one of float32[6, 2, 3, 3]")):
        function(grad, grad, out)
    with pytest.raises(tvm.error.TVMError, match="tensor 0 is not"):
        function(tvm.nd.array(arrays["grad"].astype("float64")), weight, out)
