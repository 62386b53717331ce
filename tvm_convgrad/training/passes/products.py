# SPDX-License-Identifier: Apache-2.0
"""Matrix products as 1x1 convolutions over rows of pixels, so that linear layers run on the same kernels.

With rows for pixels and columns for channels, in NHWC: A B is the forward convolution of A, whose weight is B (HWIO),
or W (OHWI) where B is a transposed W; X^T B is wgrad of the data X and the gradient B. A linear layer and both of its
gradients are then read where they lie: no operand is transposed in memory. The kernels add a layer's bias, and give its
gradient, the sum of B's rows, with that of the weight. Weight gradients that are added up, as those of micro-batches
are, are added by the kernels, in the place of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.ir import constant_extents
from relax_ops.lowering import add_generated, packed_constant
from tvm_convgrad.codegen.hardware import Machine, machine_of
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT, DIRECTIONS, FORWARD
from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.training.ir.graph import bindings_of, element_type, is_call, operator_name
from tvm_convgrad.training.ir.matrices import SMALL, Rows, is_transpose, matrix, row_length, source

_WIDE = ("float32", "float64")
_TYPES = frozenset([*((d, d) for d in (*SHORT_FLOATS, *_WIDE)), *((d, "float32") for d in SHORT_FLOATS)])
"""Types of operands, and of the result."""
BIAS, BIAS_GRADIENT = Epilogue(bias=True), Epilogue(bias_grad=True)


def ProductsAsConvolutions() -> tvm.transform.Pass:
    """The pass that replaces matrix products by calls of convolution kernels.

    Operands are of one type, and results of it or, of 16-bit operands, of float32; extents are constant but for the
    rows, which may be a symbolic batch, or a number of rows for each of its samples.
    """
    return tvm.transform.module_pass(_products_as_convolutions, opt_level=0, name="ConvgradProducts")


def _products_as_convolutions(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    machine = machine_of(tvm.target.Target.current(allow_none=True))
    if machine is None:
        return module
    module = relax.transform.CanonicalizeBindings()(module)  # gradients bind one tensor to several names
    rewriter = _Products(module, machine)
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function):
            rewriter.look_at(function)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


@dataclass(frozen=True)
class _Product:
    """A matrix product as a direction of a problem, the kernel that computes it, and its operands as matrices.

    Attributes:
        batch: the extent that the problem's batch is the name of, if it is symbolic.
    """

    direction: str
    problem: ConvProblem
    choice: Choice
    operands: tuple[Any, Any]
    batch: Any = None

    @property
    def result(self) -> list[Any]:
        """The shape of what the kernel gives."""
        return self.shape(DIRECTIONS[self.direction].result)

    def shape(self, name: str) -> list[Any]:
        """The shape of a tensor of the problem, with extents of the program."""
        return [self.batch if isinstance(extent, str) else extent for extent in self.problem.tensors[name][0]]


@dataclass(frozen=True)
class _BiasGradient:
    """The variables of the gradients of a weight and of the bias beside it, and the product that gives the former."""

    weight: Any
    bias: Any
    product: _Product


@mutator
class _Products(PyExprMutator):
    def __init__(self, module: tvm.IRModule, machine: Machine) -> None:
        super().__init__(module)
        self.machine = machine
        self.values: dict[Any, Any] = {}
        self.readers: Counter[Any] = Counter()
        self.transposed: set[Any] = set()
        self.sums: dict[Any, tuple[Any, _Product]] = {}  # by the variable of the sum: the summand's, what is added
        self.biased: dict[Any, tuple[Any, _Product]] = {}  # by the variable of the sum: the bias, and the product
        self.bias_gradients: dict[Any, _BiasGradient] = {}  # by the variables of the weight's gradient, and of its own
        self.left_out: set[Any] = set()  # variables of what is added, or transposed to be
        self.made: dict[Any, Any] = {}  # what a kernel gave, by the variable of the product or sum

    def look_at(self, function: relax.Function) -> None:
        """Find what each variable is bound to, the calls that nothing but transposes read, and sums of gradients."""
        self.values = {binding.var: binding.value for binding in bindings_of(function)}
        self.place = {variable: number for number, variable in enumerate(self.values)}
        self.readers, self.sums, self.left_out, self.made = Counter(), {}, set(), {}
        self.biased, self.bias_gradients = {}, {}
        read: dict[Any, bool] = {}
        for value in self.values.values():
            for variable in relax.analysis.free_vars(value):
                read[variable] = read.get(variable, True) and is_transpose(value)
                self.readers[variable] += 1
        for variable in relax.analysis.free_vars(function.body.body):
            read[variable] = False
            self.readers[variable] += 1
        self.transposed = {self.values[variable] for variable, only in read.items() if only and variable in self.values}
        for variable, value in self.values.items():
            if isinstance(value, tvm.ir.Call) and operator_name(value) == "relax.add":
                self._look_at_sum(variable, value)
                self._look_at_bias(variable, value)
        self._look_at_bias_gradients()

    def _look_at_sum(self, variable: relax.Var, call: relax.Call) -> None:
        """Note whether both summands are weight gradients that nobody else reads; one may be a sum of such."""
        left, right = call.args
        for acc, more in ((left, right), (right, left)):
            before, added = self._gradient(acc), self._gradient(more)
            if acc in self.sums and self.readers[acc] == 1:
                before = acc, self.sums[acc][1]
            if before is None or added is None or acc.same_as(more) or before[1].result != added[1].result:
                continue
            self.sums[variable] = before[0], added[1]
            self.left_out |= {more, added[0]}
            return

    def _look_at_bias(self, variable: relax.Var, call: relax.Call) -> None:
        """Note whether a vector over columns is added to a product that nobody else reads."""
        for left, bias in (call.args, reversed(call.args)):
            product = self._product(self.values.get(left)) if self.readers[left] == 1 else None
            if product is None or product.direction != FORWARD.name:
                continue
            if chooser.epilogue_refusal(product.choice, product.direction, BIAS):
                continue
            if constant_extents(bias) == (product.problem.out_channels,) and bias.ty.dtype == left.ty.dtype:
                self.biased[variable] = bias, product
                self.left_out.add(left)
                return

    def _look_at_bias_gradients(self) -> None:
        """Note which sums of rows the kernel of a weight gradient gives as well, if it is not one of those added up."""
        sums = {self._narrow(value.args[0]): var for var, value in self.values.items() if _is_sum_of_rows(value)}
        summands = self.left_out | {acc for acc, _ in self.sums.values()}
        for weight, value in self.values.items():
            grad = value.args[1] if isinstance(value, tvm.ir.Call) and len(value.args) == 2 else None
            if grad not in sums or weight in summands:
                continue
            product, bias = self._product(value), sums[grad]
            if product is None or product.direction != BACKWARD_WEIGHT.name:
                continue
            if element_type(bias) != product.problem.kernel_dtype:
                continue
            first = min(weight, bias, key=self.place.__getitem__)
            known = all(self.place.get(operand, -1) < self.place[first] for operand in product.operands)
            if known and not chooser.epilogue_refusal(product.choice, product.direction, BIAS_GRADIENT):
                self.bias_gradients[weight] = self.bias_gradients[bias] = _BiasGradient(weight, bias, product)
                del sums[grad]

    def _gradient(self, variable: relax.Var) -> tuple[Any, _Product] | None:
        """The weight gradient, by its variable, that a variable is, or is the transpose of, if nobody else reads it."""
        if is_transpose(self.values.get(variable)) and self.readers[variable] == 1:
            variable = self.values[variable].args[0]
        if self.readers[variable] != 1 or variable in self.left_out:
            return None
        product = self._product(self.values.get(variable))
        return None if product is None or product.direction != BACKWARD_WEIGHT.name else (variable, product)

    def visit_var_binding_(self, binding: relax.Binding) -> None:
        """A kernel for a product, or for a sum and the product that is added; else what there was."""
        variable = binding.var
        if variable in self.left_out:
            return
        value, (acc, product) = binding.value, self.sums.get(variable, (None, None))
        bias, biased = self.biased.get(variable, (None, None))
        product = product or biased or self._product(value)
        if variable in self.bias_gradients:
            value = self._of_both(self.bias_gradients[variable], variable)
        elif biased is not None:
            value = self._matrix_of(self._kernel(biased, None, variable, bias), value, transposed=False)
        elif product is not None:
            transposed = acc is None and product.direction == BACKWARD_WEIGHT.name and value in self.transposed
            value = self._matrix_of(self._kernel(product, acc, variable), value, transposed)
        super().visit_var_binding_(relax.VarBinding(variable, value))

    def visit_call_(self, call: relax.Call) -> Any:
        """The transpose of a transpose is what was there, a view of a view is one; everything else stays."""
        is_view = is_call(call, "relax.reshape")
        if is_view or is_transpose(call):
            operand = self.visit_expr(call.args[0])
            value: Any = self.builder_.lookup_binding(operand) if isinstance(operand, relax.Var) else None
            if is_view and is_call(value, "relax.reshape"):
                return relax.op.reshape(value.args[0], call.args[1])
            if not is_view and is_transpose(value):
                return value.args[0]
        return super().visit_call_(call)

    def _of_both(self, both: _BiasGradient, variable: relax.Var) -> Any:
        """The gradient of a weight, as a matrix, or of the bias: the kernel is called where the first of them was."""
        if both.bias not in self.made:
            self._kernel(both.product, None, both.weight, bias_gradient=both.bias)
        if variable.same_as(both.bias):
            return self.made[both.bias]
        value = self.values[both.weight]
        return self._matrix_of(self.made[both.weight], value, value in self.transposed)

    def _kernel(
        self, product: _Product, acc: Any, variable: relax.Var, bias: Any = None, bias_gradient: Any = None
    ) -> Any:
        """The variable of what the kernel gives, in the place of what another one gave for `acc` if there is one.

        Args:
            variable: what the result was bound to.
            bias: is added to it, if given.
            bias_gradient: what the sum of the gradient's rows was bound to, if the kernel gives that as well.
        """
        epilogue = Epilogue(accumulate=acc is not None, bias=bias is not None, bias_grad=bias_gradient is not None)
        direction, problem = product.direction, product.problem
        packed = packed_constant(direction, problem, product.choice, self.machine, product.operands[1])
        function = chooser.build(problem, direction, self.machine, product.choice, "", epilogue, packed is not None)
        kernel = add_generated(self.builder_, function, f"matmul_{direction}_kernel", product.choice.estimate)
        arguments = [
            self.builder_.emit(relax.op.reshape(self.visit_expr(operand), product.shape(name)))
            for operand, name in zip(product.operands, DIRECTIONS[direction].operands, strict=True)
        ]
        if packed is not None:
            arguments[1] = packed
        result = relax.TensorType(product.result, problem.tensors[DIRECTIONS[direction].result][1])
        if bias_gradient is not None:
            sums = relax.TensorType([problem.out_channels], problem.kernel_dtype)
            pair = self.builder_.emit(relax.op.call_tir(kernel, arguments, [result, sums]))
            self.made[variable] = self.builder_.emit(relax.TupleGetItem(pair, 0))
            self.made[bias_gradient] = self.builder_.emit(relax.TupleGetItem(pair, 1))
            return self.made[variable]
        if bias is not None:
            arguments.append(self.visit_expr(bias))
        if acc is None:
            call = relax.op.call_tir(kernel, arguments, result)
        else:
            call = relax.op.call_tir_inplace(kernel, [*arguments, self.made[acc]], [2], result)
        self.made[variable] = self.builder_.emit(call)
        return self.made[variable]

    def _matrix_of(self, tensor: relax.Expr, value: relax.Expr, transposed: bool) -> Any:
        """What a kernel gives, `transposed` or not, as the matrix that `value` is."""
        shape = matrix(value)
        assert shape is not None  # or there were no product
        if transposed:
            return relax.op.permute_dims(self.builder_.emit(relax.op.reshape(tensor, [shape[1], shape[0]])), [1, 0])
        return relax.op.reshape(tensor, list(shape))

    def _product(self, call: relax.Call) -> _Product | None:
        """The kernel for a matrix product, if there is one and it is worth a call."""
        if not isinstance(call, tvm.ir.Call) or operator_name(call) != "relax.matmul":
            return None
        left, right = (matrix(argument) for argument in call.args)
        if left is None or right is None:
            return None
        dtype, result = element_type(call.args[0]), element_type(call)
        known = (dtype, result) in _TYPES
        if not known or element_type(call.args[1]) != dtype:
            return None
        (m, k), n = left, right[1]
        (first, is_first_transposed), (second, is_second_transposed) = (
            source(self.values, argument) for argument in call.args
        )
        if is_first_transposed:
            direction, rows, channels, operands = BACKWARD_WEIGHT.name, k, m, (call.args[1], first)
            kernel_layout = "OHWI" if call in self.transposed else "HWIO"
        else:
            direction, rows, channels, operands = FORWARD.name, m, k, (first, second)
            kernel_layout = "OHWI" if is_second_transposed else "HWIO"
        found = Rows.of(rows)
        if found is None or not isinstance(channels, int) or not isinstance(n, int):
            return None
        if found.representative * channels * n < SMALL:
            return None
        best: _Product | None = None
        for height, width in _lines(found.each):
            problem = ConvProblem(
                batch=1 if found.batch is None else str(found.batch),
                in_channels=channels,
                out_channels=n,
                data_extents=(height, width),
                kernel=(1, 1),
                data_layout="NHWC",
                kernel_layout=kernel_layout,
                grad_layout="NHWC",
                data_dtype=dtype,
                kernel_dtype=result if direction == BACKWARD_WEIGHT.name else dtype,
                grad_dtype=result if direction == FORWARD.name else dtype,
            )
            choice = chooser.choose(problem, direction, self.machine)
            if choice.is_kernel and (best is None or choice.estimate < best.choice.estimate):
                best = _Product(direction, problem, choice, operands, found.batch)
        return best

    def _narrow(self, operand: relax.Expr) -> Any:
        """What a variable is cast from, if it is of 16 bits, or the variable."""
        value: Any = self.values.get(operand)
        is_wider = is_call(value, "relax.astype") and (element_type(value.args[0]), element_type(value)) in _TYPES
        return value.args[0] if is_wider else operand


def _is_sum_of_rows(value: relax.Expr) -> bool:
    """Whether the value is a vector, the sum of a matrix's rows."""
    if not is_call(value, "relax.sum") or matrix(value.args[0]) is None or value.attrs.keepdims:
        return False
    return value.attrs.axis is not None and [int(axis) % 2 for axis in value.attrs.axis] == [0]


def _lines(rows: int) -> Iterator[tuple[int, int]]:
    """How to lay rows out as an image: one image row, or image rows of equal length."""
    yield 1, rows
    width = row_length(rows)
    if 8 <= width < rows:
        yield rows // width, width
