# SPDX-License-Identifier: Apache-2.0
"""Small programs in Relay's text form and hand-made JSON: what is read, what it computes, what is refused and how."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.importer import corpus
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import from_relay, import_relay
from tvm_convgrad.importer.tensors import PARAMS_MAGIC, TENSOR_MAGIC, decode_tensor, read_params

HEADER = '#[version = "0.0.5"]\n'


def main_of(params: str, body: str) -> str:
    return f"{HEADER}def @main({params}) {{\n{body}\n}}\n"


def shape_after(body: str, params: str = "%x: Tensor[(2, 4, 6, 5), float32]") -> tuple[int, ...]:
    return tuple(int(extent) for extent in from_relay(main_of(params, body))["main"].ret_ty.shape.values)


def computed(text: str, *values: Any) -> list[np.ndarray[Any, Any]]:
    return corpus.run(from_relay(text), list(values), "llvm")


@pytest.mark.parametrize(
    ("codes", "shape"),
    [
        ("[0, -1]", (2, 120)),
        ("[-1, 4, 30]", (2, 4, 30)),
        ("[-2]", (2, 4, 6, 5)),
        ("[0, -2]", (2, 4, 6, 5)),
        ("[-3, -3]", (8, 30)),
        ("[-4, 1, 2, -2]", (1, 2, 4, 6, 5)),
        ("[0, -4, -1, 2, -2]", (2, 2, 2, 6, 5)),
        ("[8, -1]", (8, 30)),
    ],
)
def test_reshape_codes(codes: str, shape: tuple[int, ...]) -> None:
    assert shape_after(f"reshape(%x, newshape={codes})") == shape


@pytest.mark.parametrize("codes", ["[-1, -1]", "[7, -1]", "[-3]", "[-4, 3, 3]", "[0, 0, 0, 0, 0]", "[241]", "[-5]"])
def test_wrong_reshape_codes_are_refused(codes: str) -> None:
    with pytest.raises(ModelError, match="reshape"):
        shape_after(f"reshape(%x, newshape={codes})")


@pytest.mark.parametrize(
    ("attributes", "index"),
    [
        ("begin=[0, 1], end=[2, 3], strides=[1]", np.s_[0:2, 1:3]),
        ('begin=[0, 1, 1, 2], end=[2, 2, 3, -1], strides=[1], slice_mode="size"', np.s_[0:2, 1:3, 1:4, 2:]),
        ("begin=[5], end=[0], strides=[-2], axes=[2]", np.s_[:, :, 5:0:-2]),
        ("begin=[-1], end=[-100], strides=[-1], axes=[-1]", np.s_[..., ::-1]),
        ("begin=[-3], end=[1000], strides=[2], axes=[2]", np.s_[:, :, -3:1000:2]),
    ],
)
def test_strided_slice(attributes: str, index: Any) -> None:
    x = np.arange(240, dtype="float32").reshape(2, 4, 6, 5)
    text = main_of("%x: Tensor[(2, 4, 6, 5), float32]", f"strided_slice(%x, {attributes})")
    np.testing.assert_array_equal(computed(text, x)[0], x[index])


def test_cross_entropy_takes_no_softmax_itself() -> None:
    x, y = np.arange(6, dtype="float32").reshape(2, 3), np.eye(2, 3, dtype="float32")
    params = "%x: Tensor[(2, 3), float32], %y: Tensor[(2, 3), float32]"
    (loss,) = computed(main_of(params, "nn.cross_entropy_with_logits(%x, %y)"), x, y)
    assert loss == pytest.approx(-(x * y).sum() / 2)


def test_functions_lets_tuples_and_ifs() -> None:
    text = f"""{HEADER}
    def @double(%a: Tensor[(2), float32]) -> Tensor[(2), float32] {{ add(%a, %a) }}
    def @main(%x: Tensor[(2), float32], %p: (Tensor[(2), float32], bool)) {{
      let %f = fn (%b: Tensor[(2), float32], Primitive=1) {{ multiply(%b, %x) }};
      %0 = %p.0;
      let %y: Tensor[(2), float32] = @double(%0);
      %1 = (%y, %f(%y));
      if (%p.1) {{ (%1.1, %0) }} else {{ (%1.0, %0) }}
    }}"""
    module = from_relay(text)
    (machine,) = [module["main"]]
    assert len(machine.params) == 2
    import tvm
    from tvm import relax

    run = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())["main"]
    x, p = np.array([1, 2], "float32"), np.array([3, 4], "float32")
    tensor = tvm.runtime.tensor
    for truth, wanted in ((True, 2 * p * x), (False, 2 * p)):
        results = corpus.flat(run(tensor(x), (tensor(p), tensor(np.array(truth)))))
        np.testing.assert_array_equal(results[0], wanted)
        np.testing.assert_array_equal(results[1], p)


def test_names_that_occur_twice_are_numbered() -> None:
    text = "fn (%a: float32, %a: float32, %b: float32) { %b }"
    names = [str(param.name) for param in from_relay("\n" + text)["main"].params]
    assert names == ["a", "a1", "b"]


def test_infix_operators_and_scalars() -> None:
    text = main_of("%x: Tensor[(2), float32]", "(%x + 2f) * %x - 1f / (0.5f + 1e0f)")
    x = np.array([1, 3], "float32")
    np.testing.assert_allclose(computed(text, x)[0], (x + 2) * x - 1 / 1.5, rtol=1e-6)


def test_thousands_of_lets_are_imported_from_text() -> None:
    count = 4000
    lines = [f"let %v{i + 1} = negative(%v{i});" for i in range(count)]
    text = main_of("%v0: Tensor[(2), float32]", "\n".join(lines) + f"\n%v{count}")
    assert from_relay(text)["main"].ret_ty.ndim == 1


def lets_json(count: int) -> str:
    """The JSON of `count` nested lets, each of the negative of the one before."""
    nodes: list[dict[str, Any]] = [{"type_key": ""}]

    def node(kind: str, **content: Any) -> str:
        nodes.append({"type_key": kind, **content})
        return str(len(nodes) - 1)

    def array(*items: str) -> str:
        return node("Array", data=[int(item) for item in items])

    def var(name: str) -> str:
        label = node("relay.Id", attrs={"name_hint": node("runtime.String", repr_str=name)})
        return node("relay.Var", attrs={"vid": label, "type_annotation": tensor, "_checked_type_": "0", "span": "0"})

    two = node("IntImm", attrs={"dtype": "int32", "value": "2", "span": "0"})
    tensor = node("relay.TensorType", attrs={"dtype": "float32", "shape": array(two), "span": "0"})
    negative = node("Op", repr_str="negative")
    names = [var(f"v{i}") for i in range(count + 1)]
    body = names[-1]
    for i in reversed(range(count)):
        fields = {"op": negative, "args": array(names[i]), "attrs": "0", "type_args": "0", "_checked_type_": "0"}
        call = node("relay.Call", attrs={**fields, "span": "0"})
        body = node("relay.Let", attrs={"var": names[i + 1], "value": call, "body": body, "span": "0"})
    fields = {"params": array(names[0]), "body": body, "ret_type": "0", "type_params": "0", "attrs": "0"}
    root = node("relay.Function", attrs={**fields, "span": "0"})
    return json.dumps({"root": int(root), "nodes": nodes, "b64ndarrays": [], "attrs": {"tvm_version": "0.15.0"}})


def test_thousands_of_nested_lets_are_imported_from_json() -> None:
    imported = import_relay(lets_json(4000))
    assert imported.version == "0.15.0"
    assert imported.module["main"].ret_ty.ndim == 1


def old(text: str) -> str:
    """JSON as TVM 0.6 wrote it: names written out, operators by global_key."""
    data = json.loads(text)
    nodes = data["nodes"]
    for node in nodes:
        if node["type_key"] == "Op":
            node["type_key"], node["global_key"] = "relay.Op", node.pop("repr_str")
        if node["type_key"] == "relay.Id":
            node["attrs"]["name_hint"] = nodes[int(node["attrs"]["name_hint"])]["repr_str"]
    data["attrs"] = {"tvm_version": "0.6.0"}
    return json.dumps(data)


def test_the_names_of_0_6_are_understood() -> None:
    imported = import_relay(old(lets_json(3)))
    assert [str(param.name) for param in imported.module["main"].params] == ["v0"]
    assert imported.version == "0.6.0"


def test_all_unknown_operators_are_named_at_once() -> None:
    body = "%0 = vision.nms(%x);\n%1 = vision.nms(%0);\n%2 = nn.sparse_dense(%1, %x);\nnn.relu(%2)"
    with pytest.raises(ModelError, match=r"1 nn\.sparse_dense, 2 vision\.nms"):
        from_relay(main_of("%x: Tensor[(2, 4), float32]", body))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("nn.relu(%y)", "nothing is called"),
        ("nn.relu(%x, %x)", "2 operands"),
        ("nn.relu(%x, alpha=1f)", "alpha"),
        ("nn.softmax(%x, axis=7)", "axis 7"),
        ("nn.softmax(%x, axis=[1])", "is not of type int"),
        ("nn.conv2d(%x, %x, strides=[0, 0])", "strides"),
        ("nn.conv2d(%x, %x, groups=0)", "groups"),
        ("nn.max_pool2d(%x, pool_size=[2])", "axes"),
        ("nn.dense(%x, %x, units=3)", "units 3 are not those of the weight, 2"),
        ("nn.matmul(%x, %x, units=3, transpose_b=True)", "units 3 are not those of the weight, 2"),
        ("nn.batch_flatten(%x) /* ty=Tensor[(2, 5), float32] */", "the program states"),
        ("meta[relay.Constant][0]", "metadata"),
        ("fn (%z: float32) { %z }", "closures"),
        ("nn.relu(fn (%z: float32) { %z })", "an operand is a function"),
        ("@main(%x)", "recursive|deeper"),
        ("@other(%x)", "no function @other"),
        ("split(%x, indices_or_sections=3)", "divide"),
        ('zeros(shape=[1099511627776, 1099511627776], dtype="float32")', "tensor|range|number"),
        ('zeros(shape=[2], dtype="handle")', "handle"),
        ("(" * 500 + "%x" + ")" * 500, "nest deeper"),
        ("match (%x) {}", "Match"),
    ],
)
def test_wrong_programs_are_refused_with_a_sentence(body: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        from_relay(main_of("%x: Tensor[(2, 4), float32]", body))


def test_functions_that_multiply_when_inlined_are_refused_soon() -> None:
    lines = ["def @f0(%x: Tensor[(2), float32]) { negative(%x) }"]
    lines += [f"def @f{i}(%x: Tensor[(2), float32]) {{ @f{i - 1}(@f{i - 1}(%x)) }}" for i in range(1, 60)]
    start = time.process_time()
    with pytest.raises(ModelError, match="too large"):
        from_relay("\n".join(lines) + "\ndef @main(%x: Tensor[(2), float32]) { @f59(%x) }")
    assert time.process_time() - start < 20


def tensor_bytes(array: np.ndarray[Any, Any]) -> bytes:
    code = {"f": 2, "i": 0}[array.dtype.kind]
    head = struct.pack("<QQiiiBBH", TENSOR_MAGIC, 0, 1, 0, array.ndim, code, array.itemsize * 8, 1)
    return head + struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes) + array.tobytes()


def params_bytes(**arrays: np.ndarray[Any, Any]) -> bytes:
    names = b"".join(struct.pack("<Q", len(name)) + name.encode() for name in arrays)
    head = struct.pack("<QQQ", PARAMS_MAGIC, 0, len(arrays)) + names + struct.pack("<Q", len(arrays))
    return head + b"".join(map(tensor_bytes, arrays.values()))


def test_parameters_become_constants(tmp_path: Path) -> None:
    text = main_of("%x: Tensor[(2), float32], %w: Tensor[(2), float32]", "multiply(%x, %w)")
    w = np.array([2, 5], "float32")
    path = tmp_path / "p.params"
    path.write_bytes(params_bytes(w=w))
    for params in (path, {"w": w}):
        module = from_relay(text, params)
        assert [str(param.name) for param in module["main"].params] == ["x"]
        np.testing.assert_array_equal(corpus.run(module, [w], "llvm")[0], w * w)
    with pytest.raises(ModelError, match="must be w"):
        from_relay(text, {"w": np.zeros(3, "float32")})
    with pytest.raises(ModelError, match="not parameters"):
        from_relay(text, {"v": w})


def test_constants_of_missing_metadata_can_be_given() -> None:
    text = main_of("%x: Tensor[(2), float32]", "add(%x, meta[relay.Constant][0])")
    x = np.array([2, 5], "float32")
    module = from_relay(text, {"meta[relay.Constant][0]": x})
    np.testing.assert_array_equal(corpus.run(module, [x], "llvm")[0], 2 * x)


def test_sizes_are_not_believed() -> None:
    whole = tensor_bytes(np.zeros((2, 3), "float32"))
    assert decode_tensor(base64.b64encode(whole).decode(), "t").shape == (2, 3)
    huge = bytearray(whole)
    struct.pack_into("<q", huge, 32, 1 << 50)
    for data in (whole[:-1], whole + b"x", bytes(huge), b"", whole[:20]):
        with pytest.raises(ModelError):
            decode_tensor(base64.b64encode(data).decode(), "t")
    good = params_bytes(a=np.zeros(3, "float32"))
    for data in (good[:-1], good[:30], b"x" * 40, good[:16] + struct.pack("<Q", 1 << 60) + good[24:]):
        with pytest.raises(ModelError):
            read_params(data, "p")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"root": 1, "nodes": [{"type_key": ""}], "b64ndarrays": []}',
        '{"root": 0, "nodes": [{"type_key": "relay.Tuple", "attrs": {"fields": "0"}}], "b64ndarrays": []}',
        '{"root": 0, "nodes": [{"type_key": "Array", "data": [0]}]}',
        '{"type_key": ' + "[" * 100_000,
        "#[version",
        "def @main(%x: Tensor[(2), float32]) { %x",
        "\x00\n",
    ],
)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ModelError):
        from_relay(text + "\n")


def constants_json(sizes: list[int]) -> str:
    """The JSON of a function that adds up the sums of constants of these sizes, as large as those of a network."""
    nodes: list[dict[str, Any]] = [{"type_key": ""}]

    def node(kind: str, **content: Any) -> str:
        nodes.append({"type_key": kind, **content})
        return str(len(nodes) - 1)

    def call(op: str, attrs: str, *args: str) -> str:
        items = node("Array", data=[int(arg) for arg in args])
        return node("relay.Call", attrs={"op": node("Op", repr_str=op), "args": items, "attrs": attrs, "span": "0"})

    reduce = node("relay.attrs.ReduceAttrs", attrs={"axis": "0", "keepdims": "0", "exclude": "0"})
    body = ""
    for number in range(len(sizes)):
        total = call("sum", reduce, node("relay.Constant", attrs={"data": str(number), "span": "0"}))
        body = call("add", "0", body, total) if body else total
    params = node("Array")
    root = node("relay.Function", attrs={"params": params, "body": body, "attrs": "0", "span": "0"})
    texts = [base64.b64encode(tensor_bytes(np.ones(size, "float32"))).decode() for size in sizes]
    return json.dumps({"root": int(root), "nodes": nodes, "b64ndarrays": texts, "attrs": {"tvm_version": "0.17.0"}})


def test_25_million_parameters_are_imported_within_20_seconds() -> None:
    """As many as ResNet-50 has, in 161 tensors; the time is that of the processor."""
    text = constants_json([25_500_000 // 161] * 161)
    start = time.process_time()
    imported = import_relay(text)
    assert time.process_time() - start < 20
    assert len(text) > 130_000_000
    assert imported.module["main"].ret_ty.ndim == 0
