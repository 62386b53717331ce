# SPDX-License-Identifier: Apache-2.0
"""Convolutions with what follows them as one kernel: a pass to run before LegalizeOps, with a target in scope.

    conv(x, w) [+ acc] [+ bias] [-> relu]          forward and transposed convolutions
    acc + dgrad(dy, w),  acc + wgrad(dy, x)        in the place of acc
    wgrad(dy, x) and the sum of dy over pixels     the gradients of weight and bias

An intermediate that anything else reads is left alone. A sum goes to the place of `acc` only if nobody can read that
place afterwards: `acc` is made in this function by an operation that gives a new tensor, of values that depend on a
parameter (constants are folded and shared), and its other readers are convolutions before the kernel, kernels too.
Passes after this one move elementwise readers, and do not know that the kernel writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.ir import PREFIX, TRANSPOSED, dtype_of, is_part, problem_of, shape_values, transposed_problem_of
from relax_ops.lowering import Lowered, add_kernel, decide, record_lowered, result_type
from tvm_convgrad.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, BY_NAME
from tvm_convgrad.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.problem import ConvProblem

_FRESH = frozenset(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "where", "nn.relu"))
"""Elementwise operations: their result is a tensor of its own."""


@tvm.transform.module_pass(opt_level=0, name="ConvgradFuseEpilogues")
def fuse_epilogues(module: Any, _context: Any) -> Any:
    """Fuse bias, relu, sums and bias gradients into the convolutions that the plan has kernels for."""
    rewriter = _Rewriter(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            chains = _Finder(variable.name_hint, function).chains()
            if chains:
                module = rewriter.rewritten(variable, function, chains)
    return relax.transform.DeadCodeElimination()(module)


@dataclass(frozen=True)
class _Convolution:
    """A convolution that has a kernel: the number of its binding and its number among convolutions."""

    index: int
    number: int
    op: str
    face: str
    problem: ConvProblem
    choice: plan.Choice
    machine: Machine
    operands: list[Any]


@dataclass(frozen=True)
class _Chain:
    """What one kernel does: the convolution, with `epilogue`; the variable it gives; acc and bias where it has them.

    For a bias gradient, `second` is the variable of the sum; the kernel is called for the first of the two.
    """

    convolution: _Convolution
    epilogue: Epilogue
    result: Any
    last: int
    acc: Any = None
    bias: Any = None
    second: Any = None


class _Finder:
    """The chains of one function."""

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._bindings = [binding for block in function.body.blocks for binding in block.bindings]
        self._place = {binding.var: index for index, binding in enumerate(self._bindings)}
        self._readers: dict[Any, list[int]] = {}
        self._varying = set(function.params)
        for index, binding in enumerate(self._bindings):
            used = relax.analysis.free_vars(binding.value)
            for variable in used:
                self._readers.setdefault(variable, []).append(index)
            if any(variable in self._varying for variable in used):
                self._varying.add(binding.var)
        for variable in relax.analysis.free_vars(function.body.body):
            self._readers.setdefault(variable, []).append(len(self._bindings))
        self._convolutions = {found.index: found for found in self._find()}
        self._called: dict[int, int] = {}  # where the kernel is called that computes a fused binding
        self._taken: set[Any] = set()  # results of chains

    def chains(self) -> list[_Chain]:
        """All of them; each is recorded."""
        found = []
        for convolution in self._convolutions.values():
            chain = self._follow(convolution)
            if chain.epilogue == Epilogue() and convolution.face == BACKWARD_WEIGHT.name:
                chain = self._with_bias_gradient(chain)
            if chain.epilogue != Epilogue():
                self._called[convolution.index] = chain.last
                self._taken.add(chain.result)
                found.append(chain)
                c = convolution
                names = tuple(k for k, v in vars(chain.epilogue).items() if v)
                entry = Lowered(
                    c.op, c.face, c.problem, c.choice, c.machine, c.choice.kind, names, (self._name, c.number)
                )
                record_lowered(entry)
        return found

    def _find(self) -> list[_Convolution]:
        found, number = [], -1
        for index, binding in enumerate(self._bindings):
            call = binding.value
            op = _operator(call).removeprefix(PREFIX)
            if op not in BY_NAME and op not in TRANSPOSED:
                continue
            number += 1
            try:
                problem = transposed_problem_of(call) if op in TRANSPOSED else problem_of(call)
            except (ProblemError, DTypeError, UnsupportedError):
                continue  # legalization says what it does with it
            face = BACKWARD_DATA.name if op in TRANSPOSED else BY_NAME[op].face.name
            choice, machine = decide(op, face, problem)
            if choice.is_kernel and machine is not None and not is_part(call):
                operands = list(call.args)[:2]
                found.append(_Convolution(index, number, op, face, problem, choice, machine, operands))
        return found

    def _follow(self, convolution: _Convolution) -> _Chain:
        """The longest chain behind a convolution."""
        chain = _Chain(convolution, Epilogue(), self._bindings[convolution.index].var, convolution.index)
        while (longer := self._extended(chain)) is not None:
            chain = longer
        return chain

    def _extended(self, chain: _Chain) -> _Chain | None:
        readers, before = self._readers.get(chain.result, []), chain.epilogue
        if len(readers) != 1 or readers[0] == len(self._bindings) or before.relu:
            return None
        binding = self._bindings[readers[0]]
        if binding.var in self._taken:
            return None
        call = binding.value
        grown = replace(chain, result=binding.var, last=readers[0])
        if _operator(call) == "relax.nn.relu":
            grown = replace(grown, epilogue=replace(before, relu=True))
        elif _operator(call) == "relax.add" and tvm_ffi.structural_equal(binding.var.ty, chain.result.ty):
            other = call.args[0] if call.args[1].same_as(chain.result) else call.args[1]
            if not before.bias and self._bias(chain, other) is not None:
                grown = replace(grown, epilogue=replace(before, bias=True), bias=self._bias(chain, other))
            elif not before.accumulate and self._is_free(other, chain, readers[0]) and self._pays(other):
                grown = replace(grown, epilogue=replace(before, accumulate=True), acc=other)
            else:
                return None
        else:
            return None
        return None if plan.epilogue_refusal(chain.convolution.choice, grown.epilogue) else grown

    def _bias(self, chain: _Chain, other: Any) -> Any:
        """The vector of one number a channel that `other` is, seen as the result's shape, or None."""
        face, problem = chain.convolution.face, chain.convolution.problem
        data = face == BACKWARD_DATA.name
        layout = problem.data_layout if data else problem.grad_layout
        channels = problem.in_channels if data else problem.out_channels
        if face == BACKWARD_WEIGHT.name or not isinstance(other, relax.Var):
            return None
        shape = _shape(other)
        wide = [channels if letter == "C" else 1 for letter in layout]
        while wide and wide[0] == 1 and len(wide) > len(shape):
            wide.pop(0)
        if shape != wide or dtype_of(other.ty) != dtype_of(chain.result.ty):
            return None
        made = self._bindings[self._place[other]].value if other in self._place else None
        vector = made.args[0] if made is not None and _operator(made) == "relax.reshape" else other
        return vector if _shape(vector) == [channels] else None

    def _is_free(self, acc: Any, chain: _Chain, reader: int) -> bool:
        """Whether the kernel may write to the place of `acc` at `reader`."""
        place = self._place.get(acc)
        if place is None or acc not in self._varying or acc.same_as(chain.result):
            return False
        if not tvm_ffi.structural_equal(acc.ty, chain.result.ty):
            return False
        if place not in self._convolutions and _operator(self._bindings[place].value) not in _FRESH:
            return False
        others = [index for index in self._readers[acc] if index != reader]
        return all(
            (index in self._convolutions or index in self._called)
            and index < chain.convolution.index
            and self._called.get(index, index) < chain.convolution.index
            for index in others
        )

    def _pays(self, acc: Any) -> bool:
        """Whether a sum is better done by the kernel: not if elementwise operations make `acc` for it alone.

        They become one with the sum otherwise, which reads and writes no more, and an optimizer's keeps its place.
        """
        return self._place[acc] in self._convolutions or len(self._readers[acc]) > 1

    def _with_bias_gradient(self, chain: _Chain) -> _Chain:
        """The chain with the sum of its dY over everything but channels, if the function has that."""
        c, grown = chain.convolution, replace(chain.epilogue, bias_grad=True)
        dy, x = c.operands
        axes = [axis for axis, letter in enumerate(c.problem.grad_layout) if letter != "C"]
        if plan.epilogue_refusal(c.choice, grown) or c.problem.grad_dtype != c.problem.kernel_dtype:
            return chain
        for index in self._readers.get(dy, []):
            if index == len(self._bindings) or _operator(self._bindings[index].value) != "relax.sum":
                continue
            wanted = self._bindings[index].value.attrs.axis
            if wanted is None or sorted(int(a) % (len(axes) + 1) for a in wanted) != axes:
                continue
            if self._place.get(x, -1) < min(index, c.index):
                self._called[index] = c.index
                return replace(chain, epilogue=grown, second=self._bindings[index].var, last=c.index)
        return chain


