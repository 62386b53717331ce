# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients equal ordinary gradients of one sample at a time; norms and clipped sums follow from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.per_sample import gram
from relax_ops.single_run import quick_machine
from tests.linked import quick_module
from tests.training.harness import Runner, relative_error
from tests.training.small_models import data, relax_module, weights
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.autodiff.differentiate import emit_with_gradients
from tvm_convgrad.training.autodiff.per_sample import PerSampleGradients
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.per_sample import per_sample_module

Make = Callable[..., Any]
"""make(emit, x, *parameters) -> y: a network, without its loss."""


def ints(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype("float32")


def real(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


class Network:
    """A network with the loss sum(y * target) of each sample, its data and its parameters."""

    def __init__(self, make: Make, x: Any, target: Any, parameters: dict[str, Any]) -> None:
        self.make, self.x, self.target, self.parameters = make, x, target, parameters
        self.arrays = [x, target, *parameters.values()]

    def module(self, batch: Any, name: str = "main", total: bool = False) -> Any:
        """main(x, target, parameters) -> losses; or (the sum of the losses,)."""
        xs, ts = (
            relax.Var(n, relax.TensorType([batch, *array.shape[1:]], str(array.dtype)))
            for n, array in (("x", self.x), ("target", self.target))
        )
        variables = [relax.Var(n, relax.TensorType(value.shape, "float32")) for n, value in self.parameters.items()]
        builder = relax.BlockBuilder()
        with builder.function(name, [xs, ts, *variables]):
            with builder.dataflow():
                y = self.make(builder.emit, xs, *variables)
                product = builder.emit(op.multiply(y, ts))
                losses = builder.emit(op.sum(product, list(range(1, self.target.ndim))))
                output = builder.emit_output(builder.emit(op.sum(losses)) if total else losses)
            builder.emit_func_output(relax.Tuple([output]) if total else output)
        return builder.get()

    def per_sample(self, result: Any = "gradients", batch: Any = None) -> Any:
        options = {"parameters": list(self.parameters), "samples": ["x", "target"], "result": result}
        return PerSampleGradients(**options)(self.module(len(self.x) if batch is None else batch))

    def run(self, result: Any = "gradients", batch: Any = None, *more: Any) -> list[Any]:
        """Losses, and then the results."""
        machine = quick_machine(self.per_sample(result, batch))
        return [r.numpy() for r in machine["main_per_sample"](*map(tvm.runtime.tensor, [*self.arrays, *more]))]

    def one_by_one(self) -> list[Any]:
        """The definition: the program of one sample's gradients, run for each sample."""
        function = self.module(1, "total", total=True)["total"]
        builder = relax.BlockBuilder()
        arguments = [relax.Var(str(param.name), param.ty) for param in function.params]
        with builder.function("main", arguments):
            with builder.dataflow():
                wanted = range(2, len(arguments))
                _, found = emit_with_gradients(builder, function, arguments, wanted, "test")
                output = builder.emit_output(relax.Tuple(found))
            builder.emit_func_output(output)
        main = quick_machine(builder.get())["main"]
        rows = []
        for n in range(len(self.x)):
            arrays = [self.x[n : n + 1], self.target[n : n + 1], *self.parameters.values()]
            rows.append([part.numpy() for part in main(*map(tvm.runtime.tensor, arrays))])
        return [np.stack(parts) for parts in zip(*rows, strict=True)]


def convolutions(emit: Any, x: Any, w1: Any, b1: Any, w2: Any, w3: Any, fc: Any, b: Any) -> Any:
    """Grouped and strided, transposed, depthwise with NHWC between; bias, relu, pools, and a linear layer."""
    y = emit(op.nn.conv2d(x, w1, strides=2, padding=1, groups=2))
    y = emit(op.nn.relu(emit(op.add(y, emit(op.reshape(b1, (1, 6, 1, 1)))))))
    y = emit(op.nn.conv2d_transpose(y, w2, strides=2, output_padding=1))
    y = emit(op.permute_dims(y, [0, 2, 3, 1]))
    y = emit(op.nn.conv2d(y, w3, groups=4, data_layout="NHWC", kernel_layout="HWIO"))
    y = emit(op.nn.max_pool2d(y, (2, 2), (2, 2), layout="NHWC"))
    y = emit(op.reshape(y, (y.ty.shape.values[0], fc.ty.shape.values[1])))
    return emit(op.add(emit(op.matmul(y, emit(op.permute_dims(fc)))), b))


def convolution_network() -> Network:
    parameters = {
        "w1": ints(1, 6, 2, 3, 3),
        "b1": ints(2, 6),
        "w2": ints(3, 6, 4, 2, 2),
        "w3": ints(4, 3, 3, 1, 4),
        "fc": ints(5, 5, 36),
        "b": ints(6, 5),
    }
    return Network(convolutions, ints(0, 4, 4, 7, 7), ints(7, 4, 5), parameters)


@pytest.mark.parametrize("batch", [None, "n"])
def test_exactly_those_of_one_sample_at_a_time(batch: Any) -> None:
    """Fixed batch: wgrad with the samples as groups. Any batch: matrix products. Small integers: no rounding."""
    network = convolution_network()
    if batch == "n":
        batch = tvm.tirx.Var("n", "int64")
    _, *found = network.run("gradients", batch)
    for name, have, want in zip(network.parameters, found, network.one_by_one(), strict=True):
        np.testing.assert_array_equal(have, want, err_msg=name)
        assert abs(have).max() > 0


def test_a_batch_of_one_sample() -> None:
    """As ONNX files often have: TVM drops sums over an axis of one element, such as a bias gradient's."""
    network = convolution_network()
    network.x, network.target = network.x[:1], network.target[:1]
    network.arrays[:2] = [network.x, network.target]
    _, *found = network.run()
    for name, have, want in zip(network.parameters, found, network.one_by_one(), strict=True):
        np.testing.assert_array_equal(have, want, err_msg=name)
        assert abs(have).max() > 0


def norms(emit: Any, x: Any, scale: Any, shift: Any, gamma: Any, beta: Any, w: Any) -> Any:
    """Group norm and layer norm, softmax, a parameter used twice, and a linear layer on three axes."""
    y = emit(op.nn.group_norm(x, scale, shift, num_groups=2, channel_axis=1, axes=[2, 3]))
    y = emit(op.nn.layer_norm(y, gamma, beta, axes=[-1]))
    y = emit(op.mean(y, [2]))
    y = emit(op.add(emit(op.matmul(y, w)), emit(op.matmul(emit(op.tanh(y)), w))))
    return emit(op.nn.softmax(y, axis=-1))


def norm_network() -> Network:
    parameters = {"scale": real(1, 4), "shift": real(2, 4), "gamma": real(3, 6), "beta": real(4, 6), "w": real(5, 6, 3)}
    return Network(norms, real(0, 3, 4, 5, 6), real(6, 3, 4, 3), parameters)


def test_norms_and_tokens() -> None:
    network = norm_network()
    for name, have, want in zip(network.parameters, network.run()[1:], network.one_by_one(), strict=True):
        assert relative_error(have, want) < 1e-5, name


def tokens(emit: Any, x: Any, w: Any, b: Any, v: Any, u: Any) -> Any:
    """Linear layers and a convolution on all pixels of all samples at once, as exporters write them."""
    n, h, c = x.ty.shape.values[0], 3, 4
    y = emit(op.reshape(x, (n * h, c)))
    y = emit(op.nn.relu(emit(op.add(emit(op.matmul(y, emit(op.permute_dims(w)))), b))))
    y = emit(op.nn.conv1d(emit(op.reshape(y, (n * h, 1, 6))), u, padding=1))
    return emit(op.reshape(emit(op.matmul(emit(op.reshape(y, (n * h, 6))), v)), (n, h, 5)))


def token_network() -> Network:
    parameters = {"w": ints(1, 6, 4), "b": ints(2, 6), "v": ints(3, 6, 5), "u": ints(4, 1, 1, 3)}
    return Network(tokens, ints(0, 5, 3, 4), ints(5, 5, 3, 5), parameters)


@pytest.mark.parametrize("batch", [None, "n"])
def test_samples_merged_with_their_own_entries(batch: Any) -> None:
    network = token_network()
    _, *found = network.run("gradients", tvm.tirx.Var("n", "int64") if batch else None)
    for name, have, want in zip(network.parameters, found, network.one_by_one(), strict=True):
        np.testing.assert_array_equal(have, want, err_msg=name)


def wide_network() -> Network:
    def make(emit: Any, x: Any, w: Any) -> Any:
        n = x.ty.shape.values[0]
        return emit(op.reshape(emit(op.matmul(emit(op.reshape(x, (n * 2, 40))), w)), (n, 2, 32)))

    return Network(make, ints(0, 3, 2, 40), ints(1, 3, 2, 32), {"w": ints(2, 40, 32)})


def embedded(emit: Any, x: Any, table: Any, w: Any) -> Any:
    """Rows of a table at places of each sample, some of them several times; and one row of another axis."""
    rows = emit(op.take(table, x, axis=0))
    return emit(op.mean(emit(op.matmul(rows, w)), [1]))


def embedding_network(places: tuple[int, ...] = (5,), rows: int = 7) -> Network:
    x = np.random.default_rng(0).integers(0, 4, (4, *places)).astype("int64")
    return Network(embedded, x, real(1, 4, *places[1:], 3), {"table": real(2, rows, 6), "w": real(3, 6, 3)})


@pytest.mark.parametrize(("places", "rows"), [((5,), 7), ((2, 3), 9), ((1,), 4), ((8,), 5)], ids=str)
@pytest.mark.parametrize("batch", [4, "n"])
def test_rows_of_a_table(batch: Any, places: tuple[int, ...], rows: int) -> None:
    network = embedding_network(places, rows)
    wanted = network.one_by_one()
    _, *found = network.run(batch=tvm.tirx.Var("n", "int64") if batch == "n" else batch)
    for have, want in zip(found, wanted, strict=True):
        assert relative_error(have, want) < 1e-5
    _, norms = network.run("norms", 4)
    squares = sum((value.astype("float64").reshape(4, -1) ** 2).sum(1) for value in wanted)
    assert relative_error(norms, np.sqrt(squares)) < 1e-5


def ghost(emit: Any, x: Any, w: Any, wt: Any) -> Any:
    """A convolution with few pixels and many channels, in groups."""
    y = emit(op.nn.conv2d(x, w, groups=2, padding=(1, 0), strides=2))
    return emit(op.nn.conv2d(y, wt))


def ghost_network() -> Network:
    parameters = {"w": ints(1, 32, 24, 3, 3), "wt": ints(2, 24, 32, 1, 1)}
    return Network(ghost, ints(0, 3, 48, 4, 4), ints(3, 3, 24, 2, 1), parameters)


@pytest.mark.parametrize("make", [convolution_network, norm_network, ghost_network, token_network, wide_network])
def test_norms_are_those_of_the_gradients(make: Any) -> None:
    network = make()
    each = network.one_by_one()
    squares = sum((g.astype("float64") ** 2).sum(tuple(range(1, g.ndim))) for g in each)
    _, found = network.run("norms")
    assert found.dtype == "float32"
    assert relative_error(found, np.sqrt(squares)) < 1e-5


def operators(module: Any) -> list[str]:
    blocks = module["main_per_sample"].body.blocks
    values = [binding.value for block in blocks for binding in block.bindings]
    return [str(value.op.name) for value in values if isinstance(value, tvm.ir.Call)]


def test_norms_by_gram_matrices_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ghost_network()
    assert "relax.nn.conv2d_backward_weight" not in operators(network.per_sample("norms"))
    assert operators(network.per_sample("gradients")).count("relax.nn.conv2d_backward_weight") == 2
    ghosts = network.run("norms")[1]
    monkeypatch.setattr(gram, "GHOST", 10**6)
    assert operators(network.per_sample("norms")).count("relax.nn.conv2d_backward_weight") == 2
    np.testing.assert_allclose(network.run("norms")[1], ghosts, rtol=1e-6)


@pytest.mark.parametrize("batch", [None, "n"])
@pytest.mark.parametrize("make", [convolution_network, norm_network])
def test_clipped_sums(make: Any, batch: Any) -> None:
    """Some samples are clipped, some are not; nothing of the size of all gradients is computed."""
    network = make()
    each = network.one_by_one()
    squares = sum((g.astype("float64") ** 2).sum(tuple(range(1, g.ndim))) for g in each)
    clip = float(np.median(np.sqrt(squares)))
    factors = np.minimum(1.0, clip / np.sqrt(squares))
    assert factors.min() < 1 == factors.max()
    symbol = tvm.tirx.Var("n", "int64") if batch else None
    _, found_norms, *found = network.run("clipped", symbol, np.float32(clip))
    assert relative_error(found_norms, np.sqrt(squares)) < 1e-5
    largest = max(float(abs(gradients).max()) for gradients in each)
    for name, have, gradients in zip(network.parameters, found, each, strict=True):
        assert abs(have - np.tensordot(factors, gradients, 1)).max() < 1e-5 * largest, name


def planned_bytes(module: Any) -> int:
    """What the compiled program reserves at most: the storages of its memory plan."""
    with tvm.target.Target("llvm"):
        lowered = relax.transform.LegalizeOps()(module)
        for make in ("AnnotateTIROpPattern", "FuseOps", "FuseTIR", "ToNonDataflow", "CallTIRRewrite"):
            lowered = getattr(relax.transform, make)()(lowered)
        lowered = relax.transform.StaticPlanBlockMemory()(lowered)
    total = 0
    for block in lowered["main_per_sample"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, tvm.ir.Call) and str(getattr(value.op, "name", "")) == "relax.memory.alloc_storage":
                total += int(value.args[0].values[0])
    return total


def test_norms_do_not_hold_all_gradients() -> None:
    """Twelve layers: activations, their gradients and the gradients of one layer are less than half of all of these."""
    layers = {f"w{k}": real(k, 16, 16, 3, 3) for k in range(12)}

    def deep(emit: Any, x: Any, *parameters: Any) -> Any:
        for w in parameters:
            x = emit(op.nn.relu(emit(op.nn.conv2d(x, w, padding=1))))
        return x

    network = Network(deep, real(20, 16, 16, 4, 4), real(21, 16, 16, 4, 4), layers)
    everything = 16 * sum(value.nbytes for value in layers.values())
    assert planned_bytes(network.per_sample("norms")) < everything / 2


class Trained:
    """The small model, batch norm frozen, with data."""

    model = from_module(relax_module(batch=8), parameters=weights())
    arrays = (*data(), *model.parameters.values(), *model.states.values())

    def run(self, result: Any, *more: Any, dtype: str = "float32", compiler: Any = quick_machine) -> list[Any]:
        main = compiler(per_sample_module(self.model, result=result, dtype=dtype))["main_per_sample"]
        return [r.numpy() for r in main(*map(tvm.runtime.tensor, [*self.arrays, *more]))]


@pytest.fixture(scope="module")
def gradients() -> list[Any]:
    return Trained().run("gradients")


def test_a_model_compiled_as_steps_are(gradients: list[Any]) -> None:
    losses, predictions, found_norms, *found = Trained().run("clipped", np.float32(2.0), compiler=quick_module)
    assert (losses.shape, predictions.shape) == ((8,), (8, 5))
    squares = sum((g.astype("float64") ** 2).reshape(8, -1).sum(1) for g in gradients[2:])
    assert relative_error(found_norms, np.sqrt(squares)) < 1e-5
    factors = np.minimum(1, 2.0 / np.sqrt(squares))
    for have, each in zip(found, gradients[2:], strict=True):
        assert relative_error(have, np.tensordot(factors, each, 1)) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-2), ("float16", 1e-2)])
