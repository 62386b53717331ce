# SPDX-License-Identifier: Apache-2.0
"""The code of a step for TVM's virtual machine: a list of calls with numbered registers, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tvm_convgrad.core.errors import UnsupportedError

_CALL = re.compile(r"^ +call +(\S+) +in: *(.*?) +dst: (\S+)$")
_BUILTIN = re.compile(r"vm\.builtin\.|convgrad_entry|shape_func")
"""Calls of the virtual machine's own functions, and those that check arguments or compute extents."""
_NUMBER = re.compile(r"(?<=[a-z_])\d+(?=_|$)")  # no conv2d
_HASH = re.compile(r"_*[0-9a-f]{16}$")


class VmCall(NamedTuple):
    """A call of the virtual machine.

    Attributes:
        name: of the function, with the hash of its code.
        arguments: registers "%N", constants "c[N]" and numbers "iN".
        result: a register, or "%void".
    """

    name: str
    arguments: tuple[str, ...]
    result: str


def is_kernel(name: str) -> bool:
    """Whether a function is generated code or a library's, and none of the virtual machine's own."""
    return not _BUILTIN.match(name)


def without_hash(name: str) -> str:
    """The name of a function without the hash of its code."""
    return _HASH.sub("", name)


def without_numbers(name: str) -> str:
    """The name of a kernel without the numbers of its operators: fused_add_multiply for fused_add2_multiply1."""
    return _NUMBER.sub("", name)


def step_calls(code: str) -> Iterator[VmCall]:
    """The calls of the function `step`, in their order.

    Args:
        code: what `as_text` of a TVM executable gives.

    Raises:
        UnsupportedError: the step has branches, or the text is not in the form of TVM 0.26 and 0.27.
    """
    _, found, rest = code.partition("@step:\n")
    if not found:
        raise unknown_form("there is no function step")
    for line in rest.partition("\n@")[0].splitlines():
        match = _CALL.match(line)
        if match is None and re.match(r" +(if|goto) ", line):
            raise UnsupportedError("the step has branches, so that what it does follows at run time")
        if match is None:
            continue
        name, arguments, result = match.groups()
        if f"\n@{name}:" in code:
            raise unknown_form(f"the step calls {name}, which is not a kernel")
        yield VmCall(name, tuple(each.strip() for each in arguments.split(",")), result)


def constants_of(statistics: str) -> list[str]:
    """The constants of an executable as TVM writes them; some are texts with quotes inside of parentheses.

    Raises:
        UnsupportedError: there are not as many as it says.
    """
    statistics = statistics.replace("shapetupl]", "shapetuple[]")  # TVM overwrites the end of an empty shape
    head = re.search(r"Constant pool \(# (\d+)\): \[", statistics)
    if head is None:
        raise unknown_form("there is no pool of constants")
    found, start, depth, quoted = [], head.end(), 0, False
    for place in range(head.end(), len(statistics)):
        letter = statistics[place]
        if letter == '"' and depth == 0:
            quoted = not quoted
        elif letter == "(" or (letter == "[" and not quoted):
            depth += 1
        elif depth and (letter == ")" or (letter == "]" and not quoted)):
            depth -= 1
        elif depth == 0 and not quoted and letter in ",]":
            found.append(statistics[start:place].strip())
            start = place + 1
            if letter == "]":
                break
    if len(found) != int(head[1]):
        raise unknown_form(f"{len(found)} constants are found where it says {head[1]}")
    return found


def unknown_form(what: str) -> UnsupportedError:
    """The error of a text that is not understood."""
    return UnsupportedError(f"TVM's executable is written in an unknown form: {what}; use TVM 0.26 or 0.27")


__all__ = ["VmCall", "constants_of", "is_kernel", "step_calls", "unknown_form", "without_hash", "without_numbers"]
