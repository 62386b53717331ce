# SPDX-License-Identifier: Apache-2.0
"""`Signature`: a call of PyTorch's convolution operators without its data, and the kernels that compute it.

What PyTorch calls a transposed convolution is the family's dgrad: its input is the family's grad, its output the
family's data (`tvm_convgrad.core.backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.bridge.job import Job
from tvm_convgrad.core.backward import BackwardCall, backward_call
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import NumberProver, TensorSpec

DTYPES = ("float32", "bfloat16", "float16")
"""The element types that kernels are tried for. In float64 gradients are checked, and speed does not matter."""

FORWARD, BACKWARD = "convolution", "convolution_backward"
"""PyTorch's operators."""


@dataclass(frozen=True)
class Form:
    """A tensor without its data: shape, strides, and element type by TVM's name."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def channels_first(self) -> bool:
        """Whether its memory is contiguous in the order of its axes."""
        return self._dense(range(len(self.shape)))

    @property
    def channels_last(self) -> bool:
        """Whether its memory is contiguous with the second axis as the last."""
        return self._dense((0, *range(2, len(self.shape)), 1))

    def _dense(self, order: Sequence[int]) -> bool:
        step = 1
        for axis in reversed(order):
            if self.shape[axis] != 1 and self.strides[axis] != step:
                return False
            step *= self.shape[axis]
        return True


@dataclass(frozen=True)
class Signature:
    """A call without its data.

    Attributes:
        operator: FORWARD or BACKWARD.
        data, weight: the convolution's operands.
        grad: the gradient of its result; of FORWARD None until PyTorch has told its result.
        stride, padding, dilation, output_padding: one int an axis.
        transposed: whether the convolution is a transposed one.
        groups: of channels.
        wanted: which gradients of data, weight, bias; of FORWARD whether there is a bias, as (False, False, bias).
        threads: of PyTorch.
        onednn: whether PyTorch may call oneDNN, on which the strides of its answers depend, too.
    """

    operator: str
    data: Form
    weight: Form
    grad: Form | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int
    wanted: tuple[bool, bool, bool]
    threads: int
    onednn: bool

    def __str__(self) -> str:
        """The operator, the shapes and what is not its default."""
        shapes = " ".join("x".join(map(str, form.shape)) for form in (self.data, self.weight))
        words = [self.operator, shapes, self.data.dtype]
        for name in ("stride", "padding", "dilation", "output_padding"):
            values, usual = getattr(self, name), int(name in ("stride", "dilation"))
            if any(value != usual for value in values):
                words.append(f"{name}={'x'.join(map(str, values))}")
        words += [f"groups={self.groups}"] if self.groups != 1 else []
        words += ["transposed"] if self.transposed else []
        words += ["channels_last"] if self.data.channels_last and not self.data.channels_first else []
        return " ".join(words)


@dataclass(frozen=True)
class Part:
    """One result of a call, and the kernel that computes it.

    Attributes:
        name: "result" of FORWARD; "data" or "weight", whose gradient it is.
        job: the kernel.
        operands: which of "grad", "data", "weight", "bias" it takes, in order.
        result: what it gives.
        with_bias: whether it gives the bias's gradient, too.
    """

    name: str
    job: Job
    operands: tuple[str, ...]
    result: Form
    with_bias: bool = False


def refusal(signature: Signature) -> str:
    """Why no kernel is tried for a call, whatever PyTorch answers; or nothing."""
    forms = [form for form in (signature.data, signature.weight, signature.grad) if form is not None]
    if len({len(form.shape) for form in forms}) > 1 or len(signature.data.shape) - 2 not in SPATIAL:
        return "the tensors have not all 3, 4 or 5 axes"
    if len({form.dtype for form in forms}) > 1:
        return f"the element types differ: {', '.join(form.dtype for form in forms)}"
    if signature.data.dtype not in DTYPES:
        return f"kernels are used for {', '.join(DTYPES)}, not for {signature.data.dtype}"
    if any(0 in form.shape for form in forms):
        return "a tensor has no elements"
    for name in _read(signature):
        form = getattr(signature, name)
        if not (form.channels_first or form.channels_last):
            return f"the strides of {name}, {form.strides}, are neither contiguous nor channels_last"
    return ""


def _read(signature: Signature) -> tuple[str, ...]:
    """The operands whose elements are read: each gradient of data and weight needs the other one, and the grad."""
    if signature.operator == FORWARD:
        return ("data", "weight")
    of_data, of_weight, _ = signature.wanted
    return tuple(name for name, is_read in (("data", of_weight), ("weight", of_data), ("grad", True)) if is_read)


def parts_of(signature: Signature, results: Sequence[Form | None]) -> tuple[Part, ...] | str:
    """The kernels of a call, or why there are none.

    Args:
        signature: one that `refusal` does not refuse.
        results: of FORWARD the result; of BACKWARD the gradients of data, weight and bias, None where not wanted; as
            PyTorch answers.
    """
    grad = results[0] if signature.operator == FORWARD else signature.grad
    assert grad is not None
    try:
        call = _call(signature, grad)
        if any(call.crop):
            return "its output padding reaches beyond a stride"
        if signature.operator == FORWARD:
            return (_forward(signature, call, grad),)
        return tuple(
            _gradient(signature, call, grad, number, result)
            for number, result in enumerate(results[:2])
            if result is not None
        )
    except _StrideError as error:
        return str(error)
    except ConvGradError as error:  # PyTorch takes what the family refuses, such as a negative padding
        return str(error)


class _StrideError(Exception):
    """A result of PyTorch is neither contiguous nor channels_last."""


def _call(signature: Signature, grad: Form) -> BackwardCall:
    """The checked call in the family's terms."""
    named = {"grad": grad, "data": signature.data, "weight": signature.weight}
    specs = {name: TensorSpec(form.shape, len(form.shape), form.dtype) for name, form in named.items()}
    return backward_call(
        specs,
        NumberProver(),
        stride=signature.stride,
        padding=signature.padding,
        dilation=signature.dilation,
        transposed=signature.transposed,
        output_padding=signature.output_padding if signature.transposed else 0,
        groups=signature.groups,
    )


