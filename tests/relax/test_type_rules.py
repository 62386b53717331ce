# SPDX-License-Identifier: Apache-2.0
"""The type relation: what it infers, and that everything wrong is refused with op, argument, rule, values, remedy."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax

from relax_ops.by_mode import by_mode
from tests.relax.programs import NAMES, call, operands_of, tensor, typed
from tvm_convgrad.core.errors import ConvGradError, DTypeError, ProblemError

GRAD, DATA, WEIGHT = (2, 6, 5, 4), (2, 4, 7, 6), (6, 4, 3, 3)


def weight_call(grad: Any = GRAD, data: Any = DATA, dtypes: tuple[str, str] = ("float32",) * 2, **changes: Any) -> Any:
    attributes = {"kernel_size": (3, 3), **changes}
    operands = (tensor("grad", grad, dtypes[0]), tensor("data", data, dtypes[1]))
    return typed(call("conv2d_backward_weight", *operands, **attributes))


def data_call(
    grad: Any = GRAD, weight: Any = WEIGHT, dtypes: tuple[str, str] = ("float32",) * 2, **changes: Any
) -> Any:
    attributes = {"data_shape": DATA, **changes}
    operands = (tensor("grad", grad, dtypes[0]), tensor("weight", weight, dtypes[1]))
    return typed(call("conv2d_backward_data", *operands, **attributes))


def shape_of(ty: Any) -> list[Any]:
    return [int(e) if isinstance(e, tvm.tirx.IntImm) else str(e) for e in ty.shape]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_shape_and_dtype(name: str, symbolic: bool) -> None:
    rank = int(name[4])
    operands, attributes = operands_of(name, rank, symbolic)
    ty = typed(call(name, *operands, **attributes))
    n, w = ("n", "w") if symbolic else (2, 8)
    data = [n, 4, *{1: [w], 2: [7, w], 3: [6, 7, w]}[rank]]
    assert shape_of(ty) == (data if "data" in name else [2] * rank + [2, 6])
    assert str(ty.dtype) == "float64"


def test_defaults() -> None:
    assert shape_of(weight_call()) == [6, 4, 3, 3]
    assert shape_of(data_call()) == [2, 4, 7, 6]
    assert str(weight_call(dtypes=("float16", "float16")).dtype) == "float16"


def test_same_padding_by_name() -> None:
    """TensorFlow's SAME for stride 2: 7 -> 4 rows, 6 -> 3 columns with the odd element behind."""
    ty = weight_call(grad=(2, 6, 4, 3), strides=2, padding="SAME")
    assert shape_of(ty) == [6, 4, 3, 3]
    assert shape_of(data_call(grad=(2, 6, 4, 3), strides=2, padding="SAME")) == [2, 4, 7, 6]


# -------------------------------------------------------------------------------------------------- refusals

