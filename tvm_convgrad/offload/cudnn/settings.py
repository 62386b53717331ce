# SPDX-License-Identifier: Apache-2.0
"""What cuDNN's engines may do in a program, from the variable CONVGRAD_CUDNN when it is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cudnn.entry import ENTRY

VARIABLE = str(ENTRY.variable)
_CHANGES: dict[str, dict[str, Any]] = {
    "nondeterministic": {"deterministic": False},
    "tf32": {"tf32": True},
    "transforms": {"transforms": True},
    "compiled": {"compiled": "all"},
    "precompiled": {"compiled": "none"},
    "cached": {"cached": True},
}
"""The words, and what each changes of the settings."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """Attributes:
    deterministic: only engines that give the same bits from call to call.
    tf32: engines may round float32 operands to tf32 (10 bits of mantissa) for tensor cores.
    transforms: engines may compute by Winograd's or Fourier's transform, whose rounding is another.
    compiled: for which convolutions engines may be those that cuDNN compiles at their first call: "none", "depthwise"
        (where they are 5 to 16 times as fast as others) or "all".
    workspace: at most so many bytes.
    cached: only engines that were tuned; a call without one is an error.
    """

    deterministic: bool = True
    tf32: bool = False
    transforms: bool = False
    compiled: Literal["none", "depthwise", "all"] = "depthwise"
    workspace: int = 1 << 30
    cached: bool = False

    @property
    def allowed(self) -> str:
        """What engines may do, in words: with other words other engines may be the best."""
        names = ("deterministic", "tf32", "transforms", "workspace")
        return ",".join([*(f"{name}={int(getattr(self, name))}" for name in names), f"compiled={self.compiled}"])

    def may_compile(self, problem: ConvProblem) -> bool:
        """Whether engines of a problem may be compiled when they are first called."""
        return self.compiled == "all" or (self.compiled == "depthwise" and problem.is_depthwise)


def settings() -> Settings:
    """Those of CONVGRAD_CUDNN: words with commas between them, of nondeterministic, tf32, transforms, compiled,
    precompiled, workspace=256MiB, cached.

    Raises:
        UnsupportedError: another word, or a size that is not a number of bytes.
    """
    return parse_settings(os.environ.get(VARIABLE, ""))


def parse_settings(text: str) -> Settings:
    """The settings that a text states; errors as `settings`."""
    found = Settings()
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        if word in _CHANGES:
            found = replace(found, **_CHANGES[word])
        elif key == "workspace" and (size := _bytes(value)) is not None:
            found = replace(found, workspace=size)
        else:
            raise UnsupportedError(
                f"{VARIABLE}={text}: {word!r} is not a setting; use {', '.join(_CHANGES)}, workspace=256MiB"
            )
    return found


def _bytes(text: str) -> int | None:
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    return int(number) * _UNITS[unit] if number.isdecimal() and unit in _UNITS else None


__all__ = ["VARIABLE", "Settings", "parse_settings", "settings"]
