# SPDX-License-Identifier: Apache-2.0
"""Operators that copy what others view, such as `view_copy`: the names that functionalised programs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_VIEWS = (
    *("view", "permute", "expand", "squeeze", "unsqueeze", "t", "transpose", "select", "slice", "split"),
    *("split_with_sizes", "unbind", "diagonal", "unfold", "as_strided", "alias", "view_as_real", "view_as_complex"),
    *("_conj", "_neg_view"),
)


def view_copies() -> dict[Any, Callable[..., Any]]:
    """Each copying operator as the viewing one: a step has no views."""
    import torch

    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {}
    for name in _VIEWS:
        copying = getattr(aten, f"{name}_copy")
        for overload in copying.overloads():
            if not overload.endswith("out"):
                found[getattr(copying, overload)] = getattr(getattr(aten, name), overload)
    return found


__all__ = ["view_copies"]