def test_mixed_precision(gradients: list[Any], dtype: str, tolerance: float) -> None:
    """Only operands of convolutions and products are narrow; what comes out is float32."""
    found = Trained().run("gradients", dtype=dtype)
    assert all(part.dtype == "float32" for part in found)
    errors = [relative_error(have, want) for have, want in zip(found, gradients, strict=True)]
    assert 0 < max(errors) < tolerance


def test_the_gradients_of_the_mean_are_their_mean(gradients: list[Any]) -> None:
    """Against the ordinary step: plain SGD with lr 1 moves each parameter by the gradient of the mean loss."""
    (x, labels), model = data(), Trained.model
    runner = Runner(build_step(model, lr=1.0, bn="frozen"))
    before = runner.named("parameter")
    loss, _ = runner.step(x, labels, lr=1.0)
    after = runner.named("parameter")
    losses, _, *found = gradients
    assert abs(loss - losses.mean()) < 1e-6
    for name, each in zip(model.parameters, found, strict=True):
        assert relative_error(each.mean(0), before[name] - after[name]) < 1e-5, name


def centred(emit: Any, x: Any, w: Any) -> Any:
    y = emit(op.matmul(x, w))
    return emit(op.subtract(y, emit(op.mean(y, 0))))


def summed(emit: Any, x: Any, w: Any) -> Any:
    y = emit(op.matmul(x, w))
    return emit(op.subtract(y, emit(op.sum(y, 0))))


