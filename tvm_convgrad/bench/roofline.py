# SPDX-License-Identifier: Apache-2.0
"""The roofline picture: each layer at its arithmetic intensity and speed, ours and theirs, under measured limits."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from tvm_convgrad.bench.measure import Measurement
from tvm_convgrad.bench.roof import Roof
from tvm_convgrad.training.envelope import write_atomic

_COLOURS = {"backward_weight": "tab:blue", "backward_data": "tab:orange", "forward": "tab:green"}
_MARKERS = ("x", "+", "1", "2")


def save_roofline(path: Path, measurements: Sequence[Measurement], roof: Roof) -> None:
    """Draw a PNG at `path`: FLOP a byte (each tensor moved once) across, GFLOP/s up, both logarithmic.

    A layer whose tensors stay in caches may lie above the line of the memory's bandwidth.

    Raises:
        ArtifactError: `path` cannot be written.
    """
    # The object interface with its own canvas: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ridge = roof.gflops / roof.bandwidth
    places = [m.intensity for m in measurements] or [ridge]
    low, high = min(*places, ridge) / 2, max(*places, ridge) * 2
    axes.plot([low, ridge], [roof.attainable(low), roof.gflops], color="black", label=f"{roof.bandwidth:.0f} GB/s")
    axes.plot([ridge, high], [roof.gflops] * 2, color="black", linestyle="--", label=f"{roof.gflops:.0f} GFLOP/s")
    rivals = list(dict.fromkeys(m.rival for m in measurements))
    for face, colour in _COLOURS.items():
        of_face = [m for m in measurements if m.face == face]
        for rival, marker in zip(rivals, _MARKERS, strict=False):
            dots = [m for m in of_face if m.rival == rival]
            if dots:
                place = [m.intensity for m in dots]
                axes.scatter(
                    place, [m.rival_gflops for m in dots], s=22, color=colour, marker=marker, alpha=0.6,
                    label=f"{face}, {rival}",
                )  # fmt: skip
        if of_face:
            place = [m.intensity for m in of_face]
            axes.scatter(
                place, [m.gflops for m in of_face], s=22, facecolors="none", edgecolors=colour, label=f"{face}, ours"
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP / byte, each tensor moved once",
        ylabel="GFLOP/s",
        title=f"{roof.machine}, {roof.threads} threads",
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomic(path, picture.getvalue())
