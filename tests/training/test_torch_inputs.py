# SPDX-License-Identifier: Apache-2.0
"""Models of torch.export whose inputs and results are dictionaries, lists, keywords and numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

IMAGE, IDS = torch.ones(2, 3, 6, 6), torch.ones(2, 4, dtype=torch.int64)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.conv, self.head = nn.Embedding(10, 8), nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def features(self, image, ids):
        return self.conv(image).mean((2, 3)) + self.table(ids).sum(1)


class Dictionary(Base):
    def forward(self, batch):
        features = self.features(batch["image"], batch["id"])
        return {"logits": self.head(features), "rest": [features, (features * 2, None, 3)]}


class Listed(Base):
    def forward(self, tensors):
        return self.head(self.features(*tensors))


class Keywords(Base):
    def forward(self, image, flag=True, *, ids, scale=None):
        features = self.features(image, ids)
        return self.head(features if scale is None else features * scale) if flag else None


CASES = [
    (Dictionary, ({"image": IMAGE, "id": IDS},), {}, {"rest.0": 1.0, "rest.1.0": 0.5}, ["batch_image", "batch_id"]),
    (Listed, ([IMAGE, IDS],), {}, None, ["tensors_0", "tensors_1"]),
    (Keywords, (IMAGE,), {"ids": IDS}, None, ["image", "ids"]),
    (Keywords, (IMAGE, True), {"ids": IDS, "scale": 2.0}, None, ["image", "ids"]),
]


@pytest.mark.parametrize(("kind", "args", "kwargs", "outputs", "names"), CASES)
def test_tensors_are_inputs_and_what_is_fixed_is_part_of_the_model(kind, args, kwargs, outputs, names):
    step = build_step(from_exported_program(torch.export.export(kind(), args, kwargs), outputs=outputs))
    assert [spec.name for spec in step.inputs] == names
    assert step.inputs[1].dtype == "int64"


def test_results_are_listed_by_their_paths():
    program = torch.export.export(Dictionary(), ({"image": IMAGE, "id": IDS},))
    with pytest.raises(ModelError, match=r"3 outputs: logits .*, rest\.0 .*, rest\.1\.0 "):
        from_exported_program(program)


class Scaled(Base):
    def forward(self, image, scale):
        return self.conv(image).mean((2, 3)) * scale


def test_a_number_that_varies_is_refused():
    shapes = {"image": None, "scale": torch.export.Dim.DYNAMIC}
    program = torch.export.export(Scaled(), (IMAGE, 3), dynamic_shapes=shapes)
    with pytest.raises(ModelError, match="'scale' is a symbolic number"):
        from_exported_program(program)
    with pytest.raises(ModelError, match="input 'scale' is a scalar"):
        build_step(from_exported_program(torch.export.export(Scaled(), (IMAGE, torch.tensor(2.0)))))


class NamedAsPyTorchNames(nn.Module):
    """Attributes that torch.fx.GraphModule has for itself, too."""

    def __init__(self):
        super().__init__()
        self.code, self.graph = nn.Parameter(torch.rand(3)), nn.BatchNorm2d(8)
        self.head, self.conv = nn.Linear(8, 5), nn.Conv2d(3, 8, 3)
        self.register_buffer("meta", torch.rand(8))

    def forward(self, image):
        return self.head(self.graph(self.conv(image * self.code[:, None, None])).mean((2, 3)) * self.meta)


def test_names_that_pytorch_has_for_itself_are_kept():
    module = NamedAsPyTorchNames()
    step = build_step(from_exported_program(torch.export.export(module, (IMAGE,))), momentum=0.9)
    roles = {schema.name: schema.role for schema in step.state if schema.role in ("parameter", "running_stat")}
    assert roles == {
        **dict.fromkeys((name for name, _ in module.named_parameters()), "parameter"),
        **dict.fromkeys(
            [f"graph.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")], "running_stat"
        ),
    }