@mutator
class _Rewriter(PyExprMutator):
    """Puts the kernels' calls into functions."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._chains: dict[Any, _Chain] = {}
        self._pairs: dict[Any, Any] = {}

    def rewritten(self, variable: Any, function: Any, chains: list[_Chain]) -> Any:
        """The module with one more function rewritten."""
        self._chains = {chain.result: chain for chain in chains}
        self._chains |= {chain.second: chain for chain in chains if chain.second is not None}
        self._pairs = {}
        self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def visit_var_binding_(self, binding: Any) -> None:
        """A kernel's call in the place of the last operation of a chain."""
        chain = self._chains.get(binding.var)
        if chain is None:
            super().visit_var_binding_(binding)
            return
        value = self._pair(chain, binding.var) if chain.second is not None else self._call(chain)
        super().visit_var_binding_(relax.VarBinding(binding.var, value))

    def _kernel(self, chain: _Chain) -> tuple[Any, list[Any]]:
        c = chain.convolution
        kernel = add_kernel(self.builder_, c.face, c.problem, c.choice, c.machine, chain.epilogue)
        extra = [tensor for tensor in (chain.bias, chain.acc) if tensor is not None]
        return kernel, [*c.operands, *extra]

    def _call(self, chain: _Chain) -> Any:
        kernel, arguments = self._kernel(chain)
        result = result_type(chain.convolution.face, chain.convolution.problem, arguments)
        if chain.acc is None:
            return relax.op.call_tir(kernel, arguments, result)
        return relax.op.call_tir_inplace(kernel, arguments, [len(arguments) - 1], result)

    def _pair(self, chain: _Chain, variable: Any) -> Any:
        """One of the two results of a wgrad with bias gradient; the first time, its call."""
        if chain.result not in self._pairs:
            kernel, arguments = self._kernel(chain)
            weight = result_type(chain.convolution.face, chain.convolution.problem, arguments)
            bias = relax.TensorType([chain.convolution.problem.out_channels], chain.convolution.problem.kernel_dtype)
            call = relax.op.call_tir(kernel, arguments, [weight, bias])
            self._pairs[chain.result] = self.builder_.emit(self.visit_expr(call))
        pair = self._pairs[chain.result]
        if variable.same_as(chain.result):
            return relax.TupleGetItem(pair, 0)
        vector = relax.TupleGetItem(pair, 1)
        shape = _shape(variable)
        return vector if len(shape) == 1 else relax.op.reshape(self.builder_.emit(vector), relax.ShapeExpr(shape))


def _operator(value: Any) -> str:
    """The operator that an expression calls, or nothing."""
    return str(value.op.name) if isinstance(value, tvm.ir.Call) and isinstance(value.op, tvm.ir.Op) else ""


def _shape(value: Any) -> list[Any]:
    """The extents of a tensor; empty if they are not known."""
    known = isinstance(value.ty, relax.TensorType) and value.ty.shape is not None
    return list(shape_values(value.ty.shape) or ()) if known else []


__all__ = ["fuse_epilogues"]
