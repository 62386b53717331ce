# SPDX-License-Identifier: Apache-2.0
"""The choice that a model returns its loss itself. Loads no TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODEL_LOSS = "model"
"""The name of that loss (`build_step(loss="model")`)."""


@dataclass(frozen=True)
class OwnLoss:
    """Which outputs of a model are its loss and its predictions, and which input its target.

    Attributes:
        outputs: by name, or by position: scalars, whose weighted sum is the loss, and at most one other output, the
            predictions, whose number means nothing. None: the only scalar, and the only other output, if there is one.
        target: the name of the input that is the target; None: the last input.
    """

    outputs: Mapping[str, float] | None = None
    target: str | None = None
