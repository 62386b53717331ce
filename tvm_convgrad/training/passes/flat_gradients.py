# SPDX-License-Identifier: Apache-2.0
"""All gradients of a split step in one buffer: the kernels that compute them write to their places in it.

The function `gradients` comes as one that returns a tuple of gradients, and becomes one that returns the buffer.
Nothing is copied but a gradient that no kernel of its own computes: that of an unused parameter, zero, or one that two
parameters share.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx

from tvm_convgrad.core.flat import FlatEntry, FlatLayout
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name, static_shape
from tvm_convgrad.training.ir.views import is_reshape, owners

GRADIENTS = "gradients"

_PLACE = 2
"""Which result of the function the gradients are: after the loss and the predictions."""


def GradientsInOneBuffer() -> tvm.transform.Pass:
    """The pass that gives `gradients` one buffer in place of its tuple; it runs after fusion and ordering."""
    return tvm.transform.module_pass(_in_one_buffer, opt_level=0, name="ConvgradFlatGradients")


def _in_one_buffer(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    for variable, function in module.functions_items():
        if str(variable.name_hint) == GRADIENTS and isinstance(function, relax.Function):
            types = getattr(function.ret_ty, "fields", ())
            if len(types) > _PLACE and isinstance(types[_PLACE], relax.TupleType):
                builder = relax.BlockBuilder(module)
                changed = _Flat(builder, module, function).apply()
                builder.update_func(variable, changed)
                return builder.get()
    return module


class _Flat:
    """The function with its bindings made again.

    Attributes:
        roots: for the variable whose memory a gradient is, the gradient's place in the buffer.
        copied: gradients that are copied to their places at the end.
    """

    def __init__(self, builder: relax.BlockBuilder, module: tvm.IRModule, function: relax.Function) -> None:
        self.builder, self.module, self.function = builder, module, function
        self.values = {binding.var: binding.value for binding in bindings_of(function)}
        result = self._resolved(function.body.body)
        self.results = [
            self._resolved(field) if number == _PLACE else field for number, field in enumerate(result.fields)
        ]
        gradients = list(self.results[_PLACE].fields)
        self.layout = FlatLayout.of(("", tuple(map(int, static_shape(each)))) for each in gradients)
        owner = owners(module, function)
        self.roots: dict[Any, FlatEntry] = {}
        self.copied: list[tuple[Any, FlatEntry]] = []
        for gradient, entry in zip(gradients, self.layout.entries, strict=True):
            root = owner.get(gradient, gradient)
            if root not in self.roots and self._is_own(root):
                self.roots[root] = entry
            else:
                self.copied.append((gradient, entry))
        self.bindings: list[relax.Binding] = []

    def _resolved(self, expr: relax.Expr) -> relax.Expr:
        while isinstance(expr, relax.Var) and expr in self.values:
            expr = self.values[expr]
        return expr

    def _is_own(self, root: relax.Expr) -> bool:
        """Whether a kernel computes a variable in memory of its own, which may as well be a part of the buffer."""
        value = self.values.get(root) if isinstance(root, relax.Var) else None
        if isinstance(value, relax.TupleGetItem):
            value = self.values.get(value.tuple_value)
        if not isinstance(value, tvm.ir.Call) or operator_name(value) != "relax.call_tir" or len(value.args) != 2:
            return False
        return element_type(root) == "float32" and not is_reshape(self.module[value.args[0]])

    def apply(self) -> relax.Function:
        """The function that returns the buffer."""
        function = self.function
        self.buffer = self._bound(
            relax.op.call_tir(
                self.builder.add_func(_zero_between(self.layout), "zero_between"),
                [],
                relax.TensorType((self.layout.size,), "float32"),
            ),
            GRADIENTS,
        )
        several: dict[Any, dict[int, FlatEntry]] = {}
        for root, entry in self.roots.items():
            value = self.values[root]
            if isinstance(value, relax.TupleGetItem):
                several.setdefault(value.tuple_value, {})[int(value.index)] = entry
        block = function.body.blocks[0]
        for binding in block.bindings:
            var = binding.var
            if var in several:
                value = self._with_places(binding.value, var, several[var])
            elif var in self.roots and not isinstance(binding.value, relax.TupleGetItem):
                value = self._with_places(binding.value, var, {0: self.roots[var]})
            else:
                value = binding.value
            self.bindings.append(binding if value is binding.value else relax.VarBinding(var, value))
        for gradient, entry in self.copied:
            place = self._place(gradient.ty, entry)
            copy = self.builder.add_func(_copy(entry.shape, element_type(gradient)), "copy_gradient")
            self._bound(relax.op.call_tir_inplace(copy, [gradient, place], [1], [place.ty]), "copied")
        fields = [self.buffer if number == _PLACE else field for number, field in enumerate(self.results)]
        output = relax.Tuple(fields)
        result = relax.Var("results", output.ty)
        self.bindings.append(relax.VarBinding(result, output))
        body = relax.SeqExpr([type(block)(self.bindings)], result)
        return relax.Function(function.params, body, output.ty, function.is_pure, function.attrs)

    def _with_places(self, call: relax.Call, var: relax.Var, places: dict[int, FlatEntry]) -> relax.Call:
        """The call that stores some of its results in their places, the others in new memory."""
        types = list(var.ty.fields) if isinstance(var.ty, relax.TupleType) else [var.ty]
        operands = list(call.args[1].fields)
        given = [
            self._place(type_, places[number]) if number in places else self._memory(type_)
            for number, type_ in enumerate(types)
        ]
        numbers = [len(operands) + number for number in range(len(given))]
        return relax.op.call_tir_inplace(call.args[0], [*operands, *given], numbers, types)

    def _place(self, type_: relax.TensorType, entry: FlatEntry) -> relax.Var:
        """A part of the buffer as a tensor of this type; its data begins at the address that the tensor has."""
        extents = [int(extent) for extent in type_.shape.values]
        view = self._bound(relax.op.memory.view(self.buffer, extents, "float32", entry.offset * 4), "place")
        return self._bound(relax.op.memory.ensure_zero_offset(view), "place")

    def _memory(self, type_: relax.TensorType) -> relax.Var:
        """A tensor that nothing has been stored in."""
        extents = tuple(int(extent) for extent in type_.shape.values)
        function = self.builder.add_func(_nothing(extents, str(type_.dtype)), "new_memory")
        return self._bound(relax.op.call_tir(function, [], type_), "memory")

    def _bound(self, value: relax.Expr, name: str) -> relax.Var:
        value = self.builder.normalize(value)
        var = relax.DataflowVar(name, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var


def _scheduled(buffer: tirx.Buffer, body: tirx.Stmt) -> tirx.PrimFunc:
    return tirx.PrimFunc([buffer], body).with_attr({"tirx.is_scheduled": True})


def _zero_between(layout: FlatLayout) -> tirx.PrimFunc:
    """A function that sets to zero what lies between the gradients in a buffer."""
    buffer = tirx.decl_buffer((layout.size,), "float32", name="gradients")
    ends = [entry.offset for entry in layout.entries[1:]] + [layout.size]
    loops: list[tirx.Stmt] = []
    for entry, end in zip(layout.entries, ends, strict=True):
        begin = entry.offset + entry.size
        if begin < end:
            place = tirx.Var("i", "int64")
            store = tirx.BufferStore(buffer, tirx.FloatImm("float32", 0.0), [place + begin])
            loops.append(tirx.For(place, tirx.IntImm("int64", 0), tirx.IntImm("int64", end - begin), 0, store))
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    return _scheduled(buffer, tirx.SeqStmt(loops) if len(loops) > 1 else loops[0] if loops else nothing)


def _nothing(extents: tuple[int, ...], dtype: str) -> tirx.PrimFunc:
    """A function that leaves its result as it is."""
    return _scheduled(tirx.decl_buffer(extents, dtype, name="memory"), tirx.Evaluate(tirx.IntImm("int32", 0)))


def _copy(extents: tuple[int, ...], dtype: str) -> tirx.PrimFunc:
    """result = x."""
    given = te.placeholder(extents, dtype, name="x")
    return te.create_prim_func([given, te.compute(extents, lambda *place: given(*place), name="result")]).without_attr(
        "global_symbol"
    )


__all__ = ["GRADIENTS", "GradientsInOneBuffer"]
