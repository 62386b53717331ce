# SPDX-License-Identifier: Apache-2.0
"""Reading models: every kind of file, the batch, and one sentence for everything that is wrong."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import pytest
import tvm

from tests.training.harness import Runner
from tests.training.small_models import data, onnx_model, relax_module, weights
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.frontends.onnx.model import from_onnx
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

FUNCTION = """
import numpy as np
from tests.training.small_models import relax_module, weights

def module(): return relax_module("n")
def fixed(): return relax_module(4)
def with_batch(batch=2): return relax_module("n" if batch == "dynamic" else batch)
def with_params(): return relax_module(4), weights()
def number(): return 3
def fails(): raise KeyError("nothing here")
def greedy(width, depth=1): return relax_module(4)
constant = 5
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(FUNCTION))
    return path


def message(path, **options):
    """The text of the ModelError, which is one sentence or two."""
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def test_python_function(source):
    assert load_model(f"{source}:module").inputs[0].shape == ("n", 2, 7, 6)
    assert load_model(f"{source}:module", batch=3).inputs[0].shape == (3, 2, 7, 6)
    assert load_model(f"{source}:with_batch").inputs[0].shape == (2, 2, 7, 6)
    assert load_model(f"{source}:with_batch", batch=6).inputs[0].shape == (6, 2, 7, 6)
    assert load_model(f"{source}:with_batch", batch="dynamic").inputs[0].shape == ("n", 2, 7, 6)
    model = load_model(f"{source}:with_params")
    assert all((model.parameters[name] == weights()[name]).all() for name in model.parameters)
    assert set(model.states) == {"bn_mean", "bn_var"}


@pytest.mark.parametrize(
    ("function", "options", "sentence"),
    [
        ("missing", {}, "has no function 'missing'"),
        ("constant", {}, "has no function 'constant'"),
        ("number", {}, "returned a int"),
        ("fails", {}, "KeyError"),
        ("greedy", {}, "needs the arguments width"),
        ("fixed", {"batch": 8}, "fixed batch 4, which cannot become 8"),
        ("fixed", {"batch": "dynamic"}, "fixed batch 4"),
        ("module", {"batch": 0}, "positive integer"),
    ],
)
def test_python_function_errors(source, function, options, sentence):
    assert sentence in message(f"{source}:{function}", **options)


def test_paths_that_are_no_models(tmp_path, source):
    assert "does not exist" in message(tmp_path / "nothing.onnx")
    assert "is a folder" in message(_folder(tmp_path / "folder.onnx"))
    assert "is not that of a model" in message(_written(tmp_path / "model.bin", b"x"))
    assert "names no function" in message(source)
    assert "fails when run: SyntaxError" in message(f"{_written(tmp_path / 'bad.py', b'def (')}:f")


def _folder(path):
    path.mkdir()
    return path


def _written(path, content):
    path.write_bytes(content)
    return path


