# SPDX-License-Identifier: Apache-2.0
"""What free extents a model takes, where it relies on those that torch.export.Dim states, and indices that count along
them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.codegen.hardware import native_target  # noqa: E402
from tvm_convgrad.core.errors import ArtifactError, ConvGradError, ModelError  # noqa: E402
from tvm_convgrad.core.extent_limits import MOST_EXTENT  # noqa: E402
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact  # noqa: E402
from tvm_convgrad.training.compile.lower import compile_step  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.runtime.schema import TensorSpec  # noqa: E402
from tvm_convgrad.training.runtime.session import Session  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

ROWS = 20


def imported(model, inputs, *free, batch=None):
    """The model with a free batch, and with these further extents of axis 1 of its inputs."""
    dims = [{0: Dim("n"), **({1: length} if length else {})} for length in free]
    program = torch.export.export(model, inputs, dynamic_shapes=tuple(dims))
    return from_exported_program(program, batch=batch)


class Positions(nn.Module):
    """Learned positions and slices that are in bounds of 4 to 20 places."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS, 3))

    def forward(self, x):
        placed = x + self.rows[: x.shape[1]]
        return (placed[:, 2:] - placed[:, :-2]).sum(1) + placed[:, :3].sum(1) + placed[:, 3] + placed[:, -2]


def test_slices_within_the_stated_extents():
    torch.manual_seed(0)
    model = Positions()
    found = imported(model, (torch.zeros(4, 7, 3),), Dim("length", min=4, max=ROWS))
    name = found.inputs[0].shape[1]
    assert found.inputs[0].limits == {name: (4, ROWS)}  # 4 for place 3
    manifest = make_manifest(build_step(found, loss="mse"), native_target(), [])
    assert manifest["schema"]["inputs"][0]["limits"] == {name: [4, ROWS]}
    runner = Runner(build_step(found, loss="mse"))
    for length in (4, 9, ROWS):
        x = torch.randn(5, length, 3)
        np.testing.assert_allclose(runner.predict(x.numpy()), model(x).detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("extent", [3, ROWS + 1])
def test_other_extents_are_refused(extent):
    limits = {"length": (4, ROWS)}
    spec = TensorSpec.from_json(TensorSpec("x", ("n", "length", 3), "float32", limits=limits).to_json())
    with pytest.raises(ArtifactError, match=rf"x has extent {extent} on axis 1, but.*exported for 4 to 20 there"):
        spec.accept(np.zeros((2, extent, 3), "float32"), {}, "x")
    for taken in (4, ROWS):
        spec.accept(np.zeros((2, taken, 3), "float32"), {}, "x")


def test_what_nothing_needs_of_a_range_has_no_effect():
    class Tail(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, 2:].sum(1)

    torch.manual_seed(0)
    model = Tail(3, 3)
    found = imported(model, (torch.zeros(4, 7, 3),), Dim("length", min=4, max=64))
    assert list(found.inputs[0].limits.values()) == [(2, MOST_EXTENT)]
    runner, x = Runner(build_step(found, loss="mse")), torch.randn(2, 3, 3)
    np.testing.assert_allclose(runner.predict(x.numpy()), model(x).detach().numpy(), rtol=0, atol=1e-5)


def test_no_places_along_a_free_axis_are_refused():
    with pytest.raises(ArtifactError, match=r"extent 0 on axis 1, shape \[2, 0\]; a free extent 'length'.*at least 1"):
        TensorSpec("x", ("n", "length"), "float32").accept(np.zeros((2, 0), "float32"), {}, "x")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda x: x.prod(1), r"aten.prod along an axis of a free extent is not imported"),
        (lambda x: x.cummax(1).values.sum(1), r"aten.cummax along an axis of a free extent is not imported"),
        (
            lambda x: x.diagonal(0, 0, 1).sum(1),
            r"a diagonal of the lesser one of \w+ and \w+ places, free extents, is not",
        ),
        (lambda x: _written(x).sum(1), r"it writes to places 0 to \w+ by 2 of an axis of \w+; join the parts"),
    ],
)
def test_what_depends_on_an_extent_is_refused(forward, said):
    class Model(nn.Linear):
        def forward(self, x):
            return forward(super().forward(x))

    with pytest.raises(ConvGradError, match=said):
        imported(Model(3, 3), (torch.zeros(4, 7, 3),), Dim("length", min=3))


def _written(x):
    y = x * 1
    y[:, ::2] = 0
    return y


