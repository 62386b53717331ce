# SPDX-License-Identifier: Apache-2.0
"""From a Program to a Relax function: every function that is called is inlined, every expression computed once.

Nothing recurses in Python: each expression is evaluated by a generator, and a loop drives a stack of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import relax, tirx

from tvm_convgrad.core.errors import ConvGradError, ModelError
from tvm_convgrad.importer import program as ir
from tvm_convgrad.importer.attributes import typed
from tvm_convgrad.importer.context import MAX_ELEMENTS, Context
from tvm_convgrad.importer.lift import lifted_weight_gradient
from tvm_convgrad.importer.operators import TABLE, refuse_unknown
from tvm_convgrad.importer.program import TensorType, TupleType, Type
from tvm_convgrad.importer.references import Memory, Reference, refuse_shared
from tvm_convgrad.importer.tensors import numpy_dtype
from tvm_convgrad.training.ir.graph import function_scope

MAX_BRANCHES = 100
MAX_CALLS = 5_000
"""How deep ifs, and how deep calls may nest: Relay's gradient of higher order calls a function for each operator."""
MAX_EXTRA = 20_000
_NUMBER_ERRORS = (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError, OverflowError)
"""What TVM raises where a program is wrong; its InternalError is a RuntimeError."""

Work = Generator["Work", Any, Any]


@dataclass(frozen=True)
class Converted:
    """The module with its function `main`, and a sentence for each gradient that was recognised, with its count."""

    module: Any
    lifted: tuple[str, ...]


@dataclass(frozen=True)
class _Closure:
    function: ir.Function
    scope: _Scope
    name: str


