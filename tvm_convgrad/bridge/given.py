# SPDX-License-Identifier: Apache-2.0
"""Checks of what `enable` and `patch` are given: flags, numbers of bytes, folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from tvm_convgrad.core.errors import DTypeError, ProblemError


def flag(name: str, value: object) -> bool:
    """A flag. Of other types true and false are not taken: "no" would be true.

    Raises:
        DTypeError: it is not a bool.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise DTypeError(f"{name} is {value!r}, a {type(value).__name__}; give True or False")


def byte_count(name: str, value: object) -> int:
    """A number of bytes.

    Raises:
        DTypeError: it is not an integer.
        ProblemError: it is negative, or more than a process can address.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
        raise DTypeError(f"{name} is {value!r}, a {type(value).__name__}; give a number of bytes as an int, or 0")
    count = value.__index__()
    if not 0 <= count <= sys.maxsize:
        raise ProblemError(f"{name} is {count}; give bytes from 0 to {sys.maxsize}")
    return count


def store_folder(name: str, value: object) -> Path | None:
    """The folder of a store, from the root: the process may change its folder later. None is the default one.

    Raises:
        DTypeError: it is not a path.
        ProblemError: it is empty, or has a character that no path has.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise DTypeError(f"{name} is {value!r}, a {type(value).__name__}; give a path, or None for the default folder")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ProblemError(f"{name} is {text!r}; give the path of a folder, or None for the default one")
    return Path(text).absolute()


__all__ = ["byte_count", "flag", "store_folder"]
