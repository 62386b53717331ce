# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a graph of torch.export (the noise of a VAE, Gumbel softmax, times of a diffusion), from dropouts.

A dropout at rate 1/2 of a tensor of halves is a random bit, 0 or 1: 24 of them are a uniform number, from which the
others are computed. So all numbers are those of the seeded, resumable masks of a step. In `predict`, where dropout is
the identity, every bit is 1/2, and each number the median of its distribution: uniform numbers are the middle of their
interval, normal ones are the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tvm_convgrad.training.frontends.torch_export.operators.erfinv import CENTRE, TAIL
from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # an optional package
    import torch

    Argument: TypeAlias = torch.fx.Node | float
    Emit: TypeAlias = Callable[..., torch.fx.Node]

_BITS = 24


def noise(emit: Emit, node: torch.fx.Node) -> torch.fx.Node:
    """What takes the place of a call that draws random numbers.

    Args:
        emit: makes a call of an operator with arguments and options.
        node: a call of the exported graph, before it is decomposed, for which `is_noise` holds.
    """
    import torch

    draw, wanted = _Draw(emit, node), _dtype(node)
    half = wanted in (torch.float16, torch.bfloat16)
    if half:  # 24 bits are drawn in float32 and rounded once
        draw.given["dtype"] = torch.float32
    found = _DRAWS[name_of(node)](draw)
    return emit(torch.ops.aten.to.dtype, found, wanted) if half or name_of(node) == "randperm.default" else found


def is_noise(node: torch.fx.Node) -> bool:
    """Whether a call draws random numbers that `noise` can make."""
    if node.op != "call_function" or name_of(node) not in _DRAWS:
        return False
    return name_of(node) != "multinomial.default" or node.args[1] == 1


