# SPDX-License-Identifier: Apache-2.0
"""Relay programs from their text form (mod.astext(), str(mod)), with or without version header and metadata.

Sequences of lets and graph bindings are read in a loop; what nests otherwise (parentheses, blocks, types) is limited
to `MAX_DEPTH`. Constants and attributes of the metadata are those of its JSON; without it a constant is a reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import program as ir
from tvm_convgrad.importer.json_graph import Graph
from tvm_convgrad.importer.json_nodes import relay_graph
from tvm_convgrad.importer.tensors import numpy_dtype
from tvm_convgrad.importer.text_lexer import Token, tokens

MAX_DEPTH = 60
MAX_INDEX = 1 << 20
_METADATA = re.compile(r"^(?:#\[metadata\]|METADATA:)\s*$", re.MULTILINE)
_NUMBER = re.compile(r"(.*?)(?:([iuf])(8|16|32|64)|(f))?")
_BINARY = (
    {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"},
    {"+": "add", "-": "subtract"},
    {"*": "multiply", "/": "divide"},
)
_KEYWORDS = {"True": True, "False": False, "None": None}


def parse_text(text: str, source: str) -> ir.Program:
    """The program of a text: of a module, or of one function or expression `fn (…) {…}`, which is called main.

    Raises:
        ModelError: the text is not a program of Relay; the line is named.
    """
    parts = _METADATA.split(text, maxsplit=1)
    metadata = relay_graph(parts[1], f"{source}: metadata") if len(parts) == 2 and parts[1].strip() else None
    return _Parser(parts[0], metadata, source).program()


class _Parser:
    def __init__(self, text: str, metadata: Graph | None, source: str) -> None:
        self.source, self.metadata = source, metadata
        self.tokens = list(tokens(text, source))
        self.at = 0
        self.depth = 0
        self.scopes: list[dict[str, ir.Expr]] = [{}]
        self.version = ""
        self._meta: Any = None

    # Reading tokens

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.source}, line {self.tokens[self.at].line}: {what}.")

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def next(self) -> Token:
        token = self.peek()
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def accept(self, text: str, kind: str = "sign") -> bool:
        token = self.peek()
        if token.kind != kind or token.text != text:
            return False
        self.next()
        return True

    def expect(self, text: str, kind: str = "sign") -> None:
        if not self.accept(text, kind):
            raise self.fail(f"{text!r} is expected, not {self.peek().text[:40]!r}")

    def take(self, kind: str) -> str:
        if self.peek().kind != kind:
            raise self.fail(f"a {kind} name is expected, not {self.peek().text[:40]!r}")
        return self.next().text

    @contextmanager
    def nested(self) -> Iterator[None]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail(f"expressions nest deeper than {MAX_DEPTH}; import the JSON of tvm.ir.save_json instead")
        yield
        self.depth -= 1

    # Modules

    def program(self) -> ir.Program:
        functions: dict[str, ir.Function] = {}
        if self.accept("#["):
            self.take("name")
            self.expect("=")
            self.version = f"text {self.take('string')}"
            self.expect("]")
        elif self.peek().kind == "name" and re.fullmatch(r"v[0-9]+", self.peek().text):
            self.version = "text "
            while self.peek().kind in ("name", "number", "sign") and self.peek().text not in ("fn", "def", "let", "{"):
                self.version += self.next().text.lstrip("v")
        while self.peek().kind != "end":
            if self.accept("def", "name"):
                name = self.take("global")[1:]
                if name in functions:
                    raise self.fail(f"function @{name} is defined twice")
                functions[name] = self.function()
            elif self.peek().text in ("type", "extern"):
                raise self.fail("algebraic data types are not imported; remove the prelude from the module")
            elif not functions:
                functions["main"] = self.single()
            else:
                raise self.fail(f"a function is expected, not {self.peek().text[:40]!r}")
        return ir.Program(functions, self.version, self.source)

    def single(self) -> ir.Function:
        """A text that is one expression: a function, or the body of one without parameters."""
        expr = self.sequence(("end",))
        return expr if isinstance(expr, ir.Function) else ir.Function((), expr)

    def function(self) -> ir.Function:
        with self.nested():
            self.expect("(")
            self.scopes.append({})
            params: list[ir.Var] = []
            attributes: dict[str, Any] = {}
            while not self.accept(")"):
                if self.peek().kind == "local":
                    params.append(self.binder())
                else:
                    name = self.take("name")
                    self.expect("=")
                    attributes[name] = self.attribute()
                if not self.accept(","):
                    self.expect(")")
                    break
            if self.accept("->"):
                self.type()
            body = self.block()
            self.scopes.pop()
            return ir.Function(tuple(params), body, attributes)

    def binder(self) -> ir.Var:
        """`%name: type`, which comes into scope."""
        name = self.take("local")
        annotated = self.type() if self.accept(":") else None
        commented = self.type_comment()
        var = ir.Var(name[1:], annotated or commented)
        self.scopes[-1][name] = var
        return var

    def block(self) -> ir.Expr:
        self.expect("{")
        self.scopes.append({})
        body = self.sequence(("}",))
        self.scopes.pop()
        self.expect("}")
        return body

    def sequence(self, ends: tuple[str, ...]) -> ir.Expr:
        """Bindings, then an expression. Lets may follow one another without end: they are nested afterwards.

        `ends` are the tokens that may follow; none where the sequence is itself the value of a binding.
        """
        lets: list[tuple[ir.Var, ir.Expr]] = []
        while True:
            if self.accept("let", "name"):
                name = self.take("local")
                annotated = self.type() if self.accept(":") else None
                commented = self.type_comment()
                var = ir.Var(name[1:], annotated or commented)
                self.expect("=")
                is_function = self.peek().text == "fn"
                if is_function:
                    self.scopes[-1][name] = var
                value = self.expression()
                self.scopes[-1][name] = var
                self.expect(";")
                lets.append((var, value))
            elif self.peek().kind == "graph" and self.peek(1).text == "=":
                name = self.next().text
                self.next()
                value = self.expression()
                self.scopes[-1][name] = value
                self.expect(";")
            else:
                break
        body = self.expression()
        if ends and self.accept(";"):
            raise self.fail("a value is computed and dropped; only lets and graph bindings may precede a result")
        if ends and self.peek().text not in ends and self.peek().kind not in ends:
            raise self.fail(f"{ends[0]!r} is expected, not {self.peek().text[:40]!r}")
        for var, value in reversed(lets):
            body = ir.Let(var, value, body)
        return body

    # Types

    def type_comment(self) -> ir.Type | None:
        if not self.accept("[", "ty"):
            return None
        found = self.type()
        while not self.accept("]", "ty"):
            self.next()
            if self.peek().kind == "end":
                raise self.fail("a type comment does not end")
        return found

    def type(self) -> ir.Type:
        with self.nested():
            token = self.next()
            if token.text == "(":
                fields: list[ir.Type | None] = []
                while not self.accept(")"):
                    fields.append(self.type())
                    if not self.accept(","):
                        self.expect(")")
                        break
                return ir.TupleType(tuple(fields))
            if token.text == "Tensor":
                return self.tensor_type()
            if token.text == "fn":
                self.expect("(")
                while not self.accept(")"):
                    self.type()
                    self.accept(",")
                self.expect("->")
                self.type()
                return ir.OtherType("FuncType")
            if token.text in ("ref", "Ref"):
                self.expect("(")
                self.type()
                self.expect(")")
                return ir.OtherType("RefType")
            if token.kind == "name":
                return ir.TensorType((), token.text)
            raise self.fail(f"{token.text[:40]!r} is not a type")

    def tensor_type(self) -> ir.Type:
        self.expect("[")
        self.expect("(")
        shape: list[int | None] = []
        while not self.accept(")"):
            token = self.next()
            if token.text == "?":
                shape.append(None)
            elif token.kind == "number" and token.text.isdecimal() and len(token.text) < 20:
                shape.append(int(token.text))
            else:
                raise self.fail(f"{token.text[:40]!r} is not an extent")
            if not self.accept(","):
                self.expect(")")
                break
        self.expect(",")
        dtype = self.take("name")
        self.expect("]")
        return ir.TensorType(tuple(shape), dtype)

    # Expressions

    def expression(self, level: int = 0) -> ir.Expr:
        if level == len(_BINARY):
            return self.postfix()
        left = self.expression(level + 1)
        while self.peek().kind == "sign" and self.peek().text in _BINARY[level]:
            name = _BINARY[level][self.next().text]
            left = ir.Call(name, (left, self.expression(level + 1)), type=self.type_comment())
        return left

    def postfix(self) -> ir.Expr:
        with self.nested():
            expr = self.atom()
        while True:
            if self.peek().text == "(" and self.peek().kind == "sign":
                expr = self.call(expr)
            elif self.peek().text == "." and self.peek(1).kind == "number":
                self.next()
                for part in self.next().text.rstrip(".").split("."):  # ".1.0" is lexed as "." and "1.0"
                    expr = ir.Field(expr, self.small(part))
            elif (
                self.peek().kind == "number" and self.peek().text.startswith(".") and not isinstance(expr, ir.Constant)
            ):
                expr = ir.Field(expr, self.small(self.next().text[1:]))
            elif self.accept("^"):
                expr = ir.RefRead(expr)
            elif self.accept(":="):
                expr = ir.RefWrite(expr, self.expression())
            elif self.peek() == Token("ty", "[", self.peek().line):
                found = self.type_comment()
                if isinstance(expr, ir.Constant) and expr.value is None:
                    expr = ir.Constant(None, found, expr.name)
            else:
                return expr

    def small(self, text: str) -> int:
        if not text.isdecimal() or len(text) > 7:
            raise self.fail(f"{text[:40]!r} is not an index")
        return int(text)

    def atom(self) -> ir.Expr:
        token = self.peek()
        if token.kind in ("graph", "local"):
            return self.variable(self.next().text)
        if token.kind == "global":
            return ir.GlobalRef(self.next().text[1:])
        if token.kind == "number" or token.text == "-":
            return self.scalar()
        if token.text == "(":
            return self.parenthesis()
        if token.text == "{":
            return self.block()
        if token.kind != "name":
            raise self.fail(f"an expression is expected, not {token.text[:40]!r}")
        if token.text == "let":
            return self.sequence(())
        self.next()
        match token.text:
            case "True" | "False":
                return ir.Constant(np.array(token.text == "True"))
            case "fn":
                return self.function()
            case "if":
                self.expect("(")
                condition = self.expression()
                self.expect(")")
                then = self.block()
                self.expect("else", "name")
                return ir.If(condition, then, self.block())
            case "meta":
                return self.meta_expression()
            case "ref":
                return ir.RefCreate(*self.operands(token.text, 1))
            case "ref_read":
                return ir.RefRead(*self.operands(token.text, 1))
            case "ref_write":
                return ir.RefWrite(*self.operands(token.text, 2))
            case "match" | "match?":
                raise self.fail("Match is not imported: only programs without pattern matching are")
        return ir.Operator(token.text)

    def operands(self, name: str, count: int) -> tuple[ir.Expr, ...]:
        """What stands in the parentheses behind ref, ref_read and ref_write."""
        found = self.call(ir.Operator(name)).args
        if len(found) != count:
            raise self.fail(f"{name} takes {count} operands, but {len(found)} are given")
        return found

    def variable(self, name: str) -> ir.Expr:
        """A variable; `%x.0` is a field of %x, unless there is a variable of that very name."""
        fields: list[str] = []
        while True:
            for scope in reversed(self.scopes):
                if name in scope:
                    expr = scope[name]
                    for part in reversed(fields):
                        expr = ir.Field(expr, self.small(part))
                    return expr
            name, dot, last = name.rpartition(".")
            if not dot or not last.isdecimal():
                raise self.fail(f"nothing is called {name + dot + last!r} here")
            fields.append(last)

    def scalar(self) -> ir.Constant:
        value = self.number()
        return ir.Constant(value)

    def number(self) -> ir.Array:
        negative = self.accept("-")
        text = self.take("number")
        if text.startswith("-"):
            negative, text = not negative, text[1:]
        found = _NUMBER.fullmatch(text)
        digits, kind, bits, plain = found.groups() if found else (text, None, None, None)
        if kind is not None:
            dtype = {"i": "int", "u": "uint", "f": "float"}[kind] + str(bits)
        else:
            dtype = "float32" if plain or not digits.isdecimal() else "int32"
        try:
            number = float(digits) if dtype.startswith("float") else int(digits)
            return np.array(-number if negative else number, numpy_dtype(dtype))
        except (ValueError, OverflowError) as error:
            raise self.fail(f"{text[:40]!r} is not a number") from error

    def parenthesis(self) -> ir.Expr:
        self.expect("(")
        fields: list[ir.Expr] = []
        comma = False
        while not self.accept(")"):
            fields.append(self.sequence((",", ")")))
            comma = self.accept(",")
            if not comma:
                self.expect(")")
                break
        return fields[0] if len(fields) == 1 and not comma else ir.Tuple(tuple(fields))

    def call(self, callee: ir.Expr) -> ir.Call:
        self.expect("(")
        args: list[ir.Expr] = []
        attributes: dict[str, Any] = {}
        given: ir.Attributes | None = None
        while not self.accept(")"):
            if self.peek().kind == "name" and self.peek(1).text == "=" and self.peek(1).kind == "sign":
                name = self.next().text
                self.next()
                attributes[name] = self.attribute()
            elif self.peek().text == "meta" and not self.peek(2).text.startswith("relay.Constant"):
                given = self.meta_attributes()
            else:
                args.append(self.expression())
            if not self.accept(","):
                self.expect(")")
                break
        type_ = self.type_comment()
        op = callee.name if isinstance(callee, ir.Operator) else callee
        return ir.Call(op, tuple(args), given or ir.Attributes("", attributes), type_)

    # Attributes and metadata

    def attribute(self) -> Any:
        with self.nested():
            token = self.peek()
            if token.text in ("[", "(") and token.kind == "sign":
                close = {"[": "]", "(": ")"}[self.next().text]
                items: list[Any] = []
                while not self.accept(close):
                    items.append(self.attribute())
                    if not self.accept(","):
                        self.expect(close)
                        break
                return tuple(items)
            if token.kind == "string":
                return self.next().text
            if token.kind == "name" and token.text in _KEYWORDS:
                return _KEYWORDS[self.next().text]
            if token.kind == "name" and token.text != "meta":
                return self.next().text
            if token.kind == "number" or token.text == "-":
                return self.number().item()
            if token.text == "meta":
                return self.meta_expression()
            if token.text == "?":
                self.next()
                return None
            if token.kind in ("graph", "local"):
                return self.expression()
            raise self.fail(f"{token.text[:40]!r} is not an attribute")

    def meta(self) -> tuple[str, int]:
        """`[kind][index]` behind the word meta."""
        self.expect("[")
        kind = self.take("name")
        self.expect("]")
        self.expect("[")
        index = self.small(self.take("number"))
        self.expect("]")
        return kind, index

    def lookup(self, kind: str, index: int) -> Any:
        if self.metadata is None:
            return None
        if self._meta is None:
            self._meta = self.metadata.build(self.metadata.root)
        items = self._meta.get(kind) if isinstance(self._meta, dict) else None
        if not isinstance(items, tuple) or index >= len(items):
            raise self.fail(f"the metadata has no meta[{kind}][{index}]")
        return items[index]

    def meta_expression(self) -> ir.Expr:
        kind, index = self.meta()
        name = f"meta[{kind}][{index}]"
        if kind != "relay.Constant":
            raise self.fail(f"{name} stands where an expression is expected")
        found = self.lookup(kind, index)
        if found is None:
            return ir.Constant(None, None, name)
        if not isinstance(found, ir.Constant):
            raise self.fail(f"{name} is not a constant")
        return found

    def meta_attributes(self) -> ir.Attributes:
        self.next()
        kind, index = self.meta()
        name = f"meta[{kind}][{index}]"
        found = self.lookup(kind, index)
        if found is None:
            return ir.Attributes("", {}, f"{name} is in the metadata, which this text lacks")
        if not isinstance(found, ir.Attributes):
            raise self.fail(f"{name} holds no attributes")
        return found
