# SPDX-License-Identifier: Apache-2.0
"""The quality of a model's predictions for samples that it is not trained on: loss, accuracy, top-5, mean IoU.

All in float64 by numpy, from the predictions of the compiled `predict`: with running statistics, without dropout. The
losses are those of the step (`training/step/losses`), as sums and counts that batches add to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.ranks import Alone, Ranks
from tvm_convgrad.training.runtime.schema import Array
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.source import Source

BATCH = 256
"""Samples that are predicted and measured at once, where the model's batch is free."""
_TOP = 5


@dataclass
class Quality:
    """Sums over batches, from which follow the measures of all samples."""

    loss: float = 0.0
    count: float = 0.0
    squares: float = 0.0
    right: int = 0
    among_top: int = 0
    positions: int = 0
    overlap: Array = field(default_factory=lambda: np.zeros(0))
    union: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def mean_loss(self) -> float:
        """The loss of all samples, NaN if there are none."""
        return self.loss / self.count if self.count else math.nan

    def measures(self, classes: int | None, pixels: bool) -> dict[str, float]:
        """The measures by name: loss; mse of values; of classes accuracy, top5 of more than 5, mean_iou of pixels.

        Positions of the ignored class do not count. The mean of IoU is over the classes that are predicted or there.
        """
        found = {"loss": self.mean_loss}
        if classes is None:
            return found | {"mse": self.squares / self.count if self.count else math.nan}
        found["accuracy"] = self.right / self.positions if self.positions else math.nan
        if classes > _TOP:
            found["top5"] = self.among_top / self.positions if self.positions else math.nan
        if pixels:
            present = self.union > 0
            found["mean_iou"] = (
                float((self.overlap[present] / self.union[present]).mean()) if present.any() else math.nan
            )
        return found

    def sum_over(self, ranks: Ranks, classes: int) -> None:
        """Add up the sums of all ranks, so that each has those of all samples."""
        if ranks.size == 1:
            return
        single = [self.loss, self.count, self.squares, self.right, self.among_top, self.positions]
        unmeasured = np.zeros(classes)
        by_class = [self.overlap, self.union] if self.union.size else [unmeasured, unmeasured]
        sums = np.concatenate([np.array(single, "float64"), *by_class])
        ranks.sum(sums)
        self.loss, self.count, self.squares = sums[:3].tolist()
        self.right, self.among_top, self.positions = (int(each) for each in sums[3:6])
        self.overlap, self.union = sums[6 : 6 + classes], sums[6 + classes :]

    def add(self, predictions: Array, target: Array, options: Mapping[str, Any], classes: int | None) -> None:
        """Count one batch.

        Args:
            predictions: [batch, classes, ...] of class numbers, else of the target's shape.
            target: [batch, ...].
            options: of the step: loss and its settings.
            classes: the number of classes; None: the targets are values.
        """
        wide = predictions.astype("float64")
        total, count = (_loss_of_values if classes is None else _loss_of_classes)(wide, target, options)
        self.loss, self.count = self.loss + total, self.count + count
        if classes is None:
            self.squares += float(((wide - target.astype("float64")) ** 2).sum())
            return
        ignored = options.get("ignore_index")
        counted = np.ones(target.shape, bool) if ignored is None else target != ignored
        scores, truth = np.moveaxis(wide, 1, -1)[counted], target[counted]
        chosen = scores.argmax(axis=-1)
        self.positions += truth.size
        self.right += int((chosen == truth).sum())
        if classes > _TOP:
            top = np.argpartition(scores, classes - _TOP, axis=-1)[:, classes - _TOP :]
            self.among_top += int((top == truth[:, None]).any(axis=-1).sum())
        if not self.union.size:
            self.overlap, self.union = np.zeros(classes), np.zeros(classes)
        overlap = np.bincount(truth[chosen == truth], minlength=classes)
        self.overlap += overlap
        self.union += np.bincount(chosen, minlength=classes) + np.bincount(truth, minlength=classes) - overlap


def validate(session: Session, source: Source, ranks: Ranks | None = None) -> dict[str, float]:
    """The measures of a session's predictions for all samples (see `Quality.measures`).

    Of a model with several outputs the loss is that of the predictions alone. A model that returns its loss itself has
    no other measure than the mean of its losses of whole batches, the last one of fewer samples if the batch is free.
    Ranks share the samples out, and all get the measures.

    """
    quality, ranks = Quality(), ranks or Alone()
    if session.returns_loss:
        return _own_loss(session, source, ranks)
    for inputs, target, _ in source.in_order(session.batch or BATCH, ranks.rank, ranks.size):
        predictions = session.predict(inputs if len(inputs) > 1 else inputs[0])
        quality.add(predictions, target, session.artifact.options, session.classes)
    quality.sum_over(ranks, session.classes or 0)
    return quality.measures(session.classes, len(session.target.shape) > 1)


