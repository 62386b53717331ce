# SPDX-License-Identifier: Apache-2.0
"""A face of a problem as each party computes it: our kernel, stock TVM, PyTorch and JAX, in each of their layouts.

Operands are brought into a party's own layout before anything is timed; what is timed is one call of one operator,
its result allocated by the party itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_convgrad.catalogue import FACES
from tvm_convgrad.errors import SetupError, UnsupportedError
from tvm_convgrad.evaluation import forced
from tvm_convgrad.geometry import data_layout_of, kernel_layout_of
from tvm_convgrad.kernels.transforms import TRANSFORMS, allow_transforms
from tvm_convgrad.offload.common import NAMES, require
from tvm_convgrad.problem import ConvProblem

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Call:
    """One way to compute a face.

    Attributes:
        name: of the party and its variant, such as "torch channels_last".
        run: computes and returns when the result is there.
        read: what `run` returned as an array in the problem's layout.
        kernel: what the plan chose, for TVM's.
    """

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Array]
    kernel: str = ""


def tvm_call(face: str, problem: ConvProblem, arrays: Mapping[str, Array], target: Any, impl: str) -> Call:
    """The compiled operator.

    The virtual machine keeps what it returned until its next call returns: two results would take turns in the caches,
    where the other parties get the same memory each time. A second function, which returns nothing, makes it let go.

    Args:
        impl: "kernel" for ours; "transforms" for ours with these allowed; "composition" for what stock operators give;
            "onednn" for that library.

    Raises:
        UnsupportedError: the kernel, or the library, refuses the problem.
        SetupError: the library is not installed.
    """
    import tvm
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.lowering import recorded_choices
    from relax_ops.program import faces_module
    from tvm_convgrad.offload.partition import Offloaded, offload

    builder = relax.BlockBuilder()
    with builder.function("let_go", []):
        builder.emit_func_output(relax.ShapeExpr([]))
    module = faces_module([("main", FACES[face], problem)])
    module.update_func(tvm.ir.GlobalVar("let_go"), builder.finalize()["let_go"])
    library = offload(module, [impl], target) if impl in NAMES else Offloaded(module)
    transforms = impl == TRANSFORMS
    with forced(face, "kernel" if transforms else impl), allow_transforms(transforms), recorded_choices() as record:
        executable = tvm.compile(library.module, target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    function, let_go = machine["main"], machine["let_go"]
    operands = [tvm.runtime.tensor(arrays[name]) for name in FACES[face].operands]
    name = {"kernel": "ours", TRANSFORMS: "ours", "composition": "stock"}.get(impl, impl)
    forms = [entry.form for entry in library.lowered] or [entry.choice.kind for entry in record]
    kernel = forms[0] if forms else "stock"

    def run() -> Any:
        result = function(*operands)
        let_go()
        return result

    return Call(name, run, lambda result: np.asarray(result.numpy()), kernel)


def stock_calls(face: str, problem: ConvProblem, arrays: Mapping[str, Array], target: Any) -> list[Call]:
    """Stock TVM: its convolution, and for gradients the composition of its operators."""
    return [tvm_call(face, problem, arrays, target, "composition")]


def onednn_calls(face: str, problem: ConvProblem, arrays: Mapping[str, Array], target: Any) -> list[Call]:
    """TVM's program with the convolution as a call of oneDNN."""
    return [tvm_call(face, problem, arrays, target, "onednn")]


def torch_calls(face: str, problem: ConvProblem, arrays: Mapping[str, Array], _target: Any) -> list[Call]:
    """PyTorch's call with contiguous tensors and with channels_last ones.

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

    def call(name: str, memory_format: Any) -> Call:
        t = {}
        for key in ("data", "weight", "grad"):
            order = _canonical_order(problem, key)
            if key in arrays:
                tensor = torch.from_numpy(arrays[key]).permute(*order)
            else:  # of the result only the shape is looked at
                tensor = torch.empty([int(problem.tensors[key][0][axis]) for axis in order])
            t[key] = tensor.contiguous(memory_format=memory_format)

        def forward() -> Any:
            with torch.no_grad():
                return torch.ops.aten.convolution(t["data"], t["weight"], None, *geometry)

        def backward() -> Any:
            found = torch.ops.aten.convolution_backward(t["grad"], t["data"], t["weight"], None, *geometry, mask)
            return found[0 if mask[0] else 1]

        return Call(
            f"torch {name}",
            forward if face == "forward" else backward,
            lambda tensor: np.asarray(tensor.permute(*back).numpy()),
        )

    return [call(*each) for each in formats]


def jax_calls(face: str, problem: ConvProblem, arrays: Mapping[str, Array], _target: Any) -> list[Call]:
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


RIVALS = {"torch": torch_calls, "jax": jax_calls, "stock": stock_calls, "onednn": onednn_calls}
"""Whom `--against` takes."""


def prepare_rivals(names: Sequence[str], threads: int) -> None:
    """Give PyTorch its threads, and refuse rivals that are not installed, before anything is measured.

    Raises:
        SetupError: a package is missing.
    """
    import importlib.util

    require([name for name in names if name in NAMES], None)
    for name, package, extra in (("torch", "PyTorch", "torch"), ("jax", "JAX", "bench")):
        if name in names and importlib.util.find_spec(name) is None:
            raise SetupError(
                f"bench --against {name} needs {package}, which is not installed; pip install 'tvm-convgrad[{extra}]', "
                f"or leave {name} out of --against"
            )
    if "torch" in names:
        import torch

        torch.set_num_threads(threads)


__all__ = ["RIVALS", "Call", "jax_calls", "prepare_rivals", "stock_calls", "torch_calls", "tvm_call"]
