# SPDX-License-Identifier: Apache-2.0
"""Random calls with the bridge enabled and without: the same errors, strides and types, and numbers near float64.

CONVGRAD_CALLS and CONVGRAD_SEED give another number of calls, and others.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

CALLS, SEED = int(os.environ.get("CONVGRAD_CALLS", "300")), int(os.environ.get("CONVGRAD_SEED", "0"))
CALLS_OF_A_GEOMETRY = 100  # each geometry has kernels of its own, and compiling takes longest
UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Results = list[Any]


@dataclass
class Call:
    """A call: `run` gives its results from tensors."""

    kind: str
    data: Any
    weight: Any
    bias: Any
    ends: tuple[Any, ...]
    needed: tuple[bool, bool, bool]
    bias_sizes: list[int] | None
    grad_form: str
    notes: list[str] = field(default_factory=list)

    def run(self, tensors: list[Any]) -> Results:
        """The results for data, weight and bias like those of the call."""
        if self.kind == "backward":
            data, weight, _ = tensors
            grad = self._grad(self._shape(), data.dtype)
            found = torch.ops.aten.convolution_backward(grad, data, weight, self.bias_sizes, *self.ends, self.needed)
            return list(found)
        if self.kind == "vjp":
            given = [each for each in tensors if each is not None]
            y, pull = torch.func.vjp(self._forward, *given)
            return [y, *pull(self._grad(y.shape, y.dtype))]
        if self.kind == "vmap":
            data, *rest = self._leaves(tensors)
            both = torch.stack([data, data.flip(0)])
            return self._with_gradients(torch.func.vmap(lambda each: self._forward(each, *rest))(both), [data, *rest])
        leaves = self._leaves(tensors)
        with _MODES.get(self.kind, nullcontext)():
            y = self._forward(*leaves)
            if self.kind == "inference_mode":
                return [y.clone()]
        return self._with_gradients(y, leaves)

    def _forward(self, data: Any, weight: Any, bias: Any = None) -> Any:
        if self.kind not in ("autocast", "function"):
            return torch.convolution(data, weight, bias, *self.ends)
        stride, padding, dilation, transposed, output_padding, groups = self.ends  # autocast knows these functions
        if transposed:
            function = getattr(torch.nn.functional, f"conv_transpose{data.dim() - 2}d")
            return function(data, weight, bias, stride, padding, output_padding, groups, dilation)
        function = getattr(torch.nn.functional, f"conv{data.dim() - 2}d")
        return function(data, weight, bias, stride, padding, dilation, groups)

    def _leaves(self, tensors: list[Any]) -> list[Any]:
        pairs = zip(tensors, self.needed, strict=True)
        return [None if each is None else each.detach().requires_grad_(needed) for each, needed in pairs]

    def _with_gradients(self, y: Any, leaves: list[Any]) -> Results:
        needed = [each for each in leaves if each is not None and each.requires_grad]
        if not y.requires_grad or not needed:
            return [y.detach()]
        return [y.detach(), *torch.autograd.grad(y, needed, self._grad(y.shape, y.dtype))]

    def _shape(self) -> tuple[int, ...]:
        return tuple(torch.convolution(self.data.to("meta"), self.weight.to("meta"), None, *self.ends).shape)

    def _grad(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The same numbers in each type; positive ones where sizes are wanted, which have no type of their own."""
        count = math.prod(shape)
        numbers = (torch.arange(count, dtype=torch.float64) * 7 % 11 - 5) / 8
        return formed(
            (numbers.abs() if self.notes[-1:] == ["sizes"] else numbers).reshape(shape).to(dtype), self.grad_form
        )

    def __str__(self) -> str:
        forms = [None if each is None else (each.dtype, tuple(each.shape), each.stride()) for each in self.tensors]
        return f"{self.kind} {forms} {self.ends} needed={self.needed} {self.bias_sizes} {self.grad_form} {self.notes}"

    @property
    def tensors(self) -> list[Any]:
        """Data, weight, bias."""
        return [self.data, self.weight, self.bias]