def test_an_extent_that_is_a_formula_is_refused():
    length = 2 * Dim("half", min=2)
    program = torch.export.export(nn.Linear(3, 3), (torch.zeros(4, 6, 3),), dynamic_shapes=({1: length},))
    with pytest.raises(ModelError, match=r"axis 1 of input 'input' has the extent 2\*\w+, a formula of a Dim; export"):
        from_exported_program(program)


def test_a_batch_is_one_of_the_stated_ones():
    class Pairs(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x[3]

    program = torch.export.export(Pairs(3, 3), (torch.zeros(6, 3),), dynamic_shapes=({0: Dim("n", min=4)},))
    with pytest.raises(ModelError, match=r"exported for batches of at least 4, and relies on it; 2 is none"):
        from_exported_program(program, batch=2)
    assert from_exported_program(program, batch=4).inputs[0].shape == (4, 3)


def test_predict_takes_batches_within_the_limits(tmp_path):
    class Pairs(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x[3]

    program = torch.export.export(Pairs(3, 3), (torch.zeros(6, 3),), dynamic_shapes=({0: Dim("n", min=4)},))
    step, path = build_step(from_exported_program(program), loss="mse"), tmp_path / "step.so"
    save_artifact(compile_step(step, native_target()), make_manifest(step, native_target(), []), path)
    session = Session(path)
    assert session.predict(np.zeros((8, 3), "float32"), batch_size=4).shape == (8, 3)
    for samples in (2, 10):
        with pytest.raises(ArtifactError, match=r"a batch of predict has extent 2 on axis 0, but.*at least 4 there"):
            session.predict(np.zeros((samples, 3), "float32"), batch_size=4)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, 3)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


def test_positions_behind_a_table_are_nan():
    """TVM reads and writes there."""
    runner = Runner(build_step(imported(Embedded(), (torch.zeros(4, 7, 3),), Dim("length")), loss="mse"))
    for length in (ROWS, ROWS + 4, 50 * ROWS):
        x = np.zeros((2, length, 3), "float32")
        found = np.isnan(runner.predict(x))
        assert found[:, ROWS:].all()
        assert not found[:, :ROWS].any()
        loss, _ = runner.step(x, x, lr=0.1)
        assert np.isnan(loss) == (length > ROWS)
        runner.reset()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_extents_are_not_counted_in_the_type_of_the_data(dtype):
    """Of a batch of 300, which neither of 8 bits has."""

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(120, 2)

        def forward(self, tokens, lengths):
            return self.table(tokens[torch.arange(tokens.shape[0]), lengths - 1].long())

    torch.manual_seed(0)
    model, count = Chosen(), 300
    tokens, lengths = (torch.arange(count * 7).reshape(count, 7) % 120).to(dtype), torch.arange(count) % 7 + 1
    runner = Runner(build_step(imported(model, (tokens[:3], lengths[:3]), None, None), loss="mse"))
    found = runner.predict(tokens.numpy(), lengths.numpy())
    np.testing.assert_array_equal(found, model(tokens, lengths).detach().numpy())


def test_constant_places_of_a_free_axis_are_checked():
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x).index_select(1, torch.tensor([0, 5])).sum(2)

    torch.manual_seed(0)
    model, x = Two(3, 3), torch.randn(2, 7, 3)
    runner = Runner(build_step(imported(model, (x,), Dim("length", min=2)), loss="mse"))
    np.testing.assert_allclose(runner.predict(x.numpy()), model(x).detach().numpy(), rtol=0, atol=1e-5)
    short = runner.predict(x[:, :3].contiguous().numpy())
    assert np.isnan(short[:, 1]).all()
    assert not np.isnan(short[:, 0]).any()


class Last(nn.Linear):
    """The last place of each sequence, by its length."""

    def forward(self, x, lengths):
        return super().forward(x)[torch.arange(x.shape[0]), lengths - 1]


@pytest.mark.parametrize("free", [False, True])
def test_an_index_of_several_is_checked_in_its_own_axis(free):
    """A length of 9 of 7 would be place 2 of the next sample."""
    torch.manual_seed(0)
    model, x, lengths = Last(3, 2), torch.randn(4, 7, 3), torch.tensor([1, 7, 3, 2])
    runner = Runner(build_step(imported(model, (x, lengths), Dim("length") if free else None, None), loss="mse"))
    wanted = model(x, lengths).detach().numpy()
    np.testing.assert_allclose(runner.predict(x.numpy(), lengths.numpy()), wanted, rtol=0, atol=1e-6)
    lengths[2] = 9
    wanted[2] = np.nan
    np.testing.assert_allclose(runner.predict(x.numpy(), lengths.numpy()), wanted, rtol=0, atol=1e-6)
