# SPDX-License-Identifier: Apache-2.0
"""The baselines of layers: a direction of a problem by stock TVM, a vendor library, PyTorch and JAX.

Operands are brought into a contender's own layout before anything is timed; what is timed is one call of one operator,
whose result the contender allocates itself. PyTorch and JAX, which are optional, are imported inside functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from tvm_convgrad.bench.configuration import Configuration
from tvm_convgrad.bench.contenders import prepare_torch
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.geometry import data_layout_of, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.measure.program import tvm_call
from tvm_convgrad.measure.timing import Array, Call
from tvm_convgrad.offload.registry import NAMES, names_of_kind, require


def tvm_calls(
    impl: str, direction: str, problem: ConvProblem, arrays: Mapping[str, Array], config: Configuration
) -> list[Call]:
    """A compiled TVM program of another implementation: "composition" (stock operators), or a vendor library."""
    return [tvm_call(direction, problem, arrays, config.target, impl)]


def torch_calls(
    direction: str,
    problem: ConvProblem,
    arrays: Mapping[str, Array],
    config: Configuration,
    *,
    same_layout: bool = False,
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
    result = DIRECTIONS[direction].result
    mask = [direction == "backward_data", direction == "backward_weight", False]
    to_problem = _problem_order(problem, result)
    dtype = getattr(torch, config.dtype)

    def call(name: str, memory_format: torch.memory_format) -> Call:
        t = {}
        for key in ("data", "weight", "grad"):
            order = _canonical_order(problem, key)
            if key in arrays:
                # numpy's bfloat16 is unknown to PyTorch; on the way through float32 nothing is rounded
                tensor = torch.from_numpy(arrays[key].astype("float32", copy=False)).permute(*order)
            else:  # only the shape of the result is used
                tensor = torch.empty([int(problem.tensors[key][0][axis]) for axis in order])
            t[key] = tensor.to(config.torch_device, dtype).contiguous(memory_format=memory_format)

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return torch.ops.aten.convolution(t["data"], t["weight"], None, *geometry)

        def backward() -> torch.Tensor:
            found = torch.ops.aten.convolution_backward(t["grad"], t["data"], t["weight"], None, *geometry, mask)
            return found[0 if mask[0] else 1]

        return Call(
            f"torch {name}",
            forward if direction == "forward" else backward,
            lambda tensor: np.asarray(tensor.permute(*to_problem).float().cpu().numpy()),
            wait=torch.cuda.synchronize if config.gpu else None,
        )

    if same_layout:
        formats = [formats[-1] if problem.data_layout.endswith("C") else formats[0]]
    return [call(*each) for each in formats]


def jax_calls(direction: str, problem: ConvProblem, arrays: Mapping[str, Array], _place: Configuration) -> list[Call]:
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
    to_problem = _problem_order(problem, DIRECTIONS[direction].result)

    def call(name: str, data_layout: str, kernel_layout: str) -> Call:
        layouts = {"data": (data, data_layout), "weight": (kernel, kernel_layout), "grad": (data, data_layout)}
        shapes, tensors = {}, []
        for key, (canonical, own) in layouts.items():
            order = [_canonical_order(problem, key)[canonical.index(letter)] for letter in own]
            shape = [int(problem.tensors[key][0][axis]) for axis in order]
            shapes[key] = jax.ShapeDtypeStruct(shape, "float32")
            if key in DIRECTIONS[direction].operands:
                tensors.append(
                    (DIRECTIONS[direction].operands.index(key), jax.numpy.asarray(arrays[key].transpose(order)))
                )
        operands = [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]

        def conv(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                x,
                w,
                problem.strides,
                problem.padding,
                rhs_dilation=problem.dilation,
                dimension_numbers=(data_layout, kernel_layout, data_layout),
                feature_group_count=problem.groups,
            )

        def wgrad(dy: jax.Array, x: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda w: conv(x, w), shapes["weight"])(dy)[0]

        def dgrad(dy: jax.Array, w: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda x: conv(x, w), shapes["data"])(dy)[0]

        function = jax.jit({"forward": conv, "backward_weight": wgrad, "backward_data": dgrad}[direction])
        canonical, own = layouts[DIRECTIONS[direction].result]
        order = [own.index(letter) for letter in canonical]
        return Call(
            f"jax {name}",
            lambda: function(*operands).block_until_ready(),
            lambda array: np.asarray(array).transpose(order).transpose(to_problem),
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


def _problem_order(problem: ConvProblem, key: str) -> list[int]:
    """The axes of a canonical tensor in the problem's order."""
    own, canonical = _layout(problem, key)
    return [canonical.index(letter) for letter in own]


Baseline = Callable[[str, ConvProblem, Mapping[str, Array], Configuration], list[Call]]

BASELINES: dict[str, Baseline] = {
    "torch": torch_calls,
    "torch-same": partial(torch_calls, same_layout=True),
    "jax": jax_calls,
    "stock": partial(tvm_calls, "composition"),
    **{name: partial(tvm_calls, name) for name in NAMES},
}
"""The baselines by the names that `--against` takes; each gives its calls, one for each of its memory layouts."""

_TORCH = ("torch", "torch-same")
_ON_GPUS = (*_TORCH, *names_of_kind("cuda"))
_ON_CPUS = (*_TORCH, "jax", "stock", *names_of_kind("llvm"))


def prepare_baselines(names: Sequence[str], threads: int, config: Configuration) -> None:
    """Refuse baselines that are missing, before anything is measured; give PyTorch its threads.

    On a GPU PyTorch times cuDNN's algorithms (`torch.backends.cudnn.benchmark`), and rounds float32 operands to tf32 if
    ours may.

    Args:
        names: keys of BASELINES.
        threads: of PyTorch's pool.
        config: where they are measured.

    Raises:
        SetupError: a package is missing.
        UnsupportedError: a baseline that is not measured on this device.
    """
    able = _ON_GPUS if config.gpu else _ON_CPUS
    for name in names:
        if name not in able:
            raise UnsupportedError(f"bench --against {name}: for {config.target.kind.name} there is {', '.join(able)}.")
        if name == "jax" and config.dtype != "float32":
            raise UnsupportedError(
                f"bench --against jax: it is measured in float32, not {config.dtype}; leave jax out."
            )
    require([*config.backends, *(name for name in names if name in NAMES)], config.target)
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

        if config.gpu and not torch.cuda.is_available():
            raise SetupError(
                "bench --against torch: this PyTorch has no CUDA, or finds no GPU; install one for CUDA 13."
            )
        prepare_torch(threads, config.tf32 if config.gpu else None)


__all__ = ["BASELINES", "prepare_baselines"]