class _Draw:
    """A call that draws numbers, and the operators that take its place."""

    def __init__(self, emit: Emit, node: torch.fx.Node) -> None:
        import torch

        self.emit, self.aten = emit, torch.ops.aten
        operator: Any = node.target
        names = [argument.name for argument in operator._schema.arguments]
        self.given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        tensors = [value.meta["val"] for value in self.given.values() if isinstance(value, torch.fx.Node)]
        self.rank = len(self.given["size"]) if "size" in self.given else max((t.ndim for t in tensors), default=1)

    def option(self, name: str, default: Any) -> Any:
        """An argument of the call."""
        return self.given.get(name, default)

    def like(self) -> torch.fx.Node:
        """A tensor of the shape and element type of the numbers."""
        options = {name: self.given[name] for name in ("dtype", "device") if self.given.get(name) is not None}
        if "size" in self.given or "n" in self.given:
            size = list(self.given.get("size", [self.given.get("n")]))
            return self.emit(self.aten.zeros.default, size, **options)
        first = self.given["self"]
        return self.emit(self.aten.zeros_like.default, first, **options) if options else first

    def bits(self, like: torch.fx.Node) -> torch.fx.Node:
        """The sum of b / 2**k for k = 1 ... 24, of bits b, in the shape and type of a tensor: in [0, 1 - 2**-24]."""
        aten, emit = self.aten, self.emit
        halves = emit(aten.full_like.default, like, 0.5)
        halves = emit(aten.repeat.default, emit(aten.unsqueeze.default, halves, 0), [_BITS, *[1] * self.rank])
        bits = emit(aten.dropout.default, halves, 0.5, True)
        weights = emit(aten.pow.Scalar, 0.5, emit(aten.arange.start, 1.0, _BITS + 1.0))
        weights = emit(aten.view.default, weights, [_BITS, *[1] * self.rank])
        return emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, bits, weights), [0])

    def uniform(self, low: float = 0.0, high: float = 1.0) -> torch.fx.Node:
        """Numbers of [low, high)."""
        return self.affine(self.bits(self.like()), low, high)

    def affine(self, unit: torch.fx.Node, low: float, high: float) -> torch.fx.Node:
        """Numbers of [0, 1) brought to [low, high)."""
        if (low, high) == (0.0, 1.0):
            return unit
        return self.emit(self.aten.add.Tensor, self.emit(self.aten.mul.Tensor, unit, high - low), low)

    def inner(self) -> torch.fx.Node:
        """Numbers of (0, 1), odd multiples of 2**-25: 1/2 in `predict`."""
        return self.emit(self.aten.add.Tensor, self.bits(self.like()), 2.0 ** -(_BITS + 1))

    def normal(self, mean: Argument = 0.0, deviation: Argument = 1.0, like: torch.fx.Node | None = None) -> Any:
        """Numbers of a normal distribution; mean and deviation are numbers or tensors."""
        emit, aten = self.emit, self.aten
        unit = emit(aten.mul.Tensor, self.bits(like or self.like()), 2.0)
        x = emit(aten.add.Tensor, emit(aten.sub.Tensor, unit, 1.0), 2.0**-_BITS)  # in (-1, 1), without rounding
        product = emit(aten.mul.Tensor, emit(aten.rsub.Scalar, x, 1.0), emit(aten.add.Tensor, x, 1.0))
        w = emit(aten.neg.default, emit(aten.log.default, product))
        centre = self.polynomial(CENTRE, emit(aten.sub.Tensor, w, 2.5))
        tail = self.polynomial(TAIL, emit(aten.sub.Tensor, emit(aten.sqrt.default, w), 3.0))
        factor = emit(aten.where.self, emit(aten.lt.Scalar, w, 5.0), centre, tail)
        found = emit(aten.mul.Tensor, emit(aten.mul.Tensor, factor, x), math.sqrt(2.0))
        found = found if _is_number(deviation, 1.0) else emit(aten.mul.Tensor, found, deviation)
        return found if _is_number(mean, 0.0) else emit(aten.add.Tensor, found, mean)

    def normal_of_tensors(self) -> Any:
        """Normal numbers with tensors for mean, deviation or both, to which no gradient goes, as in PyTorch."""
        mean, deviation = self.stopped(self.option("mean", 0.0)), self.stopped(self.option("std", 1.0))
        tensors = [each for each in (mean, deviation) if not isinstance(each, int | float)]
        like = tensors[0] if len(tensors) == 1 else self.emit(self.aten.add.Tensor, *tensors)  # of the broadcast shape
        return self.normal(mean, deviation, like)

    def stopped(self, value: Argument) -> Any:
        """A number as it is, or a tensor to which no gradient goes."""
        import torch

        return value if isinstance(value, int | float) else self.emit(torch.ops.convgrad.stop_gradient.default, value)

    def polynomial(self, coefficients: Sequence[float], x: torch.fx.Node) -> torch.fx.Node:
        """By Horner's rule, the coefficient of the highest power first."""
        value = self.emit(self.aten.full_like.default, x, coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.emit(self.aten.add.Tensor, self.emit(self.aten.mul.Tensor, value, x), coefficient)
        return value

    def exponential(self) -> torch.fx.Node:
        """-log(u) / rate."""
        logarithm = self.emit(self.aten.log.default, self.inner())
        return self.emit(self.aten.div.Tensor, logarithm, -float(self.option("lambd", 1.0)))

    def integers(self) -> torch.fx.Node:
        """Integers of [low, high)."""
        import torch

        low, high = self.option("low", 0), self.given["high"]
        dtype = self.given.get("dtype") or (_dtype(self.given["self"]) if "self" in self.given else torch.int64)
        self.given["dtype"] = torch.float64 if high - low > 2**_BITS else torch.float32
        wide = self.emit(self.aten.mul.Tensor, self.bits(self.like()), float(high - low))
        whole = self.emit(self.aten.to.dtype, self.emit(self.aten.floor.default, wide), dtype)
        return self.emit(self.aten.add.Tensor, whole, low) if low else whole

    def bernoulli(self, probability: float | None = None) -> torch.fx.Node:
        """Ones with a probability, by default those that a tensor has, otherwise zeros."""
        import torch

        of = like = self.given["self"]
        dtype = _dtype(of)
        if not dtype.is_floating_point:
            like = self.emit(self.aten.zeros_like.default, of, dtype=torch.float32)
        stopped = self.stopped(self.option("p", of) if probability is None else probability)
        less = self.aten.lt.Scalar if isinstance(stopped, int | float) else self.aten.lt.Tensor
        return self.emit(self.aten.to.dtype, self.emit(less, self.bits(like), stopped), dtype)

    def permutation(self) -> torch.fx.Node:
        """The places that sort random numbers; in order in `predict`."""
        self.given.pop("dtype", None)
        return self.emit(self.aten.argsort.default, self.bits(self.like()), 0)

    def one_of(self) -> torch.fx.Node:
        """One place of each row with the probabilities in it, by Gumbel's maximum: the most probable in `predict`.

        It divides by -log(u), of one sign, which has the same maximum as the difference of logarithms.
        """
        stopped = self.stopped(self.given["self"])
        waiting = self.emit(self.aten.neg.default, self.emit(self.aten.log.default, self.inner()))
        return self.emit(self.aten.argmax.default, self.emit(self.aten.div.Tensor, stopped, waiting), -1, True)

    def leaky(self) -> torch.fx.Node:
        """A rectifier whose slope below zero is random."""
        x, low, high = self.given["self"], float(self.option("lower", 1 / 8)), float(self.option("upper", 1 / 3))
        slope = self.affine(self.bits(x), low, high)
        slope = self.emit(self.aten.to.dtype, slope, _dtype(x))
        positive = self.emit(self.aten.ge.Scalar, x, 0.0)
        return self.emit(self.aten.where.self, positive, x, self.emit(self.aten.mul.Tensor, x, slope))


def _dtype(node: torch.fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_number(value: Argument, number: float) -> bool:
    return isinstance(value, int | float) and value == number


_DRAWS: dict[str, Callable[[_Draw], torch.fx.Node]] = {
    "rand.default": _Draw.uniform,
    "rand_like.default": _Draw.uniform,
    "uniform.default": lambda draw: draw.uniform(draw.option("from", 0.0), draw.option("to", 1.0)),
    "uniform_.default": lambda draw: draw.uniform(draw.option("from", 0.0), draw.option("to", 1.0)),
    "randn.default": _Draw.normal,
    "randn_like.default": _Draw.normal,
    "normal_.default": lambda draw: draw.normal(draw.option("mean", 0.0), draw.option("std", 1.0)),
    "normal_functional.default": lambda draw: draw.normal(draw.option("mean", 0.0), draw.option("std", 1.0)),
    "normal.float_float": lambda draw: draw.normal(draw.given["mean"], draw.given["std"]),
    "normal.Tensor_float": _Draw.normal_of_tensors,
    "normal.float_Tensor": _Draw.normal_of_tensors,
    "normal.Tensor_Tensor": _Draw.normal_of_tensors,
    "exponential_.default": _Draw.exponential,
    "exponential.default": _Draw.exponential,
    "randint.default": _Draw.integers,
    "randint.low": _Draw.integers,
    "randint_like.default": _Draw.integers,
    "randint_like.low_dtype": _Draw.integers,
    "bernoulli.default": lambda draw: draw.bernoulli(),
    "bernoulli_.Tensor": lambda draw: draw.bernoulli(),
    "bernoulli_.float": lambda draw: draw.bernoulli(draw.option("p", 0.5)),
    "bernoulli.p": lambda draw: draw.bernoulli(draw.given["p"]),
    "randperm.default": _Draw.permutation,
    "multinomial.default": _Draw.one_of,
    "rrelu.default": _Draw.leaky,
    "rrelu_.default": _Draw.leaky,
}
