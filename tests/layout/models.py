# SPDX-License-Identifier: Apache-2.0
"""Small ResNet-18 and MobileNetV2, and a net of other layers, as functions of a `Net`, which makes Relax or PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.compat import SHRINKS_BUFFERS
from relax_ops.single_run import QUICK_CONFIG, linked
from tests.linked import PLAIN

Array = np.ndarray[Any, Any]
Model = Callable[[Any, Any], Any]


class Net:
    """Layers in Relax; each parameter is made where it is used first, in the order that TorchNet takes them."""

    def __init__(self, dtype: str = "float64") -> None:
        self.builder = relax.BlockBuilder()
        self.params: list[Any] = []
        self.dtype = dtype
        self.convolutions = 0

    def parameter(self, *shape: int) -> Any:
        self.params.append(relax.Var(f"p{len(self.params)}", relax.TensorType(shape, self.dtype)))
        return self.params[-1]

    def emit(self, expr: Any) -> Any:
        return self.builder.emit(expr)

    def shape(self, x: Any) -> list[int]:
        return [int(extent) for extent in x.ty.shape]

    def conv(self, x: Any, out: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> Any:
        self.convolutions += 1
        weight = self.parameter(out, self.shape(x)[1] // groups, kernel, kernel)
        padding = kernel // 2 * dilation
        return self.emit(op.nn.conv2d(x, weight, strides=stride, padding=padding, groups=groups, dilation=dilation))

    def norm(self, x: Any) -> Any:
        c = self.shape(x)[1]
        gamma, beta = self.parameter(c), self.parameter(c)
        zeros, ones = (relax.const(f(c, self.dtype), self.dtype) for f in (np.zeros, np.ones))
        normed = self.emit(op.nn.batch_norm(x, gamma, beta, zeros, ones, axis=1, training=True))
        return self.emit(relax.TupleGetItem(normed, 0))

    def linear(self, x: Any, out: int) -> Any:
        weight, bias = self.parameter(self.shape(x)[1], out), self.parameter(out)
        return self.emit(op.add(self.emit(op.matmul(x, weight)), bias))

    def channel_bias(self, x: Any) -> Any:
        c = self.shape(x)[1]
        return self.emit(op.add(x, self.emit(op.reshape(self.parameter(c), (1, c, 1, 1)))))

    def relu(self, x: Any) -> Any:
        return self.emit(op.nn.relu(x))

    def relu6(self, x: Any) -> Any:
        return self.emit(op.clip(x, 0, 6))

    def leaky(self, x: Any) -> Any:
        return self.emit(op.nn.leakyrelu(x, 0.1))

    def gelu(self, x: Any) -> Any:
        return self.emit(op.nn.gelu(x))

    def sigmoid(self, x: Any) -> Any:
        return self.emit(op.sigmoid(x))

    def add(self, x: Any, y: Any) -> Any:
        return self.emit(op.add(x, y))

    def multiply(self, x: Any, y: Any) -> Any:
        return self.emit(op.multiply(x, y))

    def concat(self, *xs: Any) -> Any:
        return self.emit(op.concat(list(xs), 1))

    def pad_end(self, x: Any) -> Any:
        return self.emit(op.nn.pad(x, [0, 0, 0, 0, 0, 1, 0, 1]))

    def max_pool(self, x: Any, size: int, stride: int, padding: int) -> Any:
        return self.emit(op.nn.max_pool2d(x, (size, size), (stride, stride), (padding, padding)))

    def avg_pool(self, x: Any, size: int, stride: int, padding: int) -> Any:
        return self.emit(
            op.nn.avg_pool2d(x, (size, size), (stride, stride), (padding, padding), count_include_pad=True)
        )

    def adaptive_pool(self, x: Any, size: int) -> Any:
        return self.emit(op.nn.adaptive_avg_pool2d(x, (size, size)))

    def spatial_mean(self, x: Any, keepdims: bool = False) -> Any:
        return self.emit(op.mean(x, axis=[2, 3], keepdims=keepdims))

    def rows(self, x: Any) -> Any:
        n, *rest = self.shape(x)
        return self.emit(op.reshape(x, (n, int(np.prod(rest)))))

    def shuffle(self, x: Any, groups: int) -> Any:
        n, c, h, w = self.shape(x)
        parts = self.emit(op.reshape(x, (n, groups, c // groups, h, w)))
        return self.emit(op.reshape(self.emit(op.permute_dims(parts, [0, 2, 1, 3, 4])), (n, c, h, w)))


class TorchNet(Net):
    """The same layers on torch tensors with given parameters."""

    def __init__(self, torch: Any, params: list[Any]) -> None:
        self.torch, self.f, self._params = torch, torch.nn.functional, iter(params)

    def parameter(self, *shape: int) -> Any:
        value = next(self._params)
        assert tuple(value.shape) == shape
        return value

    def shape(self, x: Any) -> list[int]:
        return list(x.shape)

    def conv(self, x: Any, out: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> Any:
        weight = self.parameter(out, x.shape[1] // groups, kernel, kernel)
        padding = kernel // 2 * dilation
        return self.f.conv2d(x, weight, stride=stride, padding=padding, groups=groups, dilation=dilation)

    def norm(self, x: Any) -> Any:
        gamma, beta = self.parameter(x.shape[1]), self.parameter(x.shape[1])
        return self.f.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-5)

    def linear(self, x: Any, out: int) -> Any:
        weight, bias = self.parameter(x.shape[1], out), self.parameter(out)
        return x @ weight + bias

    def channel_bias(self, x: Any) -> Any:
        return x + self.parameter(x.shape[1])[None, :, None, None]

    def relu(self, x: Any) -> Any:
        return self.f.relu(x)

    def relu6(self, x: Any) -> Any:
        return x.clamp(0, 6)

    def leaky(self, x: Any) -> Any:
        return self.f.leaky_relu(x, 0.1)

    def gelu(self, x: Any) -> Any:
        return self.f.gelu(x)

    def sigmoid(self, x: Any) -> Any:
        return x.sigmoid()

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y

    def concat(self, *xs: Any) -> Any:
        return self.torch.cat(xs, 1)

    def pad_end(self, x: Any) -> Any:
        return self.f.pad(x, (0, 1, 0, 1))

    def max_pool(self, x: Any, size: int, stride: int, padding: int) -> Any:
        return self.f.max_pool2d(x, size, stride, padding)

    def avg_pool(self, x: Any, size: int, stride: int, padding: int) -> Any:
        return self.f.avg_pool2d(x, size, stride, padding)

    def adaptive_pool(self, x: Any, size: int) -> Any:
        return self.f.adaptive_avg_pool2d(x, size)

    def spatial_mean(self, x: Any, keepdims: bool = False) -> Any:
        return x.mean((2, 3), keepdim=keepdims)

    def rows(self, x: Any) -> Any:
        return x.flatten(1)

    def shuffle(self, x: Any, groups: int) -> Any:
        return self.f.channel_shuffle(x, groups)


WIDTHS = (8, 8, 12, 12)


def resnet18(net: Any, x: Any) -> Any:
    """The form for CIFAR: 3x3 stem."""
    return _residual_stages(net, net.relu(net.norm(net.conv(x, WIDTHS[0], 3))))


def resnet18_large(net: Any, x: Any) -> Any:
    """The form for 224x224: 7x7 stem of stride 2 and a max pool."""
    return _residual_stages(net, net.max_pool(net.relu(net.norm(net.conv(x, WIDTHS[0], 7, 2))), 3, 2, 1))


def _residual_stages(net: Any, y: Any) -> Any:
    for stage, width in enumerate(WIDTHS):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = net.relu(net.norm(net.conv(y, width, 3, stride)))
            inner = net.norm(net.conv(inner, width, 3))
            if stride > 1 or net.shape(y)[1] != width:
                y = net.norm(net.conv(y, width, 1, stride))
            y = net.relu(net.add(inner, y))
    return net.linear(net.spatial_mean(y), 10)


MOBILE_BLOCKS = ((1, 4, 1, 1), (6, 6, 2, 2), (6, 8, 2, 1), (6, 8, 1, 1))
"""Expansion, channels, repeats, stride: a narrow MobileNetV2."""


def mobilenet_v2(net: Any, x: Any) -> Any:
    """Inverted residuals with depthwise convolutions and relu6."""
    y = net.relu6(net.norm(net.conv(x, 8, 3, 2)))
    for expansion, width, repeats, first_stride in MOBILE_BLOCKS:
        for repeat in range(repeats):
            stride, inner, before = (first_stride if repeat == 0 else 1), y, net.shape(y)[1]
            hidden = before * expansion
            if expansion > 1:
                inner = net.relu6(net.norm(net.conv(inner, hidden, 1)))
            inner = net.relu6(net.norm(net.conv(inner, hidden, 3, stride, groups=hidden)))
            inner = net.norm(net.conv(inner, width, 1))
            y = net.add(inner, y) if stride == 1 and before == width else inner
    y = net.relu6(net.norm(net.conv(y, 24, 1)))
    return net.linear(net.rows(net.adaptive_pool(y, 1)), 10)


def mixed(net: Any, x: Any) -> Any:
    """Pools of three kinds, concatenation, padding, a gate, a channel shuffle, dilation, other activations."""
    y = net.relu(net.norm(net.conv(x, 8, 3)))
    y = net.concat(net.max_pool(y, 2, 2, 0), net.avg_pool(y, 3, 2, 1))
    y = net.leaky(net.conv(net.pad_end(y), 12, 3, 2))
    y = net.multiply(y, net.sigmoid(net.conv(net.spatial_mean(y, keepdims=True), 12, 1)))
    y = net.shuffle(net.gelu(net.channel_bias(y)), 3)
    y = net.conv(y, 12, 3, groups=2, dilation=2)
    return net.linear(net.spatial_mean(net.adaptive_pool(y, 2)), 10)


def training_module(model: Model, shape: tuple[int, ...], dtype: str = "float64") -> tuple[Any, Net]:
    """main(x, labels, parameters...): mean cross-entropy with batch norms written out; main_adjoint: and gradients."""
    x = relax.Var("x", relax.TensorType(shape, dtype))
    labels = relax.Var("labels", relax.TensorType(shape[:1], "int64"))
    net = Net(dtype)
    with net.builder.function("main"):
        with net.builder.dataflow():
            logs = net.emit(op.nn.log_softmax(model(net, x), 1))
            loss = net.builder.emit_output(op.nn.nll_loss(logs, labels, reduction="mean"))
        net.builder.emit_func_output(loss, [x, labels, *net.params])
    module = relax.transform.DecomposeOpsForTraining()(net.builder.get())
    return relax.transform.Gradient("main", require_grads=list(module["main"].params[2:]))(module), net


def arguments(net: Net, shape: tuple[int, ...], seed: int = 0) -> list[Array]:
    """Input, labels and parameters."""
    rng = np.random.default_rng(seed)
    result = [rng.standard_normal(shape).astype(net.dtype), rng.integers(0, 10, shape[:1]).astype("int64")]
    for param in net.params:
        extents = net.shape(param)
        scale = 1 / np.sqrt(np.prod(extents[1:])) if len(extents) > 1 else 1.0
        result.append((rng.standard_normal(extents) * scale).astype(net.dtype))
    return result


def torch_gradients(model: Model, torch: Any, arrays: list[Array]) -> list[Array]:
    """Loss and parameter gradients by PyTorch."""
    x, labels, *params = [torch.from_numpy(array.copy()) for array in arrays]
    for param in params:
        param.requires_grad_()
    loss = torch.nn.functional.cross_entropy(model(TorchNet(torch, params), x), labels)
    loss.backward()
    return [loss.detach().numpy(), *(param.grad.numpy() for param in params)]


def run(module: Any, function: str, arrays: list[Any]) -> list[Array]:
    """Build for the CPU, without LLVM's optimisation, which would take most of the time, and call."""
    alone = tvm.IRModule({function: module[function].with_attr("global_symbol", function)})
    with tvm.transform.PassContext(config=QUICK_CONFIG, disabled_pass=SHRINKS_BUFFERS):
        machine = linked(tvm.compile(alone, tvm.target.Target(PLAIN)))
    result = machine[function](*[a if isinstance(a, tuple) else tvm.runtime.tensor(a) for a in arrays])
    return [item.numpy() for item in _leaves(result)]


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, tvm.runtime.Tensor) else [leaf for item in value for leaf in _leaves(item)]


def calls(module: Any, function: str, *names: str) -> list[Any]:
    """Every call of these operators in the function, in order; all calls if none is named."""
    found: list[Any] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and (not names or str(expr.op.name).removeprefix("relax.") in names):
            found.append(expr)

    relax.analysis.post_order_visit(module[function], visit)
    return found


def transforms(module: Any, function: str) -> int:
    """How many transposes and layout transforms of tensors with 3 axes or more (a linear layer transposes matrices)."""
    return sum(int(call.args[0].ty.ndim) > 2 for call in calls(module, function, "permute_dims", "layout_transform"))
