# SPDX-License-Identifier: Apache-2.0
"""Splitting the text form of Relay into tokens; comments are dropped, but for those that give a type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tvm_convgrad.core.errors import ModelError


class Token(NamedTuple):
    """One token: its kind, its text (of a string: what it holds), and the line that it stands in."""

    kind: str
    text: str
    line: int


_TYPE = re.compile(r"\s*ty=")
_PATTERN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|\#[^\[][^\n]*)
  | (?P<comment>/\*(?:[^*]|\*(?!/))*\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<local>%[A-Za-z_]\w*(?:\.\w+)*)
  | (?P<graph>%[0-9]+)
  | (?P<global>@[A-Za-z_][\w.]*)
  | (?P<number>(?:-?(?:inf|nan)f(?:16|32|64)?
      |(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?:[iuf](?:8|16|32|64)|f)?)\b)
  | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
  | (?P<sign>\#\[|->|=>|:=|==|!=|<=|>=|[-+*/<>(){}\[\],;:=.?!^])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def tokens(text: str, source: str) -> Iterator[Token]:
    """The tokens of a text, ended by one of the kind "end". A comment `/* ty=T */` becomes "[ty", T, "ty]".

    Raises:
        ModelError: there is a character that starts no token.
    """
    line = 1
    yield from _tokens(text, source, line)
    yield Token("end", "", text.count("\n") + 1)


def _tokens(text: str, source: str, line: int) -> Iterator[Token]:
    at = 0
    while at < len(text):
        match = _PATTERN.match(text, at)
        if match is None:
            raise ModelError(f"{source}, line {line}: {text[at : at + 20]!r} is nothing that Relay's text form has.")
        at = match.end()
        kind, found = str(match.lastgroup), match.group()
        if kind == "comment":
            inside = _TYPE.match(found, 2)
            if inside is not None and "/*" not in found[2:]:
                yield Token("ty", "[", line)
                yield from _tokens(found[inside.end() : -2], source, line)
                yield Token("ty", "]", line)
        elif kind == "string":
            yield Token(kind, _ESCAPE.sub(lambda m: _ESCAPES.get(m.group(1), m.group(1)), found[1:-1]), line)
        elif kind != "space":
            yield Token(kind, found, line)
        line += found.count("\n")
