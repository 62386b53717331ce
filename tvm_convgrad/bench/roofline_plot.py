# SPDX-License-Identifier: Apache-2.0
"""The roofline plot: each layer at its arithmetic intensity and speed, ours and the baselines', under the roofline."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tvm_convgrad.bench.measure import Measurement
from tvm_convgrad.bench.roofline import Roofline
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.files import write_atomic

_COLOURS = {"backward_weight": "tab:blue", "backward_data": "tab:orange", "forward": "tab:green"}
_MARKERS = ("x", "+", "1", "2")


def save_roofline(path: Path, measurements: Sequence[Measurement], roofline: Roofline) -> None:
    """Draw a PNG at `path`: FLOP a byte (each tensor moved once) across, GFLOP/s up, both logarithmic.

    A layer whose tensors stay in caches may lie above the line of the memory's bandwidth.

    Raises:
        ArtifactError: `path` cannot be written.
    """
    # The object interface with its own canvas: no global state, and no display is looked for.
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    peak, bandwidth = roofline.gflops, roofline.bandwidth
    ridge = peak / bandwidth
    intensities = [m.intensity for m in measurements] or [ridge]
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    axes.plot([low, ridge], [roofline.attainable(low), peak], color="black", label=f"{bandwidth:.0f} GB/s")
    axes.plot([ridge, high], [peak, peak], color="black", linestyle="--", label=f"{peak:.0f} GFLOP/s")
    baselines = list(dict.fromkeys(m.baseline for m in measurements))
    for direction, colour in _COLOURS.items():
        of_direction = [m for m in measurements if m.direction == direction]
        for baseline, marker in zip(baselines, _MARKERS, strict=False):
            dots = [m for m in of_direction if m.baseline == baseline]
            if dots:
                axes.scatter(
                    [m.intensity for m in dots],
                    [m.baseline_gflops for m in dots],
                    s=22,
                    color=colour,
                    marker=marker,
                    alpha=0.6,
                    label=f"{WORDS[direction]}, {baseline}",
                )
        if of_direction:
            axes.scatter(
                [m.intensity for m in of_direction],
                [m.gflops for m in of_direction],
                s=22,
                facecolors="none",
                edgecolors=colour,
                label=f"{WORDS[direction]}, ours",
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP / byte, each tensor moved once",
        ylabel="GFLOP/s",
        title=f"{roofline.machine}, {roofline.threads} threads",
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomic(path, picture.getvalue())