REFUSALS = [
    # direction, changes, exception, parts of the sentence
    ("weight", {"grad": (2, 6, 5)}, ProblemError, ["grad has 3 axes", "NCHW has 4", "rank"]),
    ("weight", {"data": (2, 4, 7, 6, 1)}, ProblemError, ["data has 5 axes", "NCHW has 4"]),
    ("data", {"weight": (6, 4, 3)}, ProblemError, ["weight has 3 axes", "OIHW has 4"]),
    ("weight", {"groups": 3}, ProblemError, ["4 input channels", "divisible by groups=3"]),
    ("weight", {"groups": 4}, ProblemError, ["6 output channels", "divisible by groups=4"]),
    ("weight", {"groups": 0}, ProblemError, ["groups=0", "at least 1"]),
    ("weight", {"groups": -2}, ProblemError, ["groups=-2", "at least 1"]),
    ("data", {"groups": 2}, ProblemError, ["weight's I axis is 4", "groups=2", "check data_shape"]),
    ("data", {"groups": 3}, ProblemError, ["divisible by groups=3"]),
    ("weight", {"grad": (3, 6, 5, 4)}, ProblemError, ["grad's batch is 3", "data's is 2", "must be equal"]),
    ("data", {"grad": (3, 6, 5, 4)}, ProblemError, ["grad's batch is 3", "data's is 2"]),
    ("data", {"grad": (2, 5, 5, 4)}, ProblemError, ["grad has 5 channels", "O axis is 6", "grad_layout"]),
    ("weight", {"grad": (2, 6, 6, 4)}, ProblemError, ["axis H", "gives 5, but grad has 6", "check kernel_size"]),
    ("weight", {"kernel_size": (3, 2)}, ProblemError, ["axis W", "kernel 2", "gives 5, but grad has 4"]),
    (
        "data",
        {"data_shape": (2, 4, 9, 6)},
        ProblemError,
        ["axis H", "extent 9", "gives 7, but grad has 5", "data_shape"],
    ),
    (
        "data",
        {"data_shape": (2, 4, 7)},
        ProblemError,
        ["data_shape=(2, 4, 7) has 3 entries", "NCHW has 4", "full shape"],
    ),
    ("data", {"data_shape": (2, 4, 0, 6)}, ProblemError, ["axis H", "covers 3 elements"]),
    ("data", {"data_shape": (2, 4, -7, 6)}, ProblemError, ["axis H is -7", "negative"]),
    ("data", {"data_shape": (2, 4, 2, 6), "grad": (2, 6, 1, 4)}, ProblemError, ["axis H: kernel 3", "more than"]),
    ("weight", {"strides": 2}, ProblemError, ["axis H", "stride 2", "gives 3, but grad has 5"]),
    ("weight", {"dilation": 2}, ProblemError, ["axis H", "dilation 2", "gives 3, but grad has 5"]),
    ("weight", {"padding": 1}, ProblemError, ["axis H", "padding (1, 1)", "gives 7, but grad has 5"]),
    ("weight", {"padding": -1}, ProblemError, ["(-1, -1) of axis H is negative", "slice the data"]),
    ("data", {"padding": (0, 0, 0, -1)}, ProblemError, ["(0, -1) of axis W is negative"]),
    ("weight", {"padding": (0, 0, 0)}, ProblemError, ["padding=(0, 0, 0) has 3 entries"]),
    ("weight", {"padding": "REFLECT"}, ProblemError, ["'REFLECT'", '"SAME" and "VALID"']),
    ("weight", {"strides": 0}, ProblemError, ["strides=(0, 0)", "axis H is 0", "at least 1"]),
    ("data", {"strides": (1, -1)}, ProblemError, ["strides", "axis W is -1", "at least 1"]),
    ("data", {"dilation": 0}, ProblemError, ["dilation=(0, 0)", "axis H is 0", "at least 1"]),
    ("weight", {"kernel_size": (0, 3)}, ProblemError, ["kernel_size", "axis H is 0", "at least 1"]),
    ("weight", {"kernel_size": (3, 3, 3)}, ProblemError, ["kernel_size", "3 entries", "2"]),
    ("weight", {"kernel_size": None}, ProblemError, ["kernel_size is missing"]),
    ("data", {"data_shape": None}, ProblemError, ["data_shape is missing"]),
    ("weight", {"data_layout": "NCHX"}, ProblemError, ["data_layout='NCHX'", "permutation", "NCHW"]),
    ("weight", {"grad_layout": "NHWO"}, ProblemError, ["grad_layout='NHWO'", "permutation"]),
    ("data", {"kernel_layout": "OIHH"}, ProblemError, ["kernel_layout='OIHH'", "permutation", "HWIO"]),
    ("weight", {"data_layout": "NCHW4c"}, ProblemError, ["data_layout='NCHW4c'", "permutation"]),
    ("weight", {"dtypes": ("int32", "float32")}, DTypeError, ["grad has dtype 'int32'", "cast it first"]),
    ("weight", {"dtypes": ("float32", "int8")}, DTypeError, ["data has dtype 'int8'", "float16, bfloat16"]),
    ("data", {"dtypes": ("float32", "uint8")}, DTypeError, ["weight has dtype 'uint8'", "cast it first"]),
    ("weight", {"out_dtype": "int32"}, DTypeError, ["out_dtype='int32'", "float16, bfloat16, float32, float64"]),
    ("data", {"out_dtype": "float33"}, DTypeError, ["out_dtype='float33'"]),
]


