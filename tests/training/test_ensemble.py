# SPDX-License-Identifier: Apache-2.0
"""An ensemble trained as one grouped step equals its members trained one by one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.single_run import quick_executable
from tests.linked import linked, quick_step
from tests.training.harness import relative_error
from tests.training.small_models import relax_module, weights
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.model.ensemble import ensemble, member
from tvm_convgrad.training.model.model import Model, from_module
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.per_sample import per_sample_module

MEMBERS = 3


class Steps:
    """A compiled step and its state."""

    def __init__(self, model: Model, compiler: Any = None, **options: Any) -> None:
        self.step = build_step(model, **options)
        if compiler is None:
            self.machine = linked(quick_executable(self.step.module))
        else:
            self.machine = compiler(self.step)
        self.state = self.machine["init"]()

    def starting_from(self, model: Model) -> Steps:
        """The same program with the values of another model, which are all that tells members apart."""
        other, values = copy.copy(self), {**model.parameters, **model.states}
        pairs = zip(self.step.state, self.machine["init"](), strict=True)
        other.state = [
            tvm.runtime.tensor(values[schema.name]) if schema.name in values else start for schema, start in pairs
        ]
        return other

    def run(self, x: Any, target: Any, lr: float) -> float:
        arrays = [tvm.runtime.tensor(np.array(a, order="C")) for a in (x, target, np.float32(lr))]
        loss, self.predictions, self.state = self.machine["step"](*arrays, self.state)
        return float(loss.numpy())

    def named(self) -> dict[str, Any]:
        return {schema.name: value.numpy() for schema, value in zip(self.step.state, self.state, strict=True)}


def members_of(module: Any, parameters: dict[str, Any]) -> list[Model]:
    """Models of one architecture with parameters of their own."""
    rng = np.random.default_rng(0)
    models = []
    for _ in range(MEMBERS):
        values = {}
        for name, value in parameters.items():
            moved = value + (0.1 * rng.standard_normal(value.shape)).astype("float32")
            values[name] = abs(moved) if "var" in name else moved
        models.append(from_module(module, parameters=values))
    return models


def check(models: list[Model], x: Any, target: Any, own_data: bool, steps: int = 3, **options: Any) -> None:
    """The same steps by the ensemble and by each member: state, loss and predictions."""
    together = Steps(ensemble(models, own_data=own_data), **options)
    options.pop("compiler", None)
    first = Steps(models[0], **options)
    alone = [first.starting_from(model) for model in models]
    lr = 0.01
    for _ in range(steps):
        loss = together.run(x, target, lr)
        each = [(x[:, k], target[:, k]) if own_data else (x, target) for k in range(len(models))]
        losses = [one.run(*mine, lr) for one, mine in zip(alone, each, strict=True)]
        assert abs(loss - sum(losses)) < 1e-4 * max(1.0, abs(loss))
    named = together.named()
    for number, one in enumerate(alone):
        mine = member(named, number)
        assert set(mine) == set(one.named())
        for name, want in one.named().items():
            assert relative_error(mine[name], want) < 1e-4, (number, name)
        assert relative_error(together.predictions.numpy()[:, number], one.predictions.numpy()) < 1e-4


def data(own_data: bool, count: int = 8) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    mine = (MEMBERS,) if own_data else ()
    return rng.standard_normal((count, *mine, 2, 7, 6)).astype("float32"), rng.integers(0, 5, (count, *mine))


@pytest.mark.parametrize(
    ("own_data", "options"),
    [(True, {"momentum": 0.9, "weight_decay": 1e-2}), (False, {"optimizer": "adam", "lr": 0.01})],
    ids=["sgd", "adam"],
)
def test_train_mode_batch_norm_and_optimizers(own_data: bool, options: dict[str, Any]) -> None:
    """conv, batch norm with running statistics, relu, mean, linear; any batch."""
    check(members_of(relax_module(), weights()), *data(own_data), own_data, **options)


def test_dropout_switched_off() -> None:
    models = members_of(relax_module(dropout=0.5), weights())
    check(models, *data(True), True, steps=1, dropout_mode="off", bn="frozen")


def test_compiled_as_steps_are() -> None:
    check(members_of(relax_module(batch=8), weights()), *data(False), False, steps=2, compiler=quick_step)


def test_one_grouped_convolution_for_all_members() -> None:
    """What the step calls does not grow with the members."""
    models = members_of(relax_module(batch=8), weights())
    step, single = build_step(ensemble(models)), build_step(models[0])
    assert [name for name, _ in step.gradients] == [name for name, _ in single.gradients]
    own = build_step(ensemble(models, own_data=True))
    assert [descriptor.split("mb")[0] for _, descriptor in own.gradients] == [f"g{MEMBERS}"]


def network(build: Any, x: tuple[int, ...], parameters: dict[str, tuple[int, ...]]) -> Any:
    """A module main(x, parameters) -> build(emit, x, *parameters)."""
    builder = relax.BlockBuilder()
    variables = [relax.Var("x", relax.TensorType(x, "float32"))]
    variables += [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in parameters.items()]
    with builder.function("main", variables):
        with builder.dataflow():
            output = builder.emit_output(build(builder.emit, *variables))
        builder.emit_func_output(output)
    return builder.get()


def many_operators(emit: Any, x: Any, w1: Any, b: Any, w2: Any, g1: Any, g2: Any, l1: Any, l2: Any, w3: Any) -> Any:
    """What networks are made of besides: groups, NHWC, transposed, pools, group and layer norm, concat, pad."""
    y = emit(op.nn.conv2d(x, w1, strides=2, padding=1, groups=2))
    y = emit(op.nn.gelu(emit(op.add(y, emit(op.reshape(b, (1, 4, 1, 1)))))))
    y = emit(op.nn.conv2d_transpose(y, w2, strides=2, output_padding=1))
    y = emit(op.nn.group_norm(y, g1, g2, num_groups=2, channel_axis=1, axes=[2, 3]))
    y = emit(op.concat([y, emit(op.nn.avg_pool2d(y, (3, 3), padding=(1, 1, 1, 1)))], 1))
    y = emit(op.nn.max_pool2d(emit(op.nn.pad(y, (0, 0, 0, 0, 1, 1, 1, 1))), (2, 2), (2, 2)))
    y = emit(op.permute_dims(y, (0, 2, 3, 1)))
    y = emit(op.nn.layer_norm(y, l1, l2, axes=[-1]))
    y = emit(op.nn.conv2d(y, w3, data_layout="NHWC", kernel_layout="HWIO"))
    return emit(op.squeeze(emit(op.max(y, (1, 2), keepdims=True)), (1, 2)))


SHAPES: dict[str, tuple[int, ...]] = {
    "w1": (4, 2, 3, 3),
    "b": (4,),
    "w2": (4, 6, 2, 2),
    "g1": (6,),
    "g2": (6,),
    "l1": (12,),
    "l2": (12,),
    "w3": (2, 2, 12, 5),
}


@pytest.mark.parametrize("own_data", [False, True])
def test_other_operators(own_data: bool) -> None:
    rng = np.random.default_rng(3)
    module = network(many_operators, (4, 4, 7, 7), SHAPES)
    models = members_of(module, {n: rng.standard_normal(s).astype("float32") for n, s in SHAPES.items()})
    mine = (MEMBERS,) if own_data else ()
    x = rng.standard_normal((4, *mine, 4, 7, 7)).astype("float32")
    check(models, x, rng.integers(0, 5, (4, *mine)), own_data, steps=2)


def moving_operators(emit: Any, x: Any, w: Any, slopes: Any, slope: Any, scale: Any) -> Any:
    """What moves elements, and norms and slopes along an axis."""
    y = emit(op.nn.prelu(emit(op.nn.conv2d(x, w)), slopes, axis=1))
    parts = emit(op.split(y, 2, axis=1))
    left, right = emit(parts[0]), emit(op.flip(emit(parts[1]), axis=-1))
    y = emit(op.nn.prelu(emit(op.concat([left, right], -3)), slope, axis=1))
    y = emit(op.strided_slice(y, axes=[-2, 3], begin=[0, 1], end=[4, 4], strides=[2, 1]))
    y = emit(op.nn.rms_norm(emit(op.tril(y)), scale, axes=[-1]))
    y = emit(op.nn.adaptive_avg_pool2d(emit(op.image.resize2d(y, (4, 6), method="nearest_neighbor")), (2, 2)))
    y = emit(op.sum(emit(op.stack([y, emit(op.repeat(emit(op.max(y, 3, keepdims=True)), 2, axis=3))], -1)), (2, 3)))
    y = emit(op.nn.log_softmax(emit(op.tile(emit(op.nn.avg_pool1d(y, 2, 2)), (1, 1, 2))), axis=1))
    return emit(op.mean(y, -1))


MOVING = {"w": (4, 2, 2, 2), "slopes": (4,), "slope": (1,), "scale": (3,)}


def test_operators_that_move_elements() -> None:
    rng = np.random.default_rng(4)
    module = network(moving_operators, (4, 2, 5, 5), MOVING)
    models = members_of(module, {n: rng.standard_normal(s).astype("float32") for n, s in MOVING.items()})
    x = rng.standard_normal((4, MEMBERS, 2, 5, 5)).astype("float32")
    check(models, x, rng.integers(0, 4, (4, MEMBERS)), True, steps=2)


def writing_operators(emit: Any, x: Any, w: Any, base: Any) -> Any:
    """Slices and elements written into tensors that all members share, or that each has; elements read at places."""
    y = emit(op.nn.conv2d(x, w))
    y = emit(op.slice_scatter(y, emit(op.strided_slice(emit(op.multiply(y, y)), [3], [0], [2])), 1, 3, 1, axis=-1))
    y = emit(op.slice_scatter(emit(op.zeros_like(y)), emit(op.strided_slice(y, [1], [0], [2])), 1, 4, 2, axis=1))
    places = emit(op.astype(emit(op.clip(emit(op.abs(y)), 0, 2)), "int64"))
    read = emit(op.gather_elements(emit(op.add(y, base)), places, axis=2))
    y = emit(op.scatter_elements(y, places, read, axis=-1, reduction="add"))
    return emit(op.sum(y, (2, 3)))


WRITING = {"w": (4, 2, 2, 2), "base": (4, 1, 1)}


@pytest.mark.parametrize("own_data", [False, True])
def test_operators_that_write_into_tensors(own_data: bool) -> None:
    rng = np.random.default_rng(5)
    module = network(writing_operators, (4, 2, 5, 5), WRITING)
    models = members_of(module, {n: rng.standard_normal(s).astype("float32") for n, s in WRITING.items()})
    mine = (MEMBERS,) if own_data else ()
    x = rng.standard_normal((4, *mine, 2, 5, 5)).astype("float32")
    check(models, x, rng.integers(0, 4, (4, *mine)), own_data, steps=2)


def convolutions(emit: Any, x: Any, w1: Any, w2: Any) -> Any:
    y = emit(op.nn.relu(emit(op.nn.conv2d(x, w1, padding=1, groups=2))))
    y = emit(op.nn.conv2d(y, w2, strides=2))
    return emit(op.sum(y, (2, 3)))


@pytest.mark.parametrize("own_data", [False, True])
def test_small_integers_exactly(own_data: bool) -> None:
    """One step on integers: sums are exact, and so are the means over powers of two."""
    rng = np.random.default_rng(5)
    shapes = {"w1": (4, 1, 3, 3), "w2": (4, 4, 2, 2)}
    module = network(convolutions, (4, 2, 4, 4), shapes)
    models = [
        from_module(module, parameters={n: rng.integers(-2, 3, s).astype("float32") for n, s in shapes.items()})
        for _ in range(MEMBERS)
    ]
    mine = (MEMBERS,) if own_data else ()
    x = rng.integers(-2, 3, (4, *mine, 2, 4, 4)).astype("float32")
    target = rng.integers(-2, 3, (4, *mine, 4)).astype("float32")
    together = Steps(ensemble(models, own_data=own_data), loss="mse")
    assert together.step.prediction.shape == (4, MEMBERS, 4)
    alone = [Steps(model, loss="mse") for model in models]
    loss = together.run(x, target, 0.125)
    losses = [
        one.run(x[:, k] if own_data else x, target[:, k] if own_data else target, 0.125) for k, one in enumerate(alone)
    ]
    assert loss == sum(losses)
    for number, one in enumerate(alone):
        for name, want in one.named().items():
            np.testing.assert_array_equal(together.named()[name][number], want)
            assert np.any(want != models[number].parameters[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(dtype: str) -> None:
    """Narrow operands of grouped convolutions and products are summed in float32, as the members' alone are."""
    models = members_of(relax_module(batch=8), weights())
    together = Steps(ensemble(models), dtype=dtype)
    alone = [Steps(model, dtype=dtype) for model in models]
    x, labels = data(False)
    together.run(x, labels, 0.1)
    for number, one in enumerate(alone):
        one.run(x, labels, 0.1)
        for name, want in one.named().items():
            assert relative_error(together.named()[name][number], want) < 1e-3, name


def test_wrong_use() -> None:
    models = members_of(relax_module(batch=8), weights())
    with pytest.raises(ModelError, match="no models were given"):
        ensemble([])
    other = from_module(relax_module(batch=4), parameters=weights())
    with pytest.raises(ModelError, match=r"model 1 .* has another architecture than model 0"):
        ensemble([models[0], other])
    both = ensemble(models)
    with pytest.raises(ModelError, match="model 0 is an ensemble itself"):
        ensemble([both])
    with pytest.raises(UnsupportedError, match="an ensemble has no per-sample gradients here"):
        per_sample_module(both)
    module = network(lambda emit, x, w: emit(op.cumprod(emit(op.matmul(x, w)), 1)), (2, 3), {"w": (3, 3)})
    with pytest.raises(UnsupportedError, match=r"relax.cumprod has no rule for members; replace it in the model"):
        ensemble([from_module(module)])