def squared(emit: Any, x: Any, w: Any) -> Any:
    y = emit(op.matmul(x, w))
    return emit(op.multiply(y, emit(op.mean(y, 0))))


def across(emit: Any, x: Any, w: Any) -> Any:
    return emit(op.nn.softmax(emit(op.matmul(x, w)), axis=0))


def contrastive(emit: Any, x: Any, w: Any) -> Any:
    y = emit(op.matmul(x, w))
    return emit(op.matmul(emit(op.matmul(y, emit(op.permute_dims(y)))), y))


def merged(emit: Any, x: Any, w: Any) -> Any:
    y = emit(op.reshape(emit(op.matmul(x, w)), (2, 6)))
    return emit(op.reshape(emit(op.exp(y)), (4, 3)))


def flat_softmax(emit: Any, x: Any, w: Any) -> Any:
    y = emit(op.reshape(emit(op.matmul(x, w)), (12,)))
    return emit(op.reshape(emit(op.nn.softmax(y)), (4, 3)))


def reversed_samples(emit: Any, x: Any, w: Any) -> Any:
    return emit(op.flip(emit(op.matmul(x, w)), 0))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (centred, "relax.add: it takes a sum over the samples back to each of them"),
        (summed, "relax.add: it takes a sum over the samples back to each of them"),
        (squared, "relax.mean: it reduces over the samples"),
        (across, "relax.nn.softmax: it runs along the samples"),
        (contrastive, "relax.matmul: it multiplies each sample by every other"),
        (merged, "relax.reshape: it merges the axis of the samples with others"),
        (flat_softmax, "relax.nn.softmax: it runs along the samples"),
        (reversed_samples, "relax.flip: it runs along the samples"),
    ],
)
def test_samples_that_meet_are_refused(make: Make, part: str) -> None:
    network = Network(make, real(0, 4, 5), real(1, 4, 3), {"w": real(2, 5, 3)})
    with pytest.raises(ModelError, match=f"the gradient of 'w' does not fall into those of the samples: {part}"):
        network.per_sample()