@pytest.mark.parametrize(("direction", "changes", "kind", "parts"), REFUSALS, ids=lambda v: str(v)[:50])
def test_refused(direction: str, changes: dict[str, Any], kind: type[ConvGradError], parts: list[str]) -> None:
    with pytest.raises(kind) as caught:
        (weight_call if direction == "weight" else data_call)(**changes)
    message = str(caught.value)
    assert f"conv2d_backward_{direction}: " in message
    for part in parts:
        assert part in message


def test_not_a_tensor_and_not_a_shape() -> None:
    shape = relax.Var("shape", relax.ShapeType([2, 4]))
    with pytest.raises(DTypeError, match="conv2d_backward_weight: grad must be a tensor"):
        typed(call("conv2d_backward_weight", shape, tensor("data", DATA), kernel_size=3))
    operands = tensor("grad", GRAD), tensor("weight", WEIGHT)
    with pytest.raises(DTypeError, match=r"conv2d_backward_data: data_shape must be a shape.*write R.shape"):
        typed(call("conv2d_backward_data", *operands, data_shape=tensor("data", DATA)))


def test_raw_calls_are_checked_too() -> None:
    """A call made without our Python functions, as passes make them, meets the same rules."""
    from relax_ops.attrs import ConvBackwardWeightAttrs

    good = {
        "kernel_size": (3, 3),
        "strides": (1, 1),
        "padding": (0, 0, 0, 0),
        "dilation": (1, 1),
        "groups": 1,
        "grad_layout": "NCHW",
        "data_layout": "NCHW",
        "kernel_layout": "OIHW",
        "out_dtype": "",
    }
    operator = tvm.ir.Op.get("relax.nn.conv2d_backward_weight")
    operands = [tensor("grad", GRAD), tensor("data", DATA)]
    assert shape_of(typed(relax.Call(operator, operands, ConvBackwardWeightAttrs(**good)))) == [6, 4, 3, 3]
    for changes, part in (
        ({"strides": (1,)}, "strides needs 2 entries, but has 1"),
        ({"dilation": (1, 1, 1)}, "dilation needs 2 entries, but has 3"),
        ({"padding": (0, 0)}, "padding needs 4 entries, but has 2"),
        ({"padding": (0, -1, 0, 0)}, "negative"),
        ({"kernel_size": (3, 0)}, "kernel_size"),
        ({"groups": 0}, "groups=0"),
        ({"grad_layout": ""}, "grad_layout=''"),
        ({"out_dtype": "bool"}, "out_dtype='bool'"),
    ):
        with pytest.raises((ProblemError, DTypeError), match="conv2d_backward_weight: ") as caught:
            typed(relax.Call(operator, operands, ConvBackwardWeightAttrs(**{**good, **changes})))
        assert part in str(caught.value)
    with pytest.raises(ProblemError, match="3 arguments were given; it takes 2"):
        typed(relax.Call(operator, [*operands, operands[0]], ConvBackwardWeightAttrs(**good)))


SCRIPT = """
@I.ir_module
class Module:
    @R.function
    def main(grad: R.Tensor((2, 6, 5, 4), "float32"), data: R.Tensor((2, 4, 7, 6), "float32")):
        with R.dataflow():
            dw = R.nn.conv2d_backward_weight(grad, data, kernel_size=[3, 3]{more})
            R.output(dw)
        return dw
"""


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (", groups=3", ["conv2d_backward_weight", "4 input channels", "groups=3"]),
        (", strides=[2, 2]", ["conv2d_backward_weight", "axis H", "gives 3, but grad has 5"]),
        (", padding=[0, 0, 0, -1]", ["conv2d_backward_weight", "negative", "slice the data"]),
        (', data_layout="NCWW"', ["conv2d_backward_weight", "data_layout='NCWW'"]),
        (', out_dtype="int8"', ["conv2d_backward_weight", "out_dtype='int8'"]),
    ],
)
def test_refused_in_text(more: str, parts: list[str]) -> None:
    assert tvm.script.from_source(SCRIPT.format(more=""))
    with pytest.raises(tvm.error.DiagnosticError) as caught:  # the parser's own, with a caret at the line
        tvm.script.from_source(SCRIPT.format(more=more))
    for part in parts:
        assert part in str(caught.value)


# -------------------------------------------------------------------------------------------- symbolic extents


def names(*letters: str) -> list[Any]:
    return [tvm.tirx.Var(letter, "int64") for letter in letters]


