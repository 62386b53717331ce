# SPDX-License-Identifier: Apache-2.0
"""The frame of a kernel: the parameters of its PrimFunc, flat views of them, and the batch, fixed or symbolic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from types import MappingProxyType

from tvm_convgrad.codegen.dot_product import HALF, WORD
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, Loops, Shapes, make_parameter, quotient, with_variable
from tvm_convgrad.codegen.tir import Buffer, PrimFunc
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.spec import ConvSpec
from tvm_convgrad.kernels.vectors import GradientStore, Numbers

NO_VIEWS: Mapping[str, str] = MappingProxyType({})
"""No operand is viewed as another type."""


class KernelFrame:
    """What surrounds the loops of a kernel.

    Attributes:
        loops: builds the body.
        epilogue: what is fused into the store.
        batch: a number, or an expression of the variable in the parameters' shapes.
        is_symbolic: whether the batch is known only at run time.
        tensors: flat views of (first operand, second operand, result).
        halves: second views of results and biases that are bfloat16, of type HALF, by the parameters' names: vectors
            are loaded and stored by them. Only where the operands that are bfloat16 are viewed as HALF or WORD, too.
        bias: a flat view of the bias (forward and dgrad) or of the bias gradient (wgrad); None if there is neither.
    """

    def __init__(
        self,
        shapes: Shapes,
        epilogue: Epilogue,
        batch: int,
        panel: int = 0,
        batch_first: bool = False,
        operands: Mapping[str, str] = NO_VIEWS,
        halves: bool = False,
    ) -> None:
        """Declare the parameters.

        Args:
            shapes: shape and dtype of each parameter by its name, in their order; "bias" and "bias_grad" are
                optional. A batch known only at run time is a name in the shapes.
            batch: the batch that the kernel is planned for.
            panel: elements for each image of the largest panel, where one panel holds all images.
            batch_first: whether sizes are written as batch * elements, else as elements * batch. It makes no
                difference but to the structural hash of a PrimFunc.
            operands: the types, WORD or HALF, that views of operands of bfloat16 have, by their names.
            halves: whether results and biases that are bfloat16 have views as HALF.
        """
        self.loops, self.epilogue = Loops(), epilogue
        shapes, variable = with_variable(shapes)
        self.parameters = [make_parameter(name, *shape) for name, shape in shapes.items()]
        self.is_symbolic = variable is not None
        self.batch: Index = batch
        sizes: dict[str, Index] = {}
        for name, (shape, _) in shapes.items():
            sizes[name] = math.prod(extent for extent in shape if isinstance(extent, int))
        if variable is not None:
            batched = [name for name, (shape, _) in shapes.items() if not all(isinstance(e, int) for e in shape)]
            self.batch = self.loops.batch(variable, max(panel, *(sizes[name] for name in batched)))
            for name in batched:
                sizes[name] = self.batch * sizes[name] if batch_first else sizes[name] * self.batch
        self._sizes = sizes
        views = {p.name: self._view(p, sizes[p.name], operands.get(p.name, "")) for p in self.parameters}
        self.halves: dict[str, Buffer] = {}
        if operands or halves:
            narrow = [p for p in self.parameters if p.name not in operands and str(p.dtype) == "bfloat16"]
            self.halves = {p.name: self._view(p, sizes[p.name], HALF) for p in narrow}
        self.bias: Buffer | None = next((views.pop(name) for name in ("bias", "bias_grad") if name in views), None)
        self.tensors: tuple[Buffer, ...] = tuple(views.values())

    def _view(self, parameter: Buffer, size: Index, dtype: str) -> Buffer:
        return self.loops.flat(parameter, quotient(size, 2) if dtype == WORD else size, dtype)

    def converted(self) -> KernelFrame:
        """The same frame for loops that convert operands: those of bfloat16 are viewed as HALF, others as they are."""
        other = copy(self)
        *operands, result = (p for p in self.parameters if p.name not in ("bias", "bias_grad"))
        halves = _halves({p.name: (p.shape, str(p.dtype)) for p in operands})
        other.tensors = tuple(self._view(p, self._sizes[p.name], halves.get(p.name, "")) for p in (*operands, result))
        return other

    def numbers(self, name: str, buffer: Buffer, dtype: str, machine: Machine) -> Numbers:
        """A result or bias, by the parameter's name and its flat view, as numbers of the type of sums."""
        return Numbers(self.loops, buffer, dtype, machine, self.halves.get(name))

    def gradient(self, name: str, buffer: Buffer, dtype: str, machine: Machine, *, adds: bool) -> GradientStore:
        """The store of a gradient of W or of the bias, by the parameter's name and its flat view."""
        return GradientStore(self.loops, buffer, dtype, adds, machine, self.halves.get(name))

    def finish(self, name: str) -> PrimFunc:
        """The PrimFunc of everything that was emitted."""
        return self.loops.finish(self.parameters, name)


def conv_frame(
    spec: ConvSpec, shapes: Shapes, epilogue: Epilogue, panel: int = 0, *, halves: bool = False
) -> KernelFrame:
    """The frame (source, weight, [bias,] result) of forward or dgrad.

    Args:
        spec: its batch is what the kernel is planned for.
        shapes: of "source", "weight" and "result".
        panel: see `KernelFrame`.
        halves: whether tensors of bfloat16 are viewed as HALF.
    """
    bias = {"bias": ((spec.groups * spec.result_channels,), spec.result.dtype)} if epilogue.bias else {}
    operands = {name: shapes[name] for name in ("source", "weight")}
    every = {**operands, **bias, "result": shapes["result"]}
    views = _halves(operands) if halves else {}
    if spec.pairs is not None:
        views = {"source": HALF if spec.pairs.source else WORD, "weight": HALF if spec.pairs.weight else WORD}
    return KernelFrame(every, epilogue, spec.batch, panel, operands=views, halves=halves)


def wgrad_frame(
    problem: ConvProblem, batch: int, epilogue: Epilogue, *, halves: bool = False, dtype: str = "bfloat16"
) -> KernelFrame:
    """The frame (grad, data, weight's gradient[, bias gradient]) of wgrad, planned for a batch.

    With `halves` operands of type `dtype` and results of bfloat16 are viewed as HALF.
    """
    shapes = {name: problem.tensors[name] for name in ("grad", "data", "weight")}
    if epilogue.bias_grad:
        shapes["bias_grad"] = ((problem.out_channels,), shapes["weight"][1])
    views = _halves({name: shapes[name] for name in ("grad", "data")}, dtype) if halves else {}
    return KernelFrame(shapes, epilogue, batch, batch_first=True, operands=views, halves=halves)


def _halves(operands: Shapes, dtype: str = "bfloat16") -> Mapping[str, str]:
    """The views of operands of a type, as HALF."""
    return {name: HALF for name, (_, own) in operands.items() if own == dtype}


__all__ = ["KernelFrame", "conv_frame", "wgrad_frame"]
