# SPDX-License-Identifier: Apache-2.0
"""Dropout of every flavour, and where gradients stop, in a graph of torch.export before it is decomposed.

PyTorch decomposes all dropouts but the plain one to `bernoulli`, drops them where the model was exported in eval mode,
and takes `detach` and `torch.no_grad()` for the identity. Here each dropout becomes the plain one in train mode, of the
tensor itself or of a tensor of ones, which the translator makes a seeded mask that is the identity in `predict`; and
what must not be differentiated passes through an operator of our own, `convgrad::stop_gradient`. Other random numbers
are made of dropouts, too (`torch_noise`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends.torch_export.aliases import with_own_graph
from tvm_convgrad.training.frontends.torch_export.no_grad import is_own_value, stop_gradients, trained_inputs
from tvm_convgrad.training.frontends.torch_export.noise import is_noise, noise
from tvm_convgrad.training.frontends.torch_export.places import name_of, place_of

if TYPE_CHECKING:  # an optional package
    import torch


STOP_GRADIENT, BY_MODE = "stop_gradient.default", "by_mode.default"

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

_SWITCHES = {"batch_norm.default": 5, "rrelu.default": 3, "rrelu_.default": 3} | {
    f"{kind}dropout{ending}.default": 2 for kind in ("", "feature_", "alpha_", "feature_alpha_") for ending in ("", "_")
}
"""Operators that are on in training, with the number of the argument that says so."""

_RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")


def with_plain_dropout(program: torch.export.ExportedProgram, source: str) -> torch.export.ExportedProgram:
    """The program with every dropout as `aten.dropout` in train mode, and with marks where gradients stop.

    Raises:
        ModelError: dropout between the layers of a recurrent network, which PyTorch's decomposition loses; a tensor
            with a gradient that is written to inside `torch.no_grad()`.
    """
    import torch  # optional

    _declare_operators()
    program = with_own_graph(program)
    _leave_off(program)
    trained = trained_inputs(program)
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                if name_of(node) != "detach.default" or is_own_value(node, trained, source):
                    _rewrite(node, source)
                stop_gradients(node, trained, source)
        for node in list(module.graph.nodes):  # of the uniform numbers those that make no dropout
            if is_noise(node):
                _replace(node, name_of(node), partial(noise, node=node))
        module.recompile()
    return program


def _leave_off(program: torch.export.ExportedProgram) -> None:
    """Take away the dropouts that are off in a program exported in train mode, in which another layer is on.

    In one that was exported in eval mode all are off, and none is taken away.
    """
    import torch

    aten = torch.ops.aten
    nodes = [
        node
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and name_of(node) in _SWITCHES
    ]
    if not any(_is_on(node) for node in nodes):
        return
    for node in nodes:
        if _is_on(node) or name_of(node) == "batch_norm.default":
            continue
        if "rrelu" in name_of(node):
            low, high = (*node.args[1:3], 1 / 8, 1 / 3)[:2]
            slope = (float(low) + float(high)) / 2
            node.target = aten.leaky_relu_.default if name_of(node).endswith("_.default") else aten.leaky_relu.default
            node.args, node.kwargs = (node.args[0], slope), {}
        else:
            node.replace_all_uses_with(node.args[0])
            node.graph.erase_node(node)


def _is_on(node: torch.fx.Node) -> bool:
    number = _SWITCHES[name_of(node)]
    name = node.target._schema.arguments[number].name  # "train" or "training"
    return bool(node.args[number] if len(node.args) > number else node.kwargs.get(name, False))


def _rewrite(node: torch.fx.Node, source: str) -> None:
    """Replace one call, if it is a dropout, a random number that makes one, or an end of gradients."""
    import torch

    aten = torch.ops.aten
    name = str(getattr(node.target, "__name__", node.target))
    if name in ("dropout.default", "dropout_.default"):
        rate = node.args[1]
        _replace(node, name, lambda call: call(aten.dropout.default, node.args[0], rate, True))
    elif name in ("feature_dropout.default", "feature_dropout_.default"):
        _replace(node, name, lambda call: _of_features(call, node))
    elif "alpha_dropout" in name:
        _replace(node, name, lambda call: _alpha(call, node, name.startswith("feature")))
    elif name in ("bernoulli_.float", "bernoulli.p"):
        kept = node.args[1] if len(node.args) > 1 else 0.5
        if isinstance(kept, float) and 0 < kept <= 1 and node.meta["val"].is_floating_point():
            _replace(node, name, lambda call: _bernoulli(call, node.args[0], kept))
    elif name in ("floor.default", "floor_.default"):
        kept = _added_to_uniform(node)
        if kept is not None:
            _replace(node, "floor.default", lambda call: _bernoulli(call, node.args[0], kept))
    elif name == "detach_.default" and name_of(node.args[0]) == "lift_fresh_copy.default":
        return  # a constant, torch.tensor([...])
    elif name in ("detach.default", "detach_copy.default", "detach_.default"):
        _replace(node, name, lambda call: call(torch.ops.convgrad.stop_gradient.default, node.args[0]))
    elif name in _RECURRENT:
        layers, rate = node.args[4:6]
        if layers > 1 and rate > 0:
            raise ModelError(
                f"{source} has dropout between the layers of a recurrent network (aten.{name}{place_of(node)}), which "
                "PyTorch's decomposition of the exported program loses; write its layers one by one, with nn.Dropout "
                "between them, or set dropout=0."
            )
    elif name == "instance_norm.default":  # in whichever mode it was exported, like a batch norm
        node.args = (*node.args[:5], True, *node.args[6:])


def _replace(node: torch.fx.Node, name: str, make: Callable[[Callable[..., torch.fx.Node]], torch.fx.Node]) -> None:
    """Put what `make` gives in the place of a node; of an operator in place, the tensor is overwritten with it."""
    import torch

    with node.graph.inserting_before(node):

        def call(target: Any, *arguments: object, **options: object) -> torch.fx.Node:
            made = node.graph.call_function(target, arguments, options)
            made.meta = {key: value for key, value in node.meta.items() if key != "val"}
            return made

        result = make(call)
        if name.partition(".")[0].endswith("_"):
            result = call(torch.ops.aten.copy_.default, node.args[0], result)
        if "val" in node.meta:  # shape and type, which the replacements of later nodes read
            result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _of_features(call: Callable[..., torch.fx.Node], node: torch.fx.Node) -> torch.fx.Node:
    """Dropout of whole channels."""
    import torch

    x, rate = node.args[:2]
    ones = call(torch.ops.aten.ones_like.default, _one_of_each_channel(call, node))
    return call(torch.ops.aten.mul.Tensor, x, call(torch.ops.aten.dropout.default, ones, rate, True))


def _one_of_each_channel(call: Callable[..., torch.fx.Node], node: torch.fx.Node) -> torch.fx.Node:
    """The first element of every channel of every sample, (N, C, 1, …)."""
    import torch

    x = node.args[0]
    for axis in range(2, x.meta["val"].ndim):
        x = call(torch.ops.aten.slice.Tensor, x, axis, 0, 1)
    return x


def _alpha(call: Callable[..., torch.fx.Node], node: torch.fx.Node, features: bool) -> torch.fx.Node:
    """Alpha dropout (Klambauer et al., 2017): what is dropped becomes -αλ; then mean and variance are restored.

    At rate 1 all is zero, as in PyTorch.

    A dropout of ones is 1 when predicting, and 0 or 1/(1 - rate) when training, so that its value shows the mode.
    """
    import torch

    aten = torch.ops.aten
    x, rate = node.args[:2]
    ones = call(aten.ones_like.default, _one_of_each_channel(call, node) if features else x)
    mask = call(aten.dropout.default, ones, rate, True)
    if rate == 1:
        return call(aten.mul.Tensor, x, mask)
    alpha = _SELU_ALPHA * _SELU_SCALE
    scale = ((alpha * alpha * rate + 1) * (1 - rate)) ** -0.5
    shift = alpha * rate * scale
    kept = call(aten.add.Tensor, call(aten.mul.Tensor, x, scale), shift)
    dropped = call(aten.full_like.default, x, shift - alpha * scale)
    trained = call(aten.where.self, call(aten.gt.Scalar, mask, 0.0), kept, dropped)
    return call(aten.where.self, call(aten.eq.Scalar, mask, 1.0), x, trained) if rate else x


def _bernoulli(call: Callable[..., torch.fx.Node], like: torch.fx.Node, kept: float) -> torch.fx.Node:
    """Ones with probability `kept`, otherwise zeros; when predicting, their mean.

    So a stochastic depth that divides by the probability is the identity in `predict`.
    """
    import torch

    full = call(torch.ops.aten.full_like.default, like, kept)
    return call(torch.ops.aten.dropout.default, full, 1.0 - kept, True)


def _added_to_uniform(node: torch.fx.Node) -> float | None:
    """p of floor(p + rand(...)), which is 1 with probability p."""
    import torch

    added = node.args[0]
    if not isinstance(added, torch.fx.Node) or not str(added.target).startswith("aten.add"):
        return None
    numbers = [value for value in added.args[:2] if isinstance(value, float)]
    drawn = [value for value in added.args[:2] if isinstance(value, torch.fx.Node)]
    if len(numbers) != 1 or len(drawn) != 1 or not str(drawn[0].target).startswith("aten.rand."):
        return None
    if not 0 < numbers[0] <= 1 or len(added.users) > 1 or len(drawn[0].users) > 1:
        return None
    drawn[0].target = torch.ops.aten.zeros.default
    return numbers[0]


def _declare_operators() -> None:
    """What marks where gradients stop, and what is one of two tensors by the mode, which no decomposition touches."""
    import torch

    if hasattr(torch.ops.convgrad, "stop_gradient"):
        return
    torch.library.define("convgrad::by_mode", "(Tensor training, Tensor predicting) -> Tensor")
    torch.library.impl("convgrad::by_mode", "CompositeExplicitAutograd", lambda training, _: training.clone())
    torch.library.define("convgrad::stop_gradient", "(Tensor x) -> Tensor")
    torch.library.impl("convgrad::stop_gradient", "CompositeExplicitAutograd", lambda x: x.clone())
