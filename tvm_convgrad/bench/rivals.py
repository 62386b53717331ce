# SPDX-License-Identifier: Apache-2.0
"""A face of a problem as others compute it: stock TVM, a library, PyTorch and JAX, in each of their layouts.

Operands are brought into a party's own layout before anything is timed; what is timed is one call of one operator,
its result allocated by the party itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tvm_convgrad.bench.ours import Array, Call, tvm_call
from tvm_convgrad.bench.parties import prepare_torch
from tvm_convgrad.bench.place import Place
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.errors import SetupError, UnsupportedError
from tvm_convgrad.geometry import data_layout_of, kernel_layout_of
from tvm_convgrad.offload.common import NAMES, require
from tvm_convgrad.problem import ConvProblem


def tvm_calls(impl: str, face: str, problem: ConvProblem, arrays: Mapping[str, Array], place: Place) -> list[Call]:
    """TVM's program with another implementation: "composition" (stock operators), or a library."""
    return [tvm_call(face, problem, arrays, place, impl)]


def torch_calls(
    face: str, problem: ConvProblem, arrays: Mapping[str, Array], place: Place, *, same_layout: bool = False
) -> list[Call]:
    """PyTorch's call with contiguous tensors and with channels_last ones; or with that of the problem's layout only.

    Raises:
        SetupError: PyTorch is missing.
        UnsupportedError: asymmetric padding.
    """
    try:
        import torch
    except ImportError as error:
        raise SetupError("bench against torch needs PyTorch; pip install 'tvm-convgrad[torch]'") from error
    if any(low != high for low, high in problem.padding):
        raise UnsupportedError(
            f"{problem.descriptor}: PyTorch's convolution has no asymmetric padding; leave torch out"
        )
    rank = problem.rank
    formats = [("contiguous", torch.contiguous_format)]
    if rank > 1:
        formats.append(("channels_last", torch.channels_last if rank == 2 else torch.channels_last_3d))
    padding = [low for low, _ in problem.padding]
    geometry = (list(problem.strides), padding, list(problem.dilation), False, [0] * rank, problem.groups)
    result = FACES[face].result
    mask = [face == "backward_data", face == "backward_weight", False]
    back = _back(problem, result)
    dtype = getattr(torch, place.dtype)

    def call(name: str, memory_format: Any) -> Call:
        t = {}
        for key in ("data", "weight", "grad"):
            order = _canonical_order(problem, key)
            if key in arrays:
                # numpy's bfloat16 is unknown to PyTorch; on the way through float32 nothing is rounded
                tensor = torch.from_numpy(arrays[key].astype("float32", copy=False)).permute(*order)
            else:  # of the result only the shape is looked at
                tensor = torch.empty([int(problem.tensors[key][0][axis]) for axis in order])
            t[key] = tensor.to(place.torch, dtype).contiguous(memory_format=memory_format)

        def forward() -> Any:
            with torch.no_grad():
                return torch.ops.aten.convolution(t["data"], t["weight"], None, *geometry)

        def backward() -> Any:
            found = torch.ops.aten.convolution_backward(t["grad"], t["data"], t["weight"], None, *geometry, mask)
            return found[0 if mask[0] else 1]

        return Call(
            f"torch {name}",
            forward if face == "forward" else backward,
            lambda tensor: np.asarray(tensor.permute(*back).float().cpu().numpy()),
            wait=torch.cuda.synchronize if place.gpu else None,
        )

    if same_layout:
        formats = [formats[-1] if problem.data_layout.endswith("C") else formats[0]]
    return [call(*each) for each in formats]


