# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads sources: docstrings that are made by code, and our name of a section."""

from __future__ import annotations

import importlib
import inspect
import re

import griffe

MADE = ("tvm_convgrad.op",)
"""Modules whose docstrings are made for each rank."""


class Docstrings(griffe.Extension):
    """Changes docstrings before they are parsed."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Take a docstring that is made by code from the function itself."""
        module, _, name = func.path.rpartition(".")
        if module in MADE:
            text = inspect.getdoc(getattr(importlib.import_module(module), name, None))
            func.docstring = griffe.Docstring(text, parent=func) if text else None

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Call the section `Example:` as griffe does, so that its programs are shown as programs."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