def measured_samples(session: Session, source: Sized | None) -> int:
    """How many samples `validate` measures: of a model that returns its loss itself those of whole fixed batches."""
    count = 0 if source is None else len(source)
    return count - count % session.batch if session.returns_loss and session.batch else count


def _own_loss(session: Session, source: Source, ranks: Ranks) -> dict[str, float]:
    """The mean of the losses that the model returns, each counted as often as its batch has samples."""
    total = np.zeros(2)
    for inputs, target, _ in source.in_order(session.batch or BATCH, ranks.rank, ranks.size):
        if session.batch in (None, len(target)):
            loss, _ = session.evaluate(inputs if len(inputs) > 1 else inputs[0], target)
            total += (loss * len(target), len(target))
    ranks.sum(total)
    return {"loss": float(total[0] / total[1]) if total[1] else math.nan}


def check_samples(session: Session, count: int, what: str) -> None:
    """Refuse samples that do not fill one batch of a model that returns its loss itself.

    Raises:
        ArtifactError: with the sentence of the rule.
    """
    if session.returns_loss and count < (session.batch or 1):
        raise ArtifactError(
            f"{session.artifact.path}: {count} {what} samples do not fill one batch of {session.batch}, of which the "
            "model returns its loss; give more, or build with --batch dynamic."
        )


def check_measure(session: Session, name: str) -> None:
    """Refuse a measure that the predictions do not have.

    Raises:
        ArtifactError: the measures that they have are named.
    """
    measures = Quality().measures(session.classes, len(session.target.shape) > 1)
    if session.returns_loss:
        if name != "loss":
            raise ArtifactError(
                f"--monitor {name}: {session.artifact.path} returns its loss itself (build --loss model), and what its "
                "target means is not known; leave --monitor out."
            )
        return
    if name not in measures:
        raise ArtifactError(
            f"--monitor {name}: predictions of {session.artifact.path} have the measures {', '.join(measures)}; name "
            "one of these."
        )


def _loss_of_classes(predictions: Array, target: Array, options: Mapping[str, Any]) -> tuple[float, float]:
    """The sum of the losses of all positions, and what it is divided by for their mean."""
    classes, ignored = predictions.shape[1], options.get("ignore_index")
    scores = np.moveaxis(predictions, 1, -1).reshape(-1, classes)
    labels = target.reshape(-1)
    counted = np.ones(labels.shape, bool) if ignored is None else labels != ignored
    scores, labels = scores[counted], labels[counted]
    if options["loss"] == "cross_entropy":
        largest = scores.max(axis=1, keepdims=True, initial=-np.inf)
        shifted = scores - np.where(np.isfinite(largest), largest, 0.0)
        scores = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    weights = options.get("class_weights")
    scale = np.ones(classes) if weights is None else np.array(weights, "float64")
    loss = -float((scores[np.arange(len(labels)), labels] * scale[labels]).sum())
    smoothing = float(options.get("label_smoothing") or 0.0)
    if smoothing:
        loss = (1.0 - smoothing) * loss - smoothing / classes * float((scores * scale).sum())
    return loss, float(scale[labels].sum())


def _loss_of_values(predictions: Array, target: Array, options: Mapping[str, Any]) -> tuple[float, float]:
    """The sum of the losses of all elements, and their number."""
    wide = target.astype("float64")
    difference = np.abs(predictions - wide)

    def column(name: str) -> Array | float:
        numbers = options.get(name)
        return 1.0 if numbers is None else np.array(numbers, "float64").reshape(-1, *[1] * (predictions.ndim - 2))

    if options["loss"] == "mse":
        elements = difference**2
    elif options["loss"] == "l1":
        elements = difference
    elif options["loss"] == "huber":
        delta = 1.0 if options.get("delta") is None else float(options["delta"])
        clipped = np.minimum(difference, delta)
        elements = clipped * (difference - clipped / 2)
    else:
        softplus = np.log1p(np.exp(-np.abs(predictions))) + np.maximum(-predictions, 0.0)
        elements = (1 - wide) * predictions + (1 + (column("positive_weight") - 1.0) * wide) * softplus
        elements = elements * column("class_weights")
    return float(elements.sum()), float(elements.size)


__all__ = ["Quality", "check_measure", "check_samples", "measured_samples", "validate"]