class _Scope:
    """What has been computed, and what variables stand for, in a function body or branch; then its surroundings."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.values: dict[int, Any] = {}

    def find(self, expr: ir.Expr) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            if id(expr) in scope.values:
                return scope.values[id(expr)]
            scope = scope.parent
        return None


def convert(program: ir.Program) -> Converted:
    """The Relax module of a program's function `main`; its parameters keep their order.

    Names that occur twice are made different; an extent that is Any becomes a symbolic one of its own.

    Raises:
        ModelError: the program has no main, has operators or expressions that are not imported, or is wrong.
    """
    if "main" not in program.functions:
        names = ", ".join(sorted(program.functions)) or "no function at all"
        raise ModelError(f"{program.source} has no function main, which is imported; it has {names}.")
    refuse_unknown(program)
    refuse_shared(program)
    main = program.functions["main"]
    params = [_parameter(var, name, program.source) for var, name in zip(main.params, unique_names(main), strict=True)]
    builder = relax.BlockBuilder()
    conversion = _Conversion(program, builder)
    with function_scope(builder, "main", params):
        result = conversion.run(main, params)
        try:
            builder.emit_func_output(_expression(result))
        except _NUMBER_ERRORS as error:
            raise ModelError(f"{program.source}: the result of main is not a value ({_last_line(error)}).") from error
    module = builder.get()
    module = relax.transform.ConvertToDataflow()(module)
    module = relax.transform.DeadCodeElimination(["main"])(module)
    return Converted(module, tuple(conversion.context.lifted))


def unique_names(function: ir.Function) -> list[str]:
    """The parameters' names, where a name that came before gets a number, as Relay's text form does it."""
    taken: set[str] = set()
    given = {var.name for var in function.params}
    names = []
    for var in function.params:
        name, number = var.name or "arg", 0
        while name in taken or (number and name in given):
            number += 1
            name = f"{var.name or 'arg'}{number}"
        taken.add(name)
        names.append(name)
    return names


def _parameter(var: ir.Var, name: str, source: str) -> relax.Var:
    made = _relax_type(var.type, name, source)
    return relax.Var(name, made)


def _relax_type(declared: Type | None, name: str, source: str) -> relax.Type:
    if isinstance(declared, TensorType):
        numpy_dtype(declared.dtype)
        total = 1
        for extent in declared.shape:
            total *= 1 if extent is None else extent
        if total > MAX_ELEMENTS or len(declared.shape) > 32:
            raise ModelError(f"{source}: parameter {name!r} is {declared}, which is too large.")
        shape = [
            tirx.Var(f"{_identifier(name)}_{axis}", "int64") if extent is None else extent
            for axis, extent in enumerate(declared.shape)
        ]
        return relax.TensorType(shape, declared.dtype)
    if isinstance(declared, TupleType):
        return relax.TupleType(
            [_relax_type(field, f"{name}_{index}", source) for index, field in enumerate(declared.fields)]
        )
    kind = "has no type" if declared is None else f"is of the type {declared}"
    raise ModelError(f"{source}: parameter {name!r} {kind}; only tensors are imported, so infer types and save again.")


def _identifier(name: str) -> str:
    text = "".join(letter if letter.isalnum() else "_" for letter in name)
    return text if text[:1].isalpha() else f"n{text}"


def _expression(value: relax.Expr) -> relax.Expr:
    """A result as a Relax expression: nested lists are tuples."""
    if isinstance(value, list):
        return relax.Tuple([_expression(item) for item in value])
    if isinstance(value, _Closure):
        raise ModelError(f"function {value.name} is a value here; closures are not imported, only calls of functions")
    if isinstance(value, Reference):
        raise ModelError("a reference is a value here; only what it holds can be one, so read it with ref_read")
    return value


def _is_value(value: Any) -> bool:
    """Whether it consists of tensors only."""
    return all(map(_is_value, value)) if isinstance(value, list) else not isinstance(value, _Closure | Reference)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


class _Conversion:
    def __init__(self, program: ir.Program, builder: relax.BlockBuilder) -> None:
        self.program = program
        self.context = Context(builder)
        self.builder = builder
        self.constants: dict[int, Any] = {}
        self.budget = MAX_EXTRA + sum(1 for _ in ir.walk(program))
        self.open_blocks = 0
        self.memory = Memory()

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.program.source}: {what}.")

    def run(self, main: ir.Function, params: Sequence[relax.Var]) -> Any:
        scope = _Scope(None)
        for var, param in zip(main.params, params, strict=True):
            scope.values[id(var)] = self.spread(param)
        stack = [self.evaluate(main.body, scope)]
        value: Any = None
        try:
            while stack:
                try:
                    stack.append(stack[-1].send(value))
                    value = None
                except StopIteration as done:
                    stack.pop()
                    value = done.value
        except BaseException:
            for _ in range(self.open_blocks):
                self.builder._end_block()
            raise
        return value

    def spread(self, value: relax.Expr) -> Any:
        """A parameter that is a tuple, as a list of its fields."""
        if not isinstance(value.ty, relax.TupleType):
            return value
        count = len(value.ty.fields)
        return [self.spread(self.builder.emit(relax.TupleGetItem(value, index))) for index in range(count)]

    def evaluate(self, expr: ir.Expr, scope: _Scope) -> Work:
        """The value of an expression: a Relax tensor, a list of values, or a closure."""
        while isinstance(expr, ir.Let):
            if isinstance(expr.value, ir.Function):
                scope.values[id(expr.var)] = _Closure(expr.value, scope, f"%{expr.var.name}")
            else:
                scope.values[id(expr.var)] = yield self.evaluate(expr.value, scope)
            expr = expr.body
        found = scope.find(expr)
        if found is not None:
            return found
        self.budget -= 1
        if self.budget < 0:
            raise self.fail("inlining its functions makes the program too large")
        value = yield self.compute(expr, scope)
        scope.values[id(expr)] = value
        return value

    def compute(self, expr: ir.Expr, scope: _Scope) -> Work:
        match expr:
            case ir.Constant():
                return self.constant(expr)
            case ir.Var(name=name):
                raise self.fail(f"variable %{name} is used where nothing binds it")
            case ir.Tuple(fields=fields):
                values = []
                for field in fields:
                    values.append((yield self.evaluate(field, scope)))
                return values
            case ir.Field(value=inner, index=index):
                whole = yield self.evaluate(inner, scope)
                if not isinstance(whole, list) or not 0 <= index < len(whole):
                    raise self.fail(f"field {index} is taken of what has no such field")
                return whole[index]
            case ir.Function():
                return _Closure(expr, scope, "fn")
            case ir.GlobalRef(name=name):
                if name not in self.program.functions:
                    raise self.fail(f"there is no function @{name}")
                return _Closure(self.program.functions[name], _Scope(None), f"@{name}")
            case ir.If():
                return (yield self.branch(expr, scope))
            case ir.Call():
                return (yield self.call(expr, scope))
            case ir.Operator(name=name):
                raise self.fail(f"the operator {name} is a value here; only calls of operators are imported")
            case ir.RefCreate(value=inner):
                return self.memory.new((yield self.evaluate(inner, scope)))
            case ir.RefRead(ref=inner):
                return (yield self.reference(inner, scope, "read")).value
            case ir.RefWrite(ref=inner, value=new):
                reference = yield self.reference(inner, scope, "written to")
                self.memory.write(reference, (yield self.evaluate(new, scope)))
                return []
        raise self.fail(f"{type(expr).__name__} is not imported")

    def reference(self, expr: ir.Expr, scope: _Scope, what: str) -> Work:
        found = yield self.evaluate(expr, scope)
        if not isinstance(found, Reference):
            raise self.fail(f"something is {what} that is not a reference")
        return found

    def constant(self, expr: ir.Constant) -> relax.Expr:
        if expr.value is None:
            raise self.fail(
                f"{expr.name} is in the metadata, which this text lacks; save the program as JSON, or its text with "
                "metadata (mod.astext()), or give it as a parameter of that name"
            )
        return self.context.const(expr.value, str(expr.value.dtype))

    def branch(self, expr: ir.If, scope: _Scope) -> Work:
        """Both branches as blocks of their own: what they compute is not seen outside."""
        condition = yield self.evaluate(expr.condition, scope)
        if isinstance(condition, list | _Closure) or self.context.dtype(condition) != "bool":
            raise self.fail("the condition of an if is not a truth value")
        if self.context.shape(condition) != () or self.open_blocks >= MAX_BRANCHES:
            raise self.fail("the condition of an if is not a scalar, or ifs nest too deep")
        sides, written = [], []
        for side in (expr.then, expr.other):
            self.builder._begin_binding_block()
            self.open_blocks += 1
            self.memory.open_branch()
            value = yield self.evaluate(side, _Scope(scope))
            written.append(self.memory.close_branch())
            self.open_blocks -= 1
            sides.append((self.builder._end_block(), value))
        changed = self.changed(written)
        results = []
        for (block, value), held in zip(sides, written, strict=True):
            # What the branch writes to references comes out behind its value.
            outputs = [value, *(held.get(reference, reference.value) for reference in changed)]
            result = self.builder.normalize(_expression(outputs if changed else value))
            results.append(relax.SeqExpr([block], result))
        if not tvm_ffi.structural_equal(results[0].body.ty, results[1].body.ty):
            raise self.fail("the branches of an if have results of different types")
        found = self.spread(self.builder.emit(relax.If(condition, results[0], results[1])))
        if changed:
            found, *values = found
            for reference, value in zip(changed, values, strict=True):
                self.memory.write(reference, value)
        return found

    def changed(self, written: Sequence[dict[Reference, Any]]) -> list[Reference]:
        """The references that hold something else after an if, depending on its branch."""
        found = []
        for reference in {**written[0], **written[1]}:
            held = [side.get(reference, reference.value) for side in written]
            if held[0] is held[1]:
                self.memory.write(reference, held[0])
            elif all(map(_is_value, held)):
                found.append(reference)
            else:
                raise self.fail(
                    "the branches of an if leave different functions or references in a reference, so that what is "
                    "called later depends on the condition; write relay.where instead of the if, and take the gradient "
                    "of that"
                )
        return found

    def call(self, expr: ir.Call, scope: _Scope) -> Work:
        if isinstance(expr.op, str):
            args: list[Any] = []
            for position, arg in enumerate(expr.args):
                unread = expr.op == "collapse_sum_to" and position == 1
                if unread and isinstance(arg, ir.Constant) and arg.value is None:
                    args.append(None)  # the shape is stated elsewhere, too
                    continue
                value = yield self.evaluate(arg, scope)
                args.append(value)
            return self.operator(expr, args)
        callee = yield self.evaluate(expr.op, scope)
        if not isinstance(callee, _Closure):
            raise self.fail("something is called that is not a function")
        if callee.scope.depth > MAX_CALLS or scope.depth > MAX_CALLS:
            raise self.fail(f"functions call one another deeper than {MAX_CALLS}; {callee.name} may be recursive")
        if len(callee.function.params) != len(expr.args):
            raise self.fail(
                f"function {callee.name} takes {len(callee.function.params)} arguments, but {len(expr.args)} are given"
            )
        inner = _Scope(callee.scope)
        inner.depth = max(callee.scope.depth, scope.depth) + 1
        for var, arg in zip(callee.function.params, expr.args, strict=True):
            inner.values[id(var)] = yield self.evaluate(arg, scope)
        return (yield self.evaluate(callee.function.body, inner))

    def operator(self, expr: ir.Call, args: list[relax.Expr]) -> Any:
        """Bind one operator, and compare the result with the type that the program states."""
        name = str(expr.op)
        entry = TABLE[name]
        self.context.annotation = expr.type
        fewest, most = entry.operands
        try:
            if not fewest <= len(args) <= most:
                raise ModelError(
                    f"{len(args)} operands were given; it takes {fewest if fewest == most else entry.operands}"
                )
            if any(isinstance(arg, _Closure | Reference) for arg in args):
                raise ModelError("an operand is a function or a reference, not a tensor")
            if name not in ("concatenate", "stack") and any(isinstance(arg, list) for arg in args):
                raise ModelError("an operand is a tuple")
            attributes = typed(name, entry.attributes, expr.attributes)
            attributes.op_name = name
            value = entry.convert(self.context, args, attributes)
            replaced = (
                lifted_weight_gradient(self.context, name, value) if name in ("transpose", "strided_slice") else None
            )
            value = value if replaced is None else replaced
            self.compare(value, expr.type)
        except ConvGradError as error:
            raise self.fail(f"{name}: {str(error).removeprefix(name + ': ').rstrip('.')}") from error
        except _NUMBER_ERRORS as error:
            raise self.fail(f"{name}: TVM refuses it ({_last_line(error)})") from error
        return value

    def compare(self, value: relax.Expr, stated: Type | None) -> None:
        """The result must be of the type that Relay inferred, where that is known."""
        if isinstance(stated, TupleType) and isinstance(value, list) and len(value) == len(stated.fields):
            for item, field in zip(value, stated.fields, strict=True):
                self.compare(item, field)
            return
        if isinstance(stated, TensorType):
            if not isinstance(value, list) and self.context.dtype(value) == stated.dtype:
                have = self.context.shape(value)
                if len(have) == len(stated.shape) and all(
                    a is None or not isinstance(b, int) or a == b for a, b in zip(stated.shape, have, strict=True)
                ):
                    return
            raise ModelError(f"the result is {_described(value)}, but the program states {stated}")


def _described(value: relax.Expr) -> str:
    return "a tuple" if isinstance(value, list) else " ".join(str(value.ty).split())
