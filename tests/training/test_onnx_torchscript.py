# SPDX-License-Identifier: Apache-2.0
"""Names of parameters in files of torch.onnx.export(dynamo=False), which computes transposed weights in advance."""

from __future__ import annotations

import io
import tracemalloc
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from torch import nn  # noqa: E402

from tvm_convgrad.training.frontends.onnx.names import names_read, with_own_parameters  # noqa: E402
from tvm_convgrad.training.frontends.onnx.torchscript import with_module_names  # noqa: E402


class Network(nn.Module):
    """Linear layers with and without bias, in lists and sequences, attention, recurrence, slopes, a tied weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU()), nn.Linear(6, 6, bias=False))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True) for _ in range(2))
        self.queries = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(6, 6, bias=False)}) for _ in range(2))
        self.rnn = nn.LSTM(6, 3, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True, bias=False)
        self.slope = nn.PReLU(5)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, numbers):
        x = self.layers(self.table(numbers))
        for block, query in zip(self.blocks, self.queries, strict=True):
            x = query["q"](block(x))
        return self.head(self.slope(self.gru(self.rnn(x)[0])[0]))


def exported(network, *inputs):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network.eval(), inputs, file, dynamo=False, verbose=False)
    return onnx.load_from_string(file.getvalue())


def test_parameters_have_the_names_and_shapes_of_the_module():
    """Two lists in each other leave one name for `queries.0.q` and `queries.1.q`, which stay as they are."""
    torch.manual_seed(0)
    network = Network()
    numbers = torch.randint(0, 7, (2, 5))
    proto = exported(network, numbers)
    named = with_module_names(with_own_parameters(proto))
    onnx.checker.check_model(named)
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in named.graph.initializer}
    wanted = dict(network.named_parameters())
    assert wanted.keys() - found.keys() == {"queries.0.q.weight", "queries.1.q.weight"}
    for name in wanted.keys() & found.keys():
        np.testing.assert_array_equal(found[name], wanted[name].detach().numpy())
    before, after = (
        ReferenceEvaluator(each).run(None, {proto.graph.input[0].name: numbers.numpy()})[0] for each in (proto, named)
    )
    np.testing.assert_array_equal(after, before)


def test_layers_that_are_called_twice_and_equal_ones():
    """A shared layer is one parameter; two layers of equal values, which the exporter merges, are two."""
    shared, first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.load_state_dict(first.state_dict())
    network = nn.ModuleDict({"shared": shared, "first": first, "second": second})
    network.forward = lambda x: shared(second(first(shared(x))))
    named = with_module_names(with_own_parameters(exported(network, torch.rand(2, 3, 4))))
    names = {tensor.name for tensor in named.graph.initializer}
    assert names == {"shared.weight", "first.weight", "first.bias", "second.weight", "second.bias"}


class ReadTwice(nn.Module):
    """The transposed weight of a product has another reader."""

    def __init__(self, make):
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.rand(4, 3)), make

    def forward(self, x):
        turned = self.weight.t()
        return x @ turned, self.make(turned)


@pytest.mark.parametrize("make", [torch.relu, lambda turned: turned @ torch.ones(4, 2)])
def test_what_others_read_too_keeps_its_values(make):
    network, x = nn.Sequential(ReadTwice(make)), torch.rand(2, 3)
    proto = exported(network, x)
    results = [
        ReferenceEvaluator(each).run(None, {proto.graph.input[0].name: x.numpy()})
        for each in (proto, with_module_names(proto))
    ]
    for before, after in zip(*results, strict=True):
        np.testing.assert_array_equal(after, before)


def test_what_the_body_of_a_branch_reads_stays():
    x = torch.rand(2, 5, 3)
    proto = exported(nn.Sequential(nn.Linear(3, 4, bias=False)), x)
    computed = next(tensor.name for tensor in proto.graph.initializer if tensor.name.startswith("onnx::MatMul"))
    one = onnx.helper.make_tensor_value_info("body", onnx.TensorProto.FLOAT, None)
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", [computed], ["body"])], "body", [], [one])
    true = onnx.numpy_helper.from_array(np.array(True), "true")
    proto.graph.initializer.append(true)
    proto.graph.node.append(onnx.helper.make_node("If", ["true"], ["turned"], then_branch=body, else_branch=body))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("turned", onnx.TensorProto.FLOAT, None))
    assert {computed, "turned", "true"} <= names_read(proto.graph)
    named = with_module_names(proto)
    assert "0.weight" in {tensor.name for tensor in named.graph.initializer}
    results = [ReferenceEvaluator(each).run(None, {proto.graph.input[0].name: x.numpy()}) for each in (proto, named)]
    for before, after in zip(*results, strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("producer", ["pytorch", "other"])
def test_graphs_without_such_names_stay(producer):
    proto = exported(nn.Linear(4, 4), torch.rand(2, 4))
    proto.producer_name = producer
    assert with_module_names(proto) is proto


def test_weights_are_not_copied_all_at_once():
    """Of eight weights of 1 MB, with what protobuf gives out and takes, two or three are in memory at a time."""
    extent, proto = 512, exported(nn.Linear(2, 2), torch.rand(2, 2))
    graph = proto.graph
    for field in ("node", "initializer", "input"):
        graph.ClearField(field)
    for layer in range(8):
        weight, bias = np.full((extent, extent), 0.0 + layer, "float32"), np.zeros(extent, "float32")
        weight[0, 1] = 9
        name, result = f"onnx::MatMul_{layer}", f"layers.{layer}"
        graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
        graph.initializer.append(onnx.numpy_helper.from_array(bias, f"{result}.bias"))
        graph.node.append(onnx.helper.make_node("MatMul", ["x", name], [name + "x"], f"/{result}/MatMul"))
        graph.node.append(onnx.helper.make_node("Add", [f"{result}.bias", name + "x"], [result], f"/{result}/Add"))
    del weight, bias
    graph.output[0].name = result
    size = proto.ByteSize()
    tracemalloc.start()
    named = with_module_names(proto)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2
    found = {tensor.name: tensor for tensor in named.graph.initializer}
    assert found.keys() == {f"layers.{layer}.{kind}" for layer in range(8) for kind in ("weight", "bias")}
    assert onnx.numpy_helper.to_array(found["layers.3.weight"])[1, 0] == 9
    assert proto.ByteSize() == size
