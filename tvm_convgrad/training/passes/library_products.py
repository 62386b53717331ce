# SPDX-License-Identifier: Apache-2.0
"""Matrix products as 1x1 convolutions, for GPUs: a library that computes convolutions then computes linear layers, too.

Rows are pixels and columns are channels, in NHWC and OHWI: A W^T is the forward convolution of A, A B is dgrad of the
gradient A and the weight B, and X^T G is wgrad of the data X and the gradient G. No operand is transposed in memory.
TVM's wheel has no cuBLAS, and its own schedule of a product in float32 or bfloat16 does not use tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_convgrad import op
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.core.epilogue import NO_EPILOGUE
from tvm_convgrad.core.geometry import FLOAT_DTYPES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.registry import AUTO, names_for, verdict
from tvm_convgrad.training.ir.graph import bindings_of, element_type, has_single_blocks, operator_name, rewritten
from tvm_convgrad.training.ir.matrices import SMALL, Rows, matrix, row_length, source

_PIXELS, _KERNEL = "NHWC", "OHWI"


def ProductsForLibraries(backends: Sequence[str], target: tvm.target.Target) -> tvm.transform.Pass:
    """The pass that replaces the matrix products that one of the backends computes by convolutions.

    Args:
        backends: as for `offload`; a product that none of them takes stays as it is.
        target: a GPU.
    """
    lenient = tuple(backends) == (AUTO,)
    names = names_for(target) if lenient else tuple(backends)

    def replace(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        module = relax.transform.CanonicalizeBindings()(module)  # gradients bind one tensor to several names
        return relax.transform.DeadCodeElimination()(rewritten(module, _Products(module, names, target, lenient)))

    return tvm.transform.module_pass(replace, opt_level=0, name="ConvgradLibraryProducts")


@dataclass(frozen=True)
class _Product:
    """A matrix product as a direction of a problem, its operands as matrices, and the images that rows are.

    Attributes:
        images: the extents of the rows: images, rows and columns of pixels.
    """

    direction: str
    problem: ConvProblem
    operands: tuple[relax.Expr, relax.Expr]
    images: tuple[Any, int, int]

    def shape(self, name: str) -> list[Any]:
        """The shape of a tensor of the problem, with extents of the program."""
        own = list(self.problem.tensors[name][0])
        return own if name == "weight" else [self.images[0], *own[1:]]


@mutator
class _Products(PyExprMutator):
    def __init__(self, module: tvm.IRModule, names: Sequence[str], target: tvm.target.Target, lenient: bool) -> None:
        super().__init__(module)
        self._names, self._target, self._lenient = names, target, lenient
        functions = [function for function in module.functions.values() if isinstance(function, relax.Function)]
        if not has_single_blocks(module):  # a transpose's operand may be unknown where its product is
            functions = []
        self._values = {binding.var: binding.value for function in functions for binding in bindings_of(function)}

    def visit_call_(self, call: relax.Call) -> Any:
        """The convolution in the place of a product; everything else as it is."""
        product = self._product(call)
        if product is None:
            return super().visit_call_(call)
        direction = DIRECTIONS[product.direction]
        first, second = (
            self.builder_.emit(relax.op.reshape(self.visit_expr(operand), product.shape(name)))
            for operand, name in zip(product.operands, direction.operands, strict=True)
        )
        return relax.op.reshape(self.builder_.emit(_convolution(product, first, second)), call.ty.shape)

    def _product(self, call: relax.Call) -> _Product | None:
        """A matrix product that is worth a call, and that a library computes."""
        if operator_name(call) != "relax.matmul":
            return None
        left, right = (matrix(argument) for argument in call.args)
        dtype, result = element_type(call.args[0]), element_type(call)
        if (
            left is None
            or right is None
            or element_type(call.args[1]) != dtype
            or not {dtype, result} <= FLOAT_DTYPES.keys()
        ):
            return None
        (first, is_first_transposed), (second, is_second_transposed) = (
            source(self._values, argument) for argument in call.args
        )
        (m, k), n = left, right[1]
        if is_first_transposed and is_second_transposed:
            return None
        if is_first_transposed:
            direction, rows, data, grad, operands = BACKWARD_WEIGHT, k, n, m, (first, second)
        elif is_second_transposed:
            direction, rows, data, grad, operands = FORWARD, m, k, n, (first, second)
        else:
            direction, rows, data, grad, operands = BACKWARD_DATA, m, n, k, (first, second)
        if not isinstance(data, int) or not isinstance(grad, int):
            return None
        found = Rows.of(rows)
        if found is None or found.representative * data * grad < SMALL:
            return None
        images, height, width = _images(found.each)
        if found.batch is not None and images != 1:
            images, height, width = 1, 1, found.each
        types = dict.fromkeys(direction.operands, dtype) | {direction.result: result}
        problem = ConvProblem(
            batch=images if found.batch is None else str(found.batch),
            in_channels=data,
            out_channels=grad,
            data_extents=(height, width),
            kernel=(1, 1),
            data_layout=_PIXELS,
            kernel_layout=_KERNEL,
            grad_layout=_PIXELS,
            data_dtype=types["data"],
            kernel_dtype=types["weight"],
            grad_dtype=types["grad"],
        )
        if not any(self._takes(name, direction.name, problem) for name in self._names):
            return None
        return _Product(
            direction.name, problem, operands, (images if found.batch is None else found.batch, height, width)
        )

    def _takes(self, name: str, direction: str, problem: ConvProblem) -> bool:
        found = verdict(name, direction, problem, NO_EPILOGUE, self._target, lenient=self._lenient)
        return isinstance(found, Engine)


def _images(rows: int) -> tuple[int, int, int]:
    """Images, their rows and their columns for a number of rows of a matrix: images as large as divisors allow.

    Of a prime number they are images of one pixel.

    Example:
        Rows of 32 images of 14x14 pixels:

            assert _images(6272) == (2, 49, 64)
    """
    width = row_length(rows)
    height = row_length(rows // width)
    return rows // width // height, height, width


def _convolution(product: _Product, first: relax.Expr, second: relax.Expr) -> relax.Call:
    """The call of the operator."""
    p = product.problem
    if product.direction == FORWARD.name:
        layouts = {"data_layout": _PIXELS, "kernel_layout": _KERNEL, "out_layout": _PIXELS}
        return relax.op.nn.conv2d(first, second, out_dtype=p.grad_dtype, **layouts)
    if product.direction == BACKWARD_WEIGHT.name:
        return op.conv2d_backward_weight(
            first,
            second,
            kernel_size=(1, 1),
            grad_layout=_PIXELS,
            data_layout=_PIXELS,
            kernel_layout=_KERNEL,
            out_dtype=p.kernel_dtype,
        )
    return op.conv2d_backward_data(
        first,
        second,
        data_shape=product.shape("data"),
        grad_layout=_PIXELS,
        data_layout=_PIXELS,
        kernel_layout=_KERNEL,
        out_dtype=p.data_dtype,
    )


__all__ = ["ProductsForLibraries"]