_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
KINDS = (
    "plain",
    "plain",
    "plain",
    "backward",
    "backward",
    "no_grad",
    "inference_mode",
    "autocast",
    "vjp",
    "vmap",
    "thread",
)
STRIDED = ("sliced", "transposed", "expanded", "rows")


def formed(tensor: Any, form: str) -> Any:
    """The tensor in another memory; expanded is of one sample's numbers."""
    if form == "last" and tensor.dim() in LAST:
        return tensor.contiguous(memory_format=LAST[tensor.dim()])
    if form == "sliced":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if form == "rows" and tensor.dim() > 1:
        return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]
    if form == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "expanded" and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    if form == "offset":
        whole = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        whole[3:] = tensor.reshape(-1)
        return whole[3:].view(tensor.shape)
    return tensor


@dataclass(frozen=True)
class Geometry:
    """Shapes and arguments of a convolution, and the element type and formats of most of its tensors."""

    data: tuple[int, ...]
    weight: tuple[int, ...]
    ends: tuple[Any, ...]
    channels: int
    dtype: str
    forms: tuple[str, ...]

    @staticmethod
    def drawn(source: random.Random) -> Geometry:
        """One that exists."""
        rank, groups = source.choice((1, 2, 2, 2, 3)), source.choice((1, 1, 2, 3))
        transposed = source.random() < 0.3
        inner, outer = source.randint(1, 3) * groups, source.randint(1, 4) * groups
        kernel = [source.randint(1, 3) for _ in range(rank)]
        stride, dilation = ([source.choice((1, 1, 2, 3)) for _ in range(rank)] for _ in range(2))
        padding = [source.randint(0, extent) for extent in kernel]
        above = [source.randrange(max(one, other)) for one, other in zip(stride, dilation, strict=True)]
        output_padding = above if transposed else [0] * rank
        extents = [
            (extent - 1) * step + 1 + source.randint(0, 4) for extent, step in zip(kernel, dilation, strict=True)
        ]
        if transposed:  # its result must have elements
            extents = [max(extent, 2 * pad + 1) for extent, pad in zip(extents, padding, strict=True)]
        weight = (inner, outer // groups) if transposed else (outer, inner // groups)
        ends = (stride, padding, dilation, transposed, output_padding, groups)
        dtype = source.choice(("float32", "float32", "bfloat16", "float16"))
        forms = source.choice((("first", "offset"), ("last",))) * 4
        return Geometry((source.randint(1, 3), inner, *extents), (*weight, *kernel), ends, outer, dtype, forms)

    def call(self, source: random.Random) -> Call:
        """A random call; about one in five is changed so that it may not exist."""
        generator = torch.Generator().manual_seed(source.randrange(1 << 30))
        dtypes, forms = [source.choice((*[self.dtype] * 9, "float64"))] * 3, (*self.forms, source.choice(STRIDED))
        shapes: list[tuple[int, ...]] = [self.data, self.weight, (self.channels,)]
        ends, notes, bias_sizes = list(self.ends), [], source.choice(([self.channels], [self.channels], None))
        if source.random() < 0.2:
            change = source.choice(
                ("empty", "dtype", "bias", "channels", "padding", "stride", "output_padding", "groups", "sizes")
            )
            notes.append(change)
            if change == "empty":
                shapes[0] = (0, *shapes[0][1:])
                bias_sizes = [self.channels]  # with None PyTorch ends the process: bad optional access
            elif change == "dtype":
                dtypes[source.randrange(3)] = "float64"
            elif change == "bias":
                shapes[2] = source.choice(((self.channels + 1,), (1,), (self.channels, 1), ()))
            elif change == "channels":
                shapes[0] = (shapes[0][0], shapes[0][1] + 1, *shapes[0][2:])
            elif change == "padding":
                ends[1] = [-1, *ends[1][1:]]
            elif change == "stride":
                ends[0] = source.choice(([0, *ends[0][1:]], ends[0][:1], [*ends[0], 1]))
            elif change == "output_padding":
                ends[4] = [source.choice((-1, 3, 1)), *ends[4][1:]]
            elif change == "groups":
                ends[5] = source.choice((0, -1, 7, 2))
            else:
                bias_sizes = source.choice(([], [self.channels + 1], [1, 2]))
        data, weight, bias = (
            formed(
                torch.randn(shape, generator=generator).to(getattr(torch, dtype)), source.choice(forms) if shape else ""
            )
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        return Call(
            source.choice(KINDS), data, weight, bias if source.random() < 0.6 else None, tuple(ends),
            tuple(source.random() < 0.7 for _ in range(3)), bias_sizes, source.choice(forms), notes,
        )  # fmt: skip


def outcome(call: Call, tensors: list[Any]) -> Results | tuple[type, str]:
    """The results, or the error's type and words."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call.run(tensors))
        except Exception as error:  # of any type: that is what is compared
            found.append((type(error), str(error)))

    if call.kind == "thread":
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    return found[0]


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, PyTorch computes."""
    made = bridge.override.BRIDGE
    policy, folder = made.policy, made.folder
    made.remove()
    try:
        yield
    finally:
        made.install(policy, folder)


def compared(call: Call) -> str:
    """What is wrong with a call with the bridge enabled, or nothing."""
    given = call.tensors
    with disabled():
        own = outcome(call, given)
        if isinstance(own, list):
            rounded = torch.bfloat16 if call.kind == "autocast" else None
            exact_of = [None if each is None else (each.to(rounded) if rounded else each).double() for each in given]
            kind, call.kind = call.kind, "function" if rounded else call.kind  # operands are rounded already
            exact = outcome(call, exact_of)
            call.notes.append("sizes")
            sizes = outcome(call, [None if each is None else each.abs() for each in exact_of])
            call.notes.pop()
            call.kind = kind
    for _ in range(3):  # the first is PyTorch's, the second has Python choose, the third may be without it
        before = bridge.stats().kernel_calls
        found = outcome(call, given)
        if isinstance(own, tuple) or isinstance(found, tuple):
            if own != found:
                return f"PyTorch: {own}; found: {found}"
            continue
        if not len(own) == len(exact) == len(sizes):
            return f"in float64 {exact}, not {own}"
        by_kernels = bridge.stats().kernel_calls > before
        if len(own) != len(found):
            return f"{len(found)} results, not {len(own)}"
        longest = (
            math.prod(call.data.shape)
            + math.prod(call.weight.shape)
            + max((each.numel() for each in own if each is not None), default=0)
        )
        for number, (one, other, wanted, size) in enumerate(zip(found, own, exact, sizes, strict=True)):
            if (one is None) != (other is None):
                return f"result {number} is {one}, not {other}"
            if one is None or (call.kind == "backward" and not call.needed[number]):  # PyTorch's, which may give it
                continue
            if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
                return (
                    f"result {number}: {one.dtype, one.shape, one.stride()}, {other.dtype, other.shape, other.stride()}"
                )
            if torch.equal(one, other):
                continue
            if not by_kernels:
                return f"result {number} is PyTorch's, and other numbers"
            unit = UNIT["bfloat16" if call.kind == "autocast" else str(call.data.dtype).rpartition(".")[2]]
            rounded_parts = size if call.kind == "vmap" else wanted.abs()  # its two parts are added in the element type
            bound = unit * rounded_parts + UNIT["float32"] * math.sqrt(longest) * size + 2.0**-24
            if not ((one.double() - wanted).abs() <= bound).all():
                return f"result {number} is wrong by {((one.double() - wanted).abs() - bound).max()}"
    return ""


def test_random_calls(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(SEED)
    monkeypatch.setattr(bridge.override, "BRIDGE", bridge.override.Bridge())
    wrong, errors = [], 0
    with bridge.enable(wait=True, always=True, folder=store):
        for number in range(CALLS):
            if number % CALLS_OF_A_GEOMETRY == 0:
                geometry = Geometry.drawn(source)
            call = geometry.call(source)
            words = compared(call)
            errors += bool(call.notes)
            if words:
                wrong.append(f"{number}: {words}: {call}")
        stats = bridge.stats()
    assert not wrong, "\n".join([f"{len(wrong)} of {CALLS}", *wrong[:10]])
    assert stats.kernel_calls > CALLS / 2
    assert errors > CALLS / 10
