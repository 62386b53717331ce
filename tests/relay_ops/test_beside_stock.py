# SPDX-License-Identifier: Apache-2.0
"""What stock TVM does about convolutions, and must still do with this package: strategies, CUTLASS, mixed precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import relay

from relay_ops.cutlass import data_gradients_as_transposed
from relay_ops.differentiate import value_and_gradients
from relay_ops.ir import call_of
from relay_ops.layout_stock import RULES
from relay_ops.lowering import stock_refuses
from tests.relay_ops import stock_facts
from tests.relay_ops.harness import assert_equal, call_program, calls, integers, run, typed, variables
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD, NEW_OPS

GRADIENTS = (BACKWARD_WEIGHT, BACKWARD_DATA)
CUDNN = "cuda -arch=sm_80 -libs=cudnn"
FORMULA = [10, "conv2d_backward_weight.formula"]


@pytest.fixture(scope="module")
def stock():
    """The facts of a process that does not import this package."""
    path = Path(stock_facts.__file__)
    environment = os.environ | {"TVM_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ours():
    return stock_facts.facts()


def test_every_strategy_of_stock_is_kept(stock, ours):
    assert stock["strategies"].keys() == ours["strategies"].keys()
    for name, targets in stock["strategies"].items():
        for target, wanted in targets.items():
            found = ours["strategies"][name][target]
            if isinstance(wanted, list):
                assert [each for each in found if each in wanted] == wanted, (name, target)
            if name == "wgrad":
                assert found[-1] == FORMULA, target
            elif not target.startswith("llvm"):  # on CPUs kernels of this package may stand beside
                assert found == wanted, (name, target)
    assert ours["strategies"]["wgrad"][CUDNN] == [*stock["strategies"]["wgrad"][CUDNN], FORMULA]
    assert stock["strategies"]["wgrad"][CUDNN] == [[15, "conv2d_backward_weight_strategy.cudnn"]]


def test_layout_rules_are_added_where_stock_has_none(stock, ours):
    added = set(ours["layout rules"]) - set(stock["layout rules"])
    family = {f"nn.{entry.name}" for entry in NEW_OPS}
    assert added == RULES.keys() | (family - set(stock["layout rules"]))
    assert set(stock["layout rules"]) <= set(ours["layout rules"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mb2ic4ih9oc6kh3ph1", None),
        ("mb2ic4ih9oc6kh3ph1_lay=NHWC:OHWI:NHWC", None),
        ("g4mb2ic4ih9oc4kh3ph1", None),
        ("g2mb2ic4ih9oc4kh3ph1", "groups is 2"),
        ("g4mb2ic4ih9oc8kh3ph1", "groups is 4"),
        ("mb2ic4ih9oc6kh3ph1_lay=NHWC:HWIO:NHWC", "layouts"),
        ("mb2ic4ih9oc6kh3ph1rh0", "padding"),
        ("mb2ic4ih9oc6kh3ph1_dt=f16:f32:f16", "types"),
    ],
)
def test_stock_is_asked_for_what_its_cudnn_call_computes(text, reason):
    problem = ConvProblem.from_descriptor(text)
    found = stock_refuses(problem)
    assert (found is None) if reason is None else found.startswith(reason) or reason in found
    call = call_program(BACKWARD_WEIGHT, problem)["main"].body
    names = [name for _, name in stock_facts.strategy(call, CUDNN)]
    assert ("conv2d_backward_weight_strategy.cudnn" in names) == (reason is None)
    assert names[-1] == "conv2d_backward_weight.formula"


def test_cutlass_takes_what_it_took(stock, ours):
    assert "cutlass.conv2d_transpose" in {name for name, _ in stock["cutlass"]}
    assert ours["cutlass"] == stock["cutlass"]


def test_cutlass_takes_converted_data_gradients_and_no_wrong_weight_gradients():
    named = {name.replace("conv2d_transpose", "conv2d_backward_data"): ["NHWC", "OHWI"] for name in stock_facts.LAYOUTS}
    regions = [name for name, _ in stock_facts.cutlass_regions(stock_facts.in_layouts(stock_facts.step(), named))]
    assert regions == ["cutlass.conv2d", "cutlass.conv2d_backward_weight", "cutlass.conv2d_transpose"]
    # groups, and a result in another layout than CUTLASS writes
    for module in (
        stock_facts.in_layouts(stock_facts.step(groups=2), named),
        stock_facts.in_layouts(stock_facts.step(), named | {"nn.conv2d_backward_weight": ["NHWC", "HWIO"]}),
    ):
        assert calls(module, "nn.conv2d_backward_weight")[0].attrs.data_layout == "NHWC"
        regions = [name for name, _ in stock_facts.cutlass_regions(module)]
        assert "cutlass.conv2d_backward_weight" not in regions


def test_cutlass_takes_the_step_in_mixed_precision():
    """wgrad with float16 operands and a float32 result, as TVM's own test of CUTLASS has it."""
    layouts = {
        name.replace("conv2d_transpose", "conv2d_backward_data"): ["NHWC", "OHWI"] for name in stock_facts.LAYOUTS
    }
    module = relay.transform.ToMixedPrecision("float16")(stock_facts.in_layouts(stock_facts.step(), layouts))
    regions = dict(stock_facts.cutlass_regions(relay.transform.InferType()(module)))
    assert {name: ty.rpartition(" ")[2].strip(")]") for name, ty in regions.items()} == {
        "cutlass.conv2d": "float16",
        "cutlass.conv2d_backward_weight": "float32",
        "cutlass.conv2d_transpose": "float16",
    }


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("mb2ic4ih9oc6kh3sh2ph1_lay=NHWC:OHWI:NHWC", True),
        ("mb2ic4ih9iw8oc6kh3kw2sh3sw2ph0rh1pw1_lay=NHWC:OHWI:NHWC", True),
        ("mb2ic4ih9oc6kh3sh2ph1_lay=NHWC:HWIO:NHWC", False),
        ("mb2ic4ih9oc6kh3dh1ph1_lay=NHWC:OHWI:NHWC", False),
        ("g2mb2ic4ih9oc6kh3ph1_lay=NHWC:OHWI:NHWC", False),
        ("mb2ic4ih9oc6kh3ph1", False),
    ],
)
def test_data_gradient_as_transposed_convolution(text, becomes):
    problem = ConvProblem.from_descriptor(text)
    program = call_program(BACKWARD_DATA, problem)
    found = data_gradients_as_transposed()(program)
    assert len(calls(found, "nn.conv2d_transpose")) == becomes
    assert found["main"].ret_type == program["main"].ret_type
    if becomes:  # TVM builds transposed convolutions in NCHW only
        nchw = relay.transform.ConvertLayout({"nn.conv2d_transpose": ["NCHW", "IOHW"]})(found)
        arrays = {name: integers(problem)[name] for name in BACKWARD_DATA.operands}
        assert_equal(run(nchw, arrays)[0], reference.backward_data(problem, arrays["grad"], arrays["weight"]))


