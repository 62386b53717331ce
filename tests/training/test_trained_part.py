# SPDX-License-Identifier: Apache-2.0
"""Training a part of a model: the same gradients as of the whole, and none of what is frozen."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.training.harness import Runner
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.step.build import build_step

SHAPES = {
    "stem.weight": (4, 2, 3, 3),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "norm.running_mean": (4,),
    "norm.running_var": (4,),
    "body.weight": (4, 4, 3, 3),
    "head.weight": (4, 3),
    "head.bias": (3,),
}


def network():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 2, 6, 6), "float32"))
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in SHAPES.items()}
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            h = builder.emit(relax.op.nn.conv2d(x, p["stem.weight"], padding=1))
            norm = [p[f"norm.{name}"] for name in ("weight", "bias", "running_mean", "running_var")]
            h = builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.batch_norm(h, *norm, axis=1)[0])))
            h = builder.emit(relax.op.nn.conv2d(h, p["body.weight"], padding=1))
            h = builder.emit(relax.op.matmul(builder.emit(relax.op.mean(h, [2, 3])), p["head.weight"]))
            h = builder.emit_output(relax.op.add(h, p["head.bias"]))
        builder.emit_func_output(h)
    random = np.random.default_rng(0)
    values = {name: random.uniform(0.1, 1, shape).astype("float32") for name, shape in SHAPES.items()}
    return from_module(builder.get(), parameters=values)


def one_step(model, **options):
    """The state by name before and after a step, and the convolutions' gradients in it."""
    step = build_step(model, lr=1.0, **options)
    runner = Runner(step)
    before = {name: value.copy() for name, value in runner.named().items()}
    x = np.random.default_rng(1).normal(0, 1, (2, 2, 6, 6)).astype("float32")
    runner.step(x, np.array([0, 2]), lr=0.5)
    return before, runner.named(), [name for name, _ in step.gradients], {each.name: each.role for each in step.state}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_head_learns_as_in_the_whole_model(optimizer):
    whole = one_step(network(), bn="frozen", optimizer=optimizer)
    before, after, gradients, roles = one_step(train_only(network(), ["head"]), bn="frozen", optimizer=optimizer)
    assert gradients == []
    for name in SHAPES:
        assert roles[name] == (
            "parameter" if name.startswith("head") else "running_stat" if "run" in name else "frozen"
        )
        if name.startswith("head"):
            np.testing.assert_array_equal(after[name], whole[1][name])
            assert (after[name] != before[name]).any()
        else:
            np.testing.assert_array_equal(after[name], before[name])
    assert not any("stem" in name and "exp_avg" in name for name in roles)


def test_layers_before_the_first_trained_one_have_no_backward_pass():
    """One wgrad: no dgrad of the trained layer, nothing of the stem."""
    _, after, gradients, _ = one_step(train_only(network(), ["body.*", "head.bias"]))
    assert [name.rpartition("_")[2] for name in gradients] == ["weight"]
    _, full, _, _ = one_step(network())
    assert len(full) == len(after)


@pytest.mark.parametrize("bn", ["train", "train-all"])
def test_frozen_batch_norms_keep_their_statistics_unless_all_are_trained(bn):
    before, after, _, _ = one_step(train_only(network(), ["body"]), bn=bn)
    moved = (after["norm.running_mean"] != before["norm.running_mean"]).any()
    assert moved == (bn == "train-all")


@pytest.mark.parametrize("pattern", ["decoder", "decoder.*", "decoder.weight", "encoder.weight"])
def test_a_weight_with_two_names_is_trained_by_either(pattern):
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(torch.relu(self.encoder(x)))

    model = from_exported_program(torch.export.export(Tied(), (torch.zeros(2, 4),)))
    with pytest.raises(ModelError, match=r"near names are decoder\.weight"):
        train_only(model, ["decoder.weigth"])
    found = set(train_only(model, [pattern]).parameters)
    assert found == {"encoder.weight"} | ({"decoder.bias"} if pattern in ("decoder", "decoder.*") else set())


def test_a_pattern_that_matches_nothing_names_near_ones():
    with pytest.raises(ModelError, match="no parameter that 'haed' matches; near names are head"):
        train_only(network(), ["body", "haed"])
    with pytest.raises(ModelError, match=r"the first ones are stem\.weight, norm\.weight"):
        train_only(network(), ["zzz.*"])