def test_wrong_use() -> None:
    network = norm_network()
    module = network.module(3)
    with pytest.raises(UnsupportedError, match="result='norm' is unknown; choose one of gradients, norms, clipped"):
        network.per_sample("norm")
    with pytest.raises(ModelError, match=r"'main' has no parameter v; it has \['x', 'target'"):
        PerSampleGradients(parameters=["v"], samples=["x"])(module)
    with pytest.raises(ModelError, match="no Relax function 'loss'"):
        PerSampleGradients("loss", parameters=["w"], samples=["x"])(module)
    scalar = network.module(3, total=True)
    with pytest.raises(ModelError, match="must return the samples' losses first, a vector"):
        PerSampleGradients(parameters=["w"], samples=["x"])(scalar)
    with pytest.raises(UnsupportedError, match="dtype = 'float8' is unknown"):
        per_sample_module(from_module(relax_module(batch=8), parameters=weights()), dtype="float8")


def unused(emit: Any, x: Any, w: Any, v: Any) -> Any:
    return emit(op.matmul(x, w))


def test_a_parameter_that_nothing_depends_on_has_zeros() -> None:
    network = Network(unused, ints(0, 4, 5), ints(1, 4, 3), {"w": ints(2, 5, 3), "v": ints(3, 2)})
    for have, want in zip(network.run()[1:], network.one_by_one(), strict=True):
        np.testing.assert_array_equal(have, want)