def test_mixed_precision_narrows_what_stock_narrows(stock, ours):
    assert stock["narrow"]["nn.conv2d_transpose"] == ours["narrow"]["nn.conv2d_backward_data"] == ["float16"]
    assert ours["narrow"]["nn.conv2d"] == stock["narrow"]["nn.conv2d"]
    # wider than stock's float16: it is a sum over batch and extents
    assert ours["narrow"]["nn.conv2d_backward_weight"] == ["float32"]


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
@pytest.mark.parametrize("entry", NEW_OPS, ids=lambda entry: entry.name)
def test_mixed_precision_of_each_operator(entry, narrow):
    extents = {1: (9,), 2: (9, 8), 3: (5, 6, 5)}[entry.rank]
    ones = (1,) * entry.rank
    problem = ConvProblem(2, 4, 6, extents, (3,) * entry.rank, ones, ((1, 1),) * entry.rank, ones, groups=2)
    program = relay.transform.InferType()(
        relay.transform.ToMixedPrecision(narrow)(call_program(entry.direction, problem))
    )
    (call,) = calls(program, f"nn.{entry.name}")
    assert [str(each.checked_type.dtype) for each in call.args] == [narrow] * 2
    assert str(call.checked_type.dtype) == ("float32" if entry.direction is BACKWARD_WEIGHT else narrow)
    if narrow == "bfloat16":
        return  # TVM 0.17 cannot build its own convolutions in bfloat16 for llvm
    arrays = integers(problem)
    arrays = {name: arrays[name] for name in entry.direction.operands}
    # Small integers: exact in float16, so the sums must be, too.
    wanted = reference.DIRECTIONS[entry.direction.name](problem, *arrays.values())
    assert np.abs(wanted).max() < 2048
    assert_equal(run(program, arrays)[0], wanted)


def test_mixed_precision_step_is_right_where_float16_would_overflow():
    """A wgrad whose sums leave float16's range, through the gradient of a network."""
    problem = ConvProblem.from_descriptor("mb4ic3ih24oc4kh3ph1")
    x, w = variables(problem, "data", "weight")
    upstream = relay.var("upstream", shape=problem.grad_shape)
    loss = relay.sum(relay.multiply(call_of(FORWARD, problem, x, w), upstream))
    step = value_and_gradients(relay.Function([x, w, upstream], loss))
    mixed = relay.transform.InferType()(relay.transform.ToMixedPrecision("float16")(typed(step["main"])))
    assert str(calls(mixed, "nn.conv2d_backward_data")[0].checked_type.dtype) == "float16"
    rng = np.random.default_rng(3)
    arrays = {
        "data": rng.integers(5, 9, problem.data_shape).astype("float32"),
        "weight": integers(problem)["weight"],
        "upstream": rng.integers(5, 9, problem.grad_shape).astype("float32"),
    }
    found = run(mixed, arrays)
    wgrad = DIRECTIONS["backward_weight"]
    wanted = reference.DIRECTIONS[wgrad.name](problem, arrays["upstream"], arrays["data"])
    assert np.abs(wanted).max() > np.finfo("float16").max
    assert_equal(found[2], wanted)
    assert_equal(
        found[1].astype("float64"), reference.DIRECTIONS["backward_data"](problem, arrays["upstream"], arrays["weight"])
    )
