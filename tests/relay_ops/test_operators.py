# SPDX-License-Identifier: Apache-2.0
"""The six operators in Relay: registration, types, round trips, both ways to code, layouts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm
from tvm import relay, te

import tvm_convgrad
from legalize.forms import DATA_FORMS, WEIGHT_FORMS
from relay_ops.cpu_kernels import without_kernels
from relay_ops.layout import convert_rules
from relay_ops.lowering import composed, formula
from tests.relay_ops.harness import assert_equal, call_program, calls, integers, run, typed, variables
from tvm_convgrad import ConvProblem, op
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, NEW_OPS
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError

PROBLEMS = [
    ConvProblem.from_descriptor(text)
    for text in (
        "g2mb2ic4ih9oc6kh3sh2dh1ph1",
        "g4mb1ic4ih8oc8kh3sh2ph0rh1",
        "g2mb2ic4ih9oc6kh3sh2ph1_lay=NHWC:HWIO:NHWC",
        "mb4ic4ih4oc4kh4ph2rh1_lay=NHWC:OHWI:NHWC",  # extents coincide: no axis can be told by its extent
        "g2mb4ic4ih4oc4kh2ph0rh1_lay=CNHW:IHWO:NCHW",
        "g2mb2ic4ih7oc4kh3ph1_dt=f64:f64:f64",
        "mb2ic3iw17oc4kw5sw2pw2",
        "g3mb2ic3iw16oc6kw3dw2pw1_lay=NWC:WIO:NWC",
        "g2mb1ic4id6oc4kd2sd2",
        "mb1ic2id6oc3kd3dd1pd1",
    )
]
GRADIENTS = (BACKWARD_WEIGHT, BACKWARD_DATA)


def wanted(direction, problem, arrays):
    return reference.DIRECTIONS[direction.name](problem, *(arrays[name] for name in direction.operands))


@pytest.mark.parametrize("opt_level", [0, 3], ids=["strategy", "legalized"])
@pytest.mark.parametrize("direction", GRADIENTS, ids=lambda direction: direction.name)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_equal_to_float64(problem, direction, opt_level):
    arrays = integers(problem)
    with without_kernels():
        (found,) = run(call_program(direction, problem), {name: arrays[name] for name in direction.operands}, opt_level)
    assert_equal(found, wanted(direction, problem, arrays))


@pytest.mark.parametrize("direction", GRADIENTS, ids=lambda direction: direction.name)
def test_float16_is_summed_in_float32(direction):
    problem = ConvProblem.from_descriptor("mb2ic4ih9oc6kh3ph1_dt=f16:f16:f16")
    program = call_program(direction, problem)
    legal = relay.transform.Legalize()(program)
    assert {str(call.checked_type.dtype) for call in calls(legal, "nn.conv2d")} == {"float32"}
    assert legal["main"].ret_type.dtype == "float16"


@pytest.mark.parametrize(
    ("direction", "form"),
    [*((BACKWARD_WEIGHT, form) for form in WEIGHT_FORMS), *((BACKWARD_DATA, form) for form in DATA_FORMS)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("text", ["g2mb2ic4ih9oc6kh3sh2ph1rh0", "mb2ic3iw17oc4kw5sw2pw2", "mb1ic2id5oc3kd3sd2pd1"])
def test_every_composition(text, direction, form):
    problem = ConvProblem.from_descriptor(text)
    operands = variables(problem, *direction.operands)
    arrays = integers(problem)
    module = typed(relay.Function(operands, composed(direction, problem, *operands, form)))
    (found,) = run(module, {name: arrays[name] for name in direction.operands})
    assert_equal(found, wanted(direction, problem, arrays))


def test_transposed_form_refuses_what_relay_cannot():
    problem = ConvProblem.from_descriptor("mb2ic3ih9oc4kh3dh1")
    with pytest.raises(UnsupportedError, match="take the form 'dilated'"):
        composed(BACKWARD_DATA, problem, *variables(problem, "grad", "weight"), "transposed")


@pytest.mark.parametrize("entry", NEW_OPS, ids=lambda entry: entry.name)
def test_text_and_json_round_trips(entry):
    problem = ConvProblem(2, 4, 6, (9,) * entry.rank, (3,) * entry.rank, (2,) * entry.rank, groups=2)
    layout = "N" + {1: "W", 2: "HW", 3: "DHW"}[entry.rank] + "C"
    for told in (problem, problem.with_layouts(layout, None, layout)):
        module = call_program(entry.direction, told)
        for again in (relay.parse(module.astext()), tvm.ir.load_json(tvm.ir.save_json(module))):
            tvm.ir.assert_structural_equal(module, again)
            assert again["main"].ret_type.concrete_shape == told.tensors[entry.direction.result][0]


def test_upstreams_operator_is_kept():
    wgrad = tvm.ir.Op.get("nn.conv2d_backward_weight")
    assert wgrad.num_inputs == 2
    assert wgrad.attrs_type_key == "relay.attrs.Conv2DAttrs"
    tvm_convgrad.register()  # repeating is harmless
    assert wgrad.same_as(tvm.ir.Op.get("nn.conv2d_backward_weight"))


def test_public_functions_take_relay_expressions():
    grad, data = relay.var("grad", shape=(2, 5, 4, 6)), relay.var("data", shape=(2, 9, 8, 4))
    layouts = {"grad_layout": "NHWC", "data_layout": "NHWC", "kernel_layout": "HWIO"}
    call = op.conv2d_backward_weight(grad, data, kernel_size=3, strides=2, padding="SAME", groups=2, **layouts)
    assert typed(call)["main"].ret_type.concrete_shape == (3, 3, 2, 6)
    weight = relay.var("weight", shape=(3, 3, 2, 6))
    shape = (2, 10, 8, 4)
    call = op.conv2d_backward_data(grad, weight, data_shape=shape, strides=2, padding="SAME", groups=2, **layouts)
    assert typed(call)["main"].ret_type.concrete_shape == shape
    with pytest.raises(ProblemError, match="data_shape is missing"):
        op.conv2d_backward_data(grad, weight, data_shape=None)
    with pytest.raises(ProblemError, match=r"axis H: .* gives 9, but grad has 5"):
        op.conv2d_backward_weight(grad, data, kernel_size=1, groups=2, **layouts)
    with pytest.raises(UnsupportedError, match="Relay expressions, not int"):
        op.conv2d_backward_weight(1, data, kernel_size=3)


HEAD = '#[version = "0.0.5"]\ndef @main(%a: Tensor[{a}], %b: Tensor[{b}]) {{ nn.conv2d_backward_{call} }}'
WEIGHT_LAYOUTS = 'kernel_layout="NCHW", out_layout="OIHW"'


@pytest.mark.parametrize(
    ("a", "b", "call", "error", "message"),
    [
        (
            "(2, 6, 5, 5), float32",
            "(2, 4, 9, 9), float32",
            f"weight(%a, %b, kernel_size=[3, 3], strides=[2, 2], padding=[0, 0, 0, 0], {WEIGHT_LAYOUTS})",
            ProblemError,
            "gives 4, but grad has 5",
        ),
        (
            "(2, 6, 5, 5), float32",
            "(2, 4, 9, 9), float32",
            f"weight(%a, %b, strides=[2, 2], padding=[1, 1, 1, 1], {WEIGHT_LAYOUTS})",
            ProblemError,
            "kernel_size is missing",
        ),
        (
            "(2, 6, 5, 5), float32",
            "(2, 4, 9, 9), float32",
            f"weight(%a, %b, channels=4, kernel_size=[3, 3], strides=[2, 2], padding=[1, 1, 1, 1], {WEIGHT_LAYOUTS})",
            ProblemError,
            "channels=4, but the operands have 6",
        ),
        (
            "(2, 6, 5, 5), float32",
            "(6, 4, 3, 3), int8",
            'data(%a, %b, kernel_layout="OIHW")',
            DTypeError,
            "weight has dtype 'int8'",
        ),
        (
            "(2, 6, 5, 5), float32",
            "(6, 4, 3, 3), float32",
            'data(%a, %b, kernel_layout="OIHW", strides=[2, 2], output_padding=[2, 0])',
            ProblemError,
            "output_padding 2 of axis H",
        ),
        (
            "(2, 7, 5, 5), float32",
            "(6, 4, 3, 3), float32",
            'data(%a, %b, kernel_layout="OIHW")',
            ProblemError,
            "grad has 7 channels, but the weight's O axis is 6",
        ),
        (
            "(2, 6, 5), float32",
            "(6, 4, 3, 3), float32",
            'data(%a, %b, kernel_layout="OIHW")',
            ProblemError,
            "grad has 3 and weight 4 axes",
        ),
    ],
)
def test_type_relation_refuses(a, b, call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        relay.parse(HEAD.format(a=a, b=b, call=call))


def test_unknown_batch_has_a_type_and_is_left_to_the_strategy():
    call = 'data(%a, %b, kernel_layout="OIHW", strides=[2, 2], padding=[1, 1])'
    module = relay.parse(HEAD.format(a="(?, 6, 5, 5), float32", b="(6, 4, 3, 3), float32", call=call))
    batch, *rest = module["main"].ret_type.shape
    assert isinstance(batch, tvm.tir.Any)
    assert [int(e) for e in rest] == [4, 9, 9]
    with tvm.target.Target("llvm"):
        legalized = relay.transform.Legalize()(module)
    assert len(calls(legalized, "nn.conv2d_backward_data")) == 1


def test_layouts_of_a_network_are_converted_at_its_borders_only():
    problem = ConvProblem.from_descriptor("g2mb2ic4ih9oc4kh3ph1")
    x, w = variables(problem, "grad", "weight")
    second = relay.var("second", shape=problem.weight_shape)
    hidden = op.conv2d_backward_data(x, w, data_shape=problem.data_shape, padding=1, groups=2)
    end = op.conv2d_backward_data(relay.nn.relu(hidden), second, data_shape=problem.data_shape, padding=1, groups=2)
    program = typed(relay.Function([x, w, second], end))
    with tvm.transform.PassContext(opt_level=3):
        module = relay.transform.ConvertLayout({"nn.conv2d_backward_data": ["NHWC", "HWIO"]})(program)
    found = calls(module, "nn.conv2d_backward_data")
    assert [(c.attrs.data_layout, c.attrs.kernel_layout) for c in found] == [("NHWC", "HWIO")] * 2
    # x, both weights and the result.
    assert len(calls(module, "layout_transform")) == 4
    rng = integers(problem)
    arrays = {"grad": rng["grad"], "weight": rng["weight"], "second": integers(problem, 1)["weight"]}
    middle = reference.backward_data(problem, arrays["grad"], arrays["weight"])
    last = reference.backward_data(problem, middle.clip(min=0), arrays["second"])
    assert_equal(run(module, arrays)[0], last)


def test_layout_conversion_refuses_packed_layouts_and_too_many():
    problem = ConvProblem.from_descriptor("mb2ic16ih9oc16kh3ph1")
    program = call_program(BACKWARD_WEIGHT, problem)
    convert = convert_rules()["nn.conv2d_backward_weight"]
    call = program["main"].body
    tensors = [te.placeholder(problem.tensors[name][0]) for name in BACKWARD_WEIGHT.operands]
    with pytest.raises(UnsupportedError, match="no packed layouts"):
        convert(call.attrs, call.args, tensors, ["NCHW16c", "OIHW"])
    with pytest.raises(UnsupportedError, match="takes 2 or 3 layouts"):
        convert(call.attrs, call.args, tensors, ["NHWC"])
    kept = convert(call.attrs, call.args, tensors, ["NHWC", "default"])
    assert (kept.attrs.data_layout, kept.attrs.kernel_layout, kept.attrs.out_layout) == ("NHWC", "NHWC", "OIHW")


@pytest.mark.parametrize("direction", GRADIENTS, ids=lambda direction: direction.name)
def test_gpu_schedule_gives_each_element_a_thread(direction):
    problem = replace(PROBLEMS[0], grad_dtype="float16", data_dtype="float16", kernel_dtype="float16")
    tensors = [te.placeholder(problem.tensors[n][0], problem.tensors[n][1], n) for n in direction.operands]
    from relay_ops.lowering import _schedule

    out = formula(DIRECTIONS[direction.name], problem, *tensors)
    target = tvm.target.Target("cuda -arch=sm_80")
    text = str(tvm.lower(_schedule(None, [out], target), [*tensors, out]))
    assert text.count('"blockIdx.x"') == text.count('"threadIdx.x"') == 2  # the sum, and its cast