def jax_calls(face: str, problem: ConvProblem, arrays: Mapping[str, Array], _place: Place) -> list[Call]:
    """JAX's jitted convolution, or its transpose, with channels second and with channels last.

    Raises:
        SetupError: JAX is missing.
    """
    try:
        import jax
    except ImportError as error:
        raise SetupError("bench against jax needs JAX; pip install 'tvm-convgrad[bench]'") from error
    data, kernel = data_layout_of(problem.rank), kernel_layout_of(problem.rank)
    spatial = data[2:]
    back = _back(problem, FACES[face].result)

    def call(name: str, data_layout: str, kernel_layout: str) -> Call:
        layouts = {"data": (data, data_layout), "weight": (kernel, kernel_layout), "grad": (data, data_layout)}
        shapes, tensors = {}, []
        for key, (canonical, own) in layouts.items():
            order = [_canonical_order(problem, key)[canonical.index(letter)] for letter in own]
            shape = [int(problem.tensors[key][0][axis]) for axis in order]
            shapes[key] = jax.ShapeDtypeStruct(shape, "float32")
            if key in FACES[face].operands:
                tensors.append((FACES[face].operands.index(key), jax.numpy.asarray(arrays[key].transpose(order))))
        operands = [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]

        def conv(x: Any, w: Any) -> Any:
            return jax.lax.conv_general_dilated(
                x,
                w,
                problem.strides,
                problem.padding,
                rhs_dilation=problem.dilation,
                dimension_numbers=(data_layout, kernel_layout, data_layout),
                feature_group_count=problem.groups,
            )

        def wgrad(dy: Any, x: Any) -> Any:
            return jax.linear_transpose(lambda w: conv(x, w), shapes["weight"])(dy)[0]

        def dgrad(dy: Any, w: Any) -> Any:
            return jax.linear_transpose(lambda x: conv(x, w), shapes["data"])(dy)[0]

        function = jax.jit({"forward": conv, "backward_weight": wgrad, "backward_data": dgrad}[face])
        canonical, own = layouts[FACES[face].result]
        order = [own.index(letter) for letter in canonical]
        return Call(
            f"jax {name}",
            lambda: function(*operands).block_until_ready(),
            lambda array: np.asarray(array).transpose(order).transpose(back),
        )

    return [call(data, data, kernel), call(f"N{spatial}C", f"N{spatial}C", f"{spatial}IO")]


def _layout(problem: ConvProblem, key: str) -> tuple[str, str]:
    """The problem's layout of a tensor, and the canonical one."""
    if key == "weight":
        return problem.kernel_layout, kernel_layout_of(problem.rank)
    return problem.data_layout if key == "data" else problem.grad_layout, data_layout_of(problem.rank)


def _canonical_order(problem: ConvProblem, key: str) -> list[int]:
    """The axes of a tensor of the problem in canonical order."""
    own, canonical = _layout(problem, key)
    return [own.index(letter) for letter in canonical]


def _back(problem: ConvProblem, key: str) -> list[int]:
    """The axes of a canonical tensor in the problem's order."""
    own, canonical = _layout(problem, key)
    return [canonical.index(letter) for letter in own]


Rival = Callable[[str, ConvProblem, Mapping[str, Array], Place], list[Call]]

RIVALS: dict[str, Rival] = {
    "torch": torch_calls,
    "torch-same": partial(torch_calls, same_layout=True),
    "jax": jax_calls,
    "stock": partial(tvm_calls, "composition"),
    **{name: partial(tvm_calls, name) for name in NAMES},
}
"""Whom `--against` takes."""

_TORCH = ("torch", "torch-same")
_ON_GPUS = (*_TORCH, "cudnn", "cutlass")
_ON_CPUS = (*_TORCH, "jax", "stock", "onednn")


def prepare_rivals(names: Sequence[str], threads: int, place: Place) -> None:
    """Give PyTorch its threads and, on a GPU, its best engines; refuse what is not there, before anything is measured.

    On a GPU PyTorch times cuDNN's algorithms (`torch.backends.cudnn.benchmark`), and rounds float32 operands to tf32 if
    ours may.

    Raises:
        SetupError: a package is missing.
        UnsupportedError: a rival that is not measured there.
    """
    import importlib.util

    able = _ON_GPUS if place.gpu else _ON_CPUS
    for name in names:
        if name not in able:
            raise UnsupportedError(f"bench --against {name}: for {place.target.kind.name} there is {', '.join(able)}.")
    require([*place.backends, *(name for name in names if name in NAMES)], place.target)
    modules = {**dict.fromkeys(_TORCH, ("torch", "PyTorch", "torch")), "jax": ("jax", "JAX", "bench")}
    for name in [name for name in names if name in modules]:
        module, package, extra = modules[name]
        if importlib.util.find_spec(module) is None:
            raise SetupError(
                f"bench --against {name} needs {package}, which is not installed; pip install 'tvm-convgrad[{extra}]', "
                f"or leave {name} out of --against"
            )
    if set(_TORCH) & set(names):
        import torch

        if place.gpu and not torch.cuda.is_available():
            raise SetupError(
                "bench --against torch: this PyTorch has no CUDA, or finds no GPU; install one for CUDA 13."
            )
        prepare_torch(threads, place.tf32 if place.gpu else None)


__all__ = ["RIVALS", "prepare_rivals"]
