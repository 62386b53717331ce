# SPDX-License-Identifier: Apache-2.0
"""What a model format is, and which there are: every `FORMAT` of a module in the folder `formats`. Loads no TVM."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tvm_convgrad.core.errors import ModelError, SetupError
from tvm_convgrad.training.frontends import formats

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.outputs import Outputs
    from tvm_convgrad.training.model.own_loss import OwnLoss
    from tvm_convgrad.training.model.program import TrainingProgram

Batch = int | Literal["dynamic"] | None


@dataclass(frozen=True)
class Request:
    """What `load_model` is to read; its arguments have the meaning that they have there.

    Attributes:
        path: an existing file.
        function: the name behind the colon, for formats that take one, else "".
    """

    path: Path
    function: str = ""
    batch: Batch = None
    params: Path | None = None
    outputs: Outputs | OwnLoss | None = None


def _is_of_any(_path: Path) -> bool:
    return True


@dataclass(frozen=True)
class Format:
    """A kind of model file.

    Attributes:
        name: for messages and lists.
        suffixes: the endings of its files, in lower case, the usual one first.
        load: reads a file, and raises ModelError where it cannot.
        is_of: whether a file with one of the suffixes is of this format; if not, other formats are tried.
        package: the optional package that reads it, also the name of the extra that installs it; "" for none.
        takes_params: whether values of parameters come in a file of their own.
        takes_function: whether the path has `:function` behind it.
    """

    name: str
    suffixes: tuple[str, ...]
    load: Callable[[Request], Model | TrainingProgram]
    is_of: Callable[[Path], bool] = _is_of_any
    package: str = ""
    takes_params: bool = False
    takes_function: bool = False

    @property
    def shown(self) -> str:
        """How a path of this format looks, such as `.onnx` or `file.py:function`."""
        return f"file{self.suffixes[0]}:function" if self.takes_function else self.suffixes[0]

    def check_package(self, path: str) -> None:
        """Refuse to read a file without the package that reads it.

        Raises:
            SetupError: the package is not installed.
        """
        if self.package and importlib.util.find_spec(self.package) is None:
            raise SetupError(
                f"Reading {path} needs the package {self.package}, which is not installed; pip install "
                f"'tvm-convgrad[{self.package}]'."
            )


def all_formats() -> list[Format]:
    """The formats, those with a predicate `is_of` first."""
    modules = pkgutil.iter_modules(formats.__path__, f"{formats.__name__}.")
    found = [importlib.import_module(module.name).FORMAT for module in modules]
    return sorted(found, key=lambda each: (each.is_of is _is_of_any, each.name))


def shown_formats() -> str:
    """The paths that are models, in words: `.onnx, .pt2 or file.py:function`."""
    *others, last = sorted((each.shown for each in all_formats()), key=lambda shown: (":" in shown, shown))
    return f"{', '.join(others)} or {last}"


def require_file(path: str | Path, noun: str = "the model") -> Path:
    """The path, if a file that can be read is there; `noun` is what it has.

    Raises:
        ModelError: it is missing, or is a folder.
    """
    found = Path(path)
    if not found.is_file():
        what = "is a folder, not a file" if found.is_dir() else "does not exist"
        raise ModelError(f"{path} {what}; check the path of {noun}.")
    return found