def test_relax_json(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(tvm.ir.save_json(relax_module("n")))
    initialised = load_model(path)
    assert (initialised.parameters["conv_bias"] == 0).all()
    assert (initialised.parameters["bn_weight"] == 1).all()
    assert (initialised.states["bn_var"] == 1).all()
    spread = initialised.parameters["conv_weight"].std()
    assert 0.6 < spread / np.sqrt(2 / 18) < 1.4  # He: variance 2 / (2 * 3 * 3)
    again = load_model(path)
    assert all((again.parameters[name] == value).all() for name, value in initialised.parameters.items())
    np.savez(path.with_suffix(".npz"), **weights())
    model = load_model(path, batch=5)
    assert model.inputs[0].shape == (5, 2, 7, 6)
    assert (model.parameters["fc_weight"] == weights()["fc_weight"]).all()


def test_relax_json_errors(tmp_path):
    good = tvm.ir.save_json(relax_module(2))
    assert "not Relax JSON" in message(_written(tmp_path / "cut.json", good[: len(good) // 2].encode()))
    assert "not Relax JSON" in message(_written(tmp_path / "binary.json", b"\xff\xfe\x00"))
    assert "not an IRModule" in message(
        _written(tmp_path / "other.json", tvm.ir.save_json(tvm.tirx.Var("n", "int64")).encode())
    )
    _written(tmp_path / "net.json", good.encode())
    _written(tmp_path / "net.npz", b"PK nonsense")
    assert "not a readable .npz" in message(tmp_path / "net.json")
    np.savez(tmp_path / "net.npz", **{**weights(), "fc_bias": np.zeros(4, "float32")})
    assert "parameter 'fc_bias' is float32[5], but its value is float32[4]" in message(tmp_path / "net.json")
    np.savez(tmp_path / "net.npz", stranger=np.zeros(3))
    assert "values were given for stranger" in message(tmp_path / "net.json")


def test_modules_that_are_no_models():
    with pytest.raises(ModelError, match="has no function 'main'"):
        from_module(tvm.IRModule({}))
    with pytest.raises(ModelError, match="inputs are impossible"):
        from_module(relax_module(2), num_inputs=20)
    with pytest.raises(ModelError, match="no floating-point parameter to train"):
        from_module(relax_module(2), num_inputs=9)


def test_onnx_batch(tmp_path):
    pytest.importorskip("onnx")
    path = tmp_path / "net.onnx"
    for stored in ("N", 4):
        onnx_model(path, batch=stored)
        for batch, extent in ((None, "n" if stored == "N" else 4), (3, 3), ("dynamic", "n")):
            assert load_model(path, batch=batch).inputs[0].shape == (extent, 2, 7, 6)


def test_onnx_names(tmp_path):
    """Those that TVM's importer would cut short, and of two of them lose one."""
    pytest.importorskip("onnx")
    proto = onnx_model(tmp_path / "net.onnx")
    names = {"conv_weight": "n.w", "fc_weight": "x.w", "conv_bias": "onnx::b", "bn_bias": "b", "fc_bias": "onnx::fc"}
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    before = proto.SerializeToString()
    model, plain = from_onnx(proto), load_model(tmp_path / "net.onnx")
    assert proto.SerializeToString() == before
    assert set(model.states) == {"bn_mean", "bn_var"}
    names["fc_bias"] = "fc"
    assert set(model.parameters) == {names.get(name, name) for name in plain.parameters}
    for name, value in plain.parameters.items():
        np.testing.assert_array_equal(model.parameters[names.get(name, name)], value)
    x, _ = data(4)
    np.testing.assert_array_equal(Runner(build_step(model)).predict(x), Runner(build_step(plain)).predict(x))


def test_onnx_errors(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "net.onnx"
    model = onnx_model(path)
    content = path.read_bytes()
    assert "is not a valid ONNX file, or is truncated" in message(
        _written(tmp_path / "cut.onnx", content[: len(content) // 2])
    )
    assert "is not a valid ONNX file, or is truncated" in message(_written(tmp_path / "text.onnx", b"hello"))
    helper = onnx.helper
    norm = helper.make_node("BatchNormalization", ["x", *"abcd"], list("yuvws"), "norm")
    tensor = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2])
    tracked = helper.make_model(helper.make_graph([norm], "net", [tensor], []))
    assert "'norm' has 5 results, but has at most 3 in opset" in message(
        _written(tmp_path / "tracked.onnx", tracked.SerializeToString())
    )
    extra = [
        helper.make_node("NonMaxSuppression", ["y", "y"], ["u"]),
        helper.make_node("StringNormalizer", ["y"], ["s"]),
        helper.make_node("StringNormalizer", ["y"], ["t"]),
    ]
    del model.graph.node[:]
    model.graph.node.extend([*extra, helper.make_node("Odd", ["y"], ["v"], domain="my.domain")])
    from tvm_convgrad.training.frontends.onnx.model import from_onnx

    with pytest.raises(ModelError, match=r"unsupported operators: StringNormalizer \(2x\), my\.domain\.Odd \(1x\)"):
        from_onnx(model)


def test_pt2_errors(tmp_path):
    torch = pytest.importorskip("torch")
    assert "is not a .pt2 file" in message(_written(tmp_path / "text.pt2", b"hello"))
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    (tmp_path / "other.npz").rename(tmp_path / "other.pt2")
    assert "cannot be read as a torch.export program" in message(tmp_path / "other.pt2")

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.special.bessel_j0(torch.special.bessel_j0(self.fc(x))) + torch.linalg.eigh(self.fc(x))[0]

    program = torch.export.export(Odd(), (torch.randn(4, 4),))
    torch.export.save(program, tmp_path / "odd.pt2")
    text = message(tmp_path / "odd.pt2")
    assert re.search(r"aten\.special_bessel_j0\.default \(2x, test_frontends\.py:\d+: return", text)
    assert re.search(r"aten\._linalg_eigh\.default \(1x, test_frontends\.py:\d+: return", text)


def test_pt2_file_batch_and_dropout(tmp_path):
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.step.build import build_step

    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Dropout(0.25), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    path = tmp_path / "net.pt2"
    for mode in (True, False):
        torch.export.save(torch.export.export(network.train(mode), (torch.randn(4, 3, 4),)), path)
        step = build_step(load_model(path))
        assert "dropout_mask" in step.module["step"].script(show_meta=False)
        assert "dropout" not in step.module["predict"].script(show_meta=False)
        assert [schema.name for schema in step.state] == ["1.weight", "1.bias", "4.weight", "4.bias", "step"]
    assert "fixed batch 4, which cannot become 8" in message(path, batch=8)
    dynamic = torch.export.export(network, (torch.randn(4, 3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(dynamic, path)
    assert load_model(path).inputs[0].shape[1:] == (3, 4)
    assert isinstance(load_model(path, batch="dynamic").inputs[0].shape[0], str)
    assert load_model(path, batch=6).inputs[0].shape == (6, 3, 4)


def test_pt2_random_operators_are_refused():
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) + torch.poisson(x)

    with pytest.raises(
        ModelError, match=r"random operators: aten\.poisson\.default \(1x, test_frontends\.py:\d+: return"
    ):
        from_exported_program(torch.export.export(Noisy(), (torch.randn(2, 4),)))
    with pytest.raises(ModelError, match=r"expected a torch\.export\.ExportedProgram"):
        from_exported_program(Noisy())
