# SPDX-License-Identifier: Apache-2.0
"""What clients and server exchange: parameters and running statistics, as numpy arrays in the order of the state."""

from __future__ import annotations

import numpy as np

from tvm_convgrad.training.runtime.session import Session

Array = np.ndarray

SHARED = ("parameter", "running_stat")
"""Roles of the tensors that are averaged; the state of the optimizer stays with its client."""


def shared_names(session: Session) -> list[str]:
    """The names of the tensors that are exchanged: floats, as counters of batches have no mean."""
    return [spec.name for spec in session.artifact.state if spec.role in SHARED and spec.dtype.startswith("float")]


def weights_of(session: Session) -> list[Array]:
    """A copy of these tensors."""
    state = session.state
    return [state[name] for name in shared_names(session)]


def set_weights(session: Session, arrays: list[Array]) -> None:
    """Put arrays of `weights_of` in their place."""
    session.state = session.state | dict(zip(shared_names(session), arrays, strict=True))
