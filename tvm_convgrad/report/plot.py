# SPDX-License-Identifier: Apache-2.0
"""Pictures as PNG files: the loss curve of a run, and the longest operators of a step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tvm_convgrad.core.files import write_atomic


def save_loss_curve(path: Path, losses: Sequence[float], steps_per_epoch: int, title: str) -> None:
    """Draw the loss of each step and the mean of each epoch into a PNG at `path`.

    Raises:
        ArtifactError: `path` cannot be written.
    """
    # The object interface with its own canvas: no global state, and no display is looked for.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.7, alpha=0.5, label="step")
    epochs = [losses[start : start + steps_per_epoch] for start in range(0, len(losses), steps_per_epoch)]
    ends = [min((number + 1) * steps_per_epoch, len(losses)) for number in range(len(epochs))]
    axes.plot(ends, [sum(epoch) / len(epoch) for epoch in epochs], marker="o", markersize=3, label="mean of epoch")
    if min(losses) > 0 and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomic(path, picture.getvalue())


_COLOURS = {"forward": "tab:blue", "backward": "tab:orange", "optimizer": "tab:green"}


def save_profile(path: Path, bars: Sequence[tuple[str, str, float]], title: str) -> None:
    """Draw a bar for each operator into a PNG at `path`.

    Args:
        path: of the file.
        bars: name, phase and milliseconds of each, the longest first.
        title: of the picture.

    Raises:
        ArtifactError: `path` cannot be written.
    """
    figure = Figure(figsize=(11, 1.5 + 0.24 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(bars))
    axes.barh(places, [ms for *_, ms in bars], color=[_COLOURS[phase] for _, phase, _ in bars])
    axes.set_yticks(places, [name if len(name) <= 60 else f"{name[:59]}…" for name, *_ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="ms", title=title)
    for phase, colour in _COLOURS.items():
        axes.barh([0], [0], color=colour, label=phase)
    axes.legend(loc="lower right")
    axes.grid(visible=True, axis="x", alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomic(path, picture.getvalue())