def test_symbolic_extents_that_agree() -> None:
    n, h = names("n", "h")
    ty = weight_call(grad=(n, 6, (h - 1) // 2 + 1, 4), data=(n, 4, h, 6), strides=(2, 1), padding=((1, 1), (0, 0)))
    assert shape_of(ty) == [6, 4, 3, 3]
    ty = data_call(grad=(n, 6, h - 2, 4), data_shape=(n, 4, h, 6))
    assert shape_of(ty) == ["n", 4, "h", 6]


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda n, h: weight_call(grad=(n, 6, h, 4), data=(n, 4, h, 6)), ["axis H", "gives h - 2, but grad has h"]),
        (lambda n, h: weight_call(grad=(n + 1, 6, 5, 4), data=(n, 4, 7, 6)), ["batch is n + 1", "data's is n"]),
        (
            lambda n, h: data_call(grad=(n, 6, h, 4), data_shape=(n, 4, h + 1, 6)),
            ["axis H", "gives h - 1, but grad has h"],
        ),
        (lambda n, h: data_call(grad=(2 * n + 1, 6, 5, 4), data_shape=(2 * n, 4, 7, 6)), ["batch"]),
        (lambda n, h: weight_call(grad=(2, h, 5, 4), data=(2, 4, 7, 6)), ["channels of grad are symbolic (h)", "bind"]),
        (lambda n, h: data_call(weight=(6, 4, h, 3)), ["kernel extents of weight are symbolic (h)"]),
    ],
)
def test_symbolic_extents_that_contradict(make: Any, parts: list[str]) -> None:
    with pytest.raises(ProblemError) as caught:
        make(*names("n", "h"))
    for part in parts:
        assert part in str(caught.value)


def test_extents_that_only_run_time_knows() -> None:
    """Two unrelated names may be equal: accepted now, checked by a match_cast in the compiled program."""
    n, h, y = names("n", "h", "y")
    assert shape_of(weight_call(grad=(n, 6, y, 4), data=(n, 4, h, 6))) == [6, 4, 3, 3]


def test_unknown_shapes_give_unknown_shapes() -> None:
    grad = relax.Var("grad", relax.TensorType(dtype="float32", ndim=4))
    ty = typed(call("conv2d_backward_weight", grad, tensor("data", DATA), kernel_size=3))
    assert (ty.shape, ty.ndim, str(ty.dtype)) == (None, 4, "float32")
    shape = relax.Var("shape", relax.ShapeType(ndim=4))
    ty = typed(call("conv2d_backward_data", tensor("grad", GRAD), tensor("weight", WEIGHT), data_shape=shape))
    assert (ty.shape, ty.ndim) == (None, 4)


# ------------------------------------------------------------------------------------------------------ sizes


def test_two_to_the_31_elements_type_check() -> None:
    ty = data_call(grad=(2**15, 1, 2**8, 2**8), weight=(1, 1, 1, 1), data_shape=(2**15, 1, 2**8, 2**8))
    assert shape_of(ty) == [2**15, 1, 2**8, 2**8]
    ty = weight_call(grad=(2**20, 1, 2**6, 2**6), data=(2**20, 1, 2**6, 2**6), kernel_size=1)
    assert shape_of(ty) == [1, 1, 1, 1]


def test_more_than_int64_elements_are_refused() -> None:
    huge = (2**30, 1, 2**20, 2**20)
    with pytest.raises(ProblemError, match=r"conv2d_backward_weight: (grad|data) of shape .* more than 2\*\*63 - 1"):
        weight_call(grad=huge, data=huge, kernel_size=1)
    with pytest.raises(ProblemError, match=r"conv2d_backward_data: .* more than 2\*\*63 - 1"):
        data_call(grad=huge, weight=(1, 1, 1, 1), data_shape=huge)


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (((2, 3), "float16"), DTypeError, "must be tensors of one dtype"),
        (((2,), "float32"), ProblemError, "must have one rank, but have 2 and 1"),
    ],
)
def test_what_depends_on_the_mode_has_one_type(
    other: tuple[tuple[int, ...], str], error: type[ConvGradError], text: str
) -> None:
    with pytest.raises(error, match=rf"nn.by_mode: both operands {text}"):
        typed(by_mode(tensor("training", (2, 3), "float32"), tensor("predicting", *other)))
