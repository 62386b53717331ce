# SPDX-License-Identifier: Apache-2.0
"""Files whose inputs or outputs are of types that the reading process does not know: those of other libraries."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends import load_model  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.known_types import known_types, leaf_names  # noqa: E402

tree = torch.utils._pytree


@dataclass
class Scores:
    """As a user's model returns it."""

    logits: Tensor
    auxiliary: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


Pair = namedtuple("Pair", "mean deviation")


class Output(OrderedDict):
    """As the model libraries have it: registered without the names of its keys."""


NAMES = {Scores: "library.Scores", Pair: "library.Pair", Output: "library.Output"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    torch.export.register_dataclass(Scores, serialized_type_name=NAMES[Scores])
    tree._register_namedtuple(Pair, serialized_type_name=NAMES[Pair])
    tree.register_pytree_node(
        Output,
        lambda value: (list(value.values()), list(value)),
        lambda values, names: Output(zip(names, values, strict=True)),
        serialized_type_name=NAMES[Output],
    )
    yield
    for kind in NAMES:
        tree._deregister_pytree_node(kind)


RESULTS = {
    "dataclass": (lambda y: Scores(y, hidden=(y, y * 2)), ["logits", "hidden.0", "hidden.1"]),
    "named_tuple": (lambda y: Pair(y, {"of": y.abs()}), ["mean", "deviation.of"]),
    "library": (lambda y: Output(sample=y, extra=[y * 3]), ["sample", "extra.0"]),
    "dict": (lambda y: {"b": y, "a": (y, y * 2)}, ["b", "a.0", "a.1"]),
    "tensor": (lambda y: y, [""]),
}


class Network(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 2), kind

    def forward(self, given):
        return RESULTS[self.kind][0](self.layer(given["x"]))


@pytest.mark.parametrize("kind", RESULTS)
def test_outputs_have_the_names_of_their_fields(kind, tmp_path):
    path, names = tmp_path / "model.pt2", RESULTS[kind][1]
    program = torch.export.export(Network(kind), ({"x": torch.rand(4, 3)},))
    assert leaf_names(program.call_spec.out_spec) == names
    torch.export.save(program, path)
    before = {name: tree.SERIALIZED_TYPE_TO_PYTHON_TYPE.pop(name) for name in NAMES.values()}
    tree.treespec_loads.cache_clear()
    try:
        with known_types(path):
            assert leaf_names(torch.export.load(path).call_spec.out_spec) == names
        if len(names) > 1:
            with pytest.raises(ModelError, match=names[-1]):
                load_model(path)
        model = load_model(path, outputs={names[0]: 1.0} if len(names) > 1 else None)
        assert not before.keys() & tree.SERIALIZED_TYPE_TO_PYTHON_TYPE.keys()
    finally:
        tree.SERIALIZED_TYPE_TO_PYTHON_TYPE.update(before)
    assert sorted(model.parameters) == ["layer.bias", "layer.weight"]
    assert [schema.shape for schema in model.inputs] == [(4, 3)]