def _problem(call: BackwardCall, forms: dict[str, Form]) -> ConvProblem:
    """The family's convolution of a call, with layouts by the strides of its tensors."""
    data, grad, weight = (forms[call.roles[role]] for role in ("data", "grad", "weight"))
    rank = len(call.kernel)
    last = "N" + SPATIAL[rank] + "C"
    first_fits = {name: form.channels_first for name, form in (("data", data), ("grad", grad))}
    last_fits = {name: form.channels_last for name, form in (("data", data), ("grad", grad))}
    if all(first_fits.values()):
        layouts = dict.fromkeys(("data", "grad"), data_layout_of(rank))
    elif all(last_fits.values()):
        layouts = dict.fromkeys(("data", "grad"), last)
    else:
        layouts = {name: data_layout_of(rank) if fits else last for name, fits in first_fits.items()}
    shape = data.shape
    return ConvProblem(
        batch=shape[0],
        in_channels=shape[1],
        out_channels=grad.shape[1],
        data_extents=shape[2:],
        kernel=call.kernel,
        strides=call.strides,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
        data_layout=layouts["data"],
        grad_layout=layouts["grad"],
        kernel_layout=kernel_layout_of(rank) if weight.channels_first else "O" + SPATIAL[rank] + "I",
        data_dtype=data.dtype,
        kernel_dtype=data.dtype,
        grad_dtype=data.dtype,
    )


def _checked(name: str, result: Form) -> Form:
    if not (result.channels_first or result.channels_last):
        raise _StrideError(f"PyTorch's {name} has strides {result.strides}, neither contiguous nor channels_last")
    return result


def _forward(signature: Signature, call: BackwardCall, result: Form) -> Part:
    forms = {"grad": _checked("result", result), "data": signature.data, "weight": signature.weight}
    bias = signature.wanted[2]
    job = Job(
        "backward_data" if signature.transposed else "forward",
        _problem(call, forms).descriptor,
        "bias" if bias else "",
    )
    return Part("result", job, ("data", "weight", *(["bias"] if bias else [])), result)


def _gradient(signature: Signature, call: BackwardCall, grad: Form, number: int, result: Form) -> Part:
    """The gradient of data (0) or weight (1)."""
    name = ("data", "weight")[number]
    direction, operands = call.gradients[number]
    forms = {
        "grad": grad,
        "data": signature.data,
        "weight": signature.weight,
        name: _checked(f"gradient of {name}", result),
    }
    # The family's wgrad sums the tensor in the role of grad, which for a transposed convolution is the data.
    with_bias = name == "weight" and signature.wanted[2] and not signature.transposed
    job = Job(direction.name, _problem(call, forms).descriptor, "bias_grad" if with_bias else "")
    return Part(name, job, operands, result, with_bias)


__all__ = ["BACKWARD", "DTYPES", "FORWARD", "Form", "Part", "Signature", "parts_of", "refusal"]
