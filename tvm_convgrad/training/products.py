# SPDX-License-Identifier: Apache-2.0
"""Matrix products as 1x1 convolutions over rows of pixels, so that linear layers run on the same kernels.

With rows for pixels and columns for channels, in NHWC: A B is the forward convolution of A, whose weight is B (HWIO),
or W (OHWI) where B is a transposed W; X^T B is wgrad of the data X and the gradient B. A linear layer and both of its
gradients are then read where they lie: no operand is transposed in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.ir import constant_extents
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.target import Machine, machine_of
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.training.graph import bindings_of, operator_name

SMALL = 1 << 16  # multiply-accumulates; below, the time of a call counts
LINE = 64  # pixels of a line, at most


@tvm.transform.module_pass(opt_level=0, name="ConvgradProducts")
def products_as_convolutions(module: Any, _context: Any) -> Any:
    """Replace the matrix products of float32 or float64 and constant extents by calls of convolution kernels."""
    machine = machine_of(tvm.target.Target.current(allow_none=True))
    if machine is None:
        return module
    rewriter = _Products(module, machine)
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function):
            rewriter.look_at(function)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


@mutator
class _Products(PyExprMutator):
    def __init__(self, module: Any, machine: Machine) -> None:
        super().__init__(module)
        self.machine = machine
        self.values: dict[Any, Any] = {}
        self.turned: set[Any] = set()

    def look_at(self, function: Any) -> None:
        """Find what each variable is bound to, and the calls that nothing but transposes read."""
        self.values = {binding.var: binding.value for binding in bindings_of(function)}
        read: dict[Any, bool] = {}
        for value in self.values.values():
            for variable in relax.analysis.free_vars(value):
                read[variable] = read.get(variable, True) and self._is_transpose(value)
        for variable in relax.analysis.free_vars(function.body.body):
            read[variable] = False
        self.turned = {self.values[variable] for variable, only in read.items() if only and variable in self.values}

    def visit_call_(self, call: Any) -> Any:
        """A product with the operands of its transposes, or the call as it is."""
        if isinstance(call.op, tvm.ir.Op) and operator_name(call) == "relax.matmul":
            shapes = [_matrix(argument) for argument in call.args]
            if shapes[0] and shapes[1] and shapes[0][0] * shapes[0][1] * shapes[1][1] >= SMALL:
                found = self._kernel(call, shapes[0], shapes[1])
                if found is not None:
                    return found
        if self._is_transpose(call):
            operand = self.visit_expr(call.args[0])
            value: Any = self.builder_.lookup_binding(operand) if isinstance(operand, relax.Var) else None
            if self._is_transpose(value):
                return value.args[0]
        return super().visit_call_(call)

    def _kernel(self, call: Any, left: tuple[int, int], right: tuple[int, int]) -> Any:
        (m, k), n = left, right[1]
        dtype = str(call.ty.dtype)
        (first, is_first_turned), (second, is_second_turned) = map(self._source, call.args)
        if dtype not in ("float32", "float64") or any(str(a.ty.dtype) != dtype for a in call.args):
            return None
        if is_first_turned:
            face, rows, channels, operands = "backward_weight", k, m, [call.args[1], first]
            kernel_layout = "OHWI" if call in self.turned else "HWIO"
        else:
            face, rows, channels, operands = "forward", m, k, [first, second]
            kernel_layout = "OHWI" if is_second_turned else "HWIO"
        best: tuple[plan.Choice, ConvProblem] | None = None
        for height, width in _lines(rows):
            problem = ConvProblem(
                batch=1,
                in_channels=channels,
                out_channels=n,
                data_extents=(height, width),
                kernel=(1, 1),
                data_layout="NHWC",
                kernel_layout=kernel_layout,
                grad_layout="NHWC",
                data_dtype=dtype,
                kernel_dtype=dtype,
                grad_dtype=dtype,
            )
            choice = plan.choose(problem, face, self.machine)
            if choice.is_kernel and (best is None or choice.estimate < best[0].estimate):
                best = (choice, problem)
        if best is None:
            return None
        choice, problem = best
        variable = self.builder_.add_func(plan.build(problem, face, self.machine, choice, ""), f"matmul_{face}_kernel")
        arguments = [
            self.builder_.emit(relax.op.reshape(self.visit_expr(operand), list(problem.tensors[name][0])))
            for operand, name in zip(operands, FACES[face].operands, strict=True)
        ]
        shape, _ = problem.tensors[FACES[face].result]
        result = self.builder_.emit(relax.op.call_tir(variable, arguments, relax.TensorType(shape, dtype)))
        if face == "backward_weight" and kernel_layout == "OHWI":
            return relax.op.permute_dims(self.builder_.emit(relax.op.reshape(result, [n, m])), [1, 0])
        return relax.op.reshape(result, [m, n])

    def _source(self, operand: Any) -> tuple[Any, bool]:
        """The matrix that an operand is, or is the transpose of."""
        turned = False
        while self._is_transpose(self.values.get(operand)):
            operand, turned = self.values[operand].args[0], not turned
        return operand, turned

    @staticmethod
    def _is_transpose(value: Any) -> bool:
        """Whether the value is the transpose of a matrix."""
        if not isinstance(value, tvm.ir.Call) or operator_name(value) != "relax.permute_dims":
            return False
        axes = value.attrs.axes
        return _matrix(value.args[0]) is not None and (axes is None or [int(a) % 2 for a in axes] == [1, 0])


def _matrix(expr: Any) -> tuple[int, int] | None:
    """The constant extents of a matrix."""
    extents = constant_extents(expr)
    return (extents[0], extents[1]) if extents is not None and len(extents) == 2 else None


def _lines(rows: int) -> Iterator[tuple[int, int]]:
    """How to lay rows out as an image: one line, or lines of equal length."""
    yield 1, rows
    width = max(width for width in range(1, LINE + 1) if rows % width == 0)
    if 8 <= width < rows:
        yield rows // width, width
