# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README: a weight gradient as TVM expands it and as one operator, and speeds beside others.

    python benchmarks/front_picture.py                # writes docs/pictures/front.svg and front-phone.svg
    python benchmarks/front_picture.py --check        # exit code 1 if its numbers are not those of docs/results

The two graphs are what relax.transform.Gradient makes of a grouped convolution with stride 2, in a process without this
package and in one with it. The bars are rows of the tables in docs/results. All of it is also in the files'
descriptions, as JSON, which is what --check compares. Both pictures have the same content; a browser selects one by the
width of its window.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PICTURES = ROOT / "docs" / "pictures"

NAMES = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vgg16": "VGG-16",
    "convnext_t": "ConvNeXt-T",
    "resnet18_cifar": "ResNet-18, CIFAR",
    "resnet18": "ResNet-18",
}
SCALE = "speedup over the named library; batch\u00a08, float32, two cores of an Intel Xeon (AVX-512)"
GREY, BLUE, LIGHT = "#6b7280", "#1d4ed8", "#dbeafe"


class Form(NamedTuple):
    """One of the pictures.

    Attributes:
        file: its name.
        size: width and height in inches, of which a browser shows 96 pixels each.
        text: size of all text in points, 4/3 pixels each.
        tall: whether the speeds are below the graphs and not beside them.
        limit: the end of the axis of speeds, which leaves room for the number behind the longest bar.
    """

    file: str
    size: tuple[float, float]
    text: float
    tall: bool
    limit: float


FORMS = (
    Form("front.svg", (8.2, 5.2), 10.0, tall=False, limit=900),
    Form("front-phone.svg", (3.4, 7.2), 8.5, tall=True, limit=1500),
)
"""For wide windows, and for phones: a page of 360 pixels has room for about 326, on which text has 11 pixels."""

GRADIENT = """
from tvm import relax

x = relax.Var("x", relax.TensorType((8, 64, 56, 56), "float32"))
w = relax.Var("w", relax.TensorType((64, 16, 3, 3), "float32"))
builder = relax.BlockBuilder()
with builder.function("main", [x, w]):
    with builder.dataflow():
        y = builder.emit(relax.op.nn.conv2d(x, w, strides=2, padding=1, groups=4))
        loss = builder.emit_output(relax.op.sum(y))
    builder.emit_func_output(loss)
module = relax.transform.Gradient("main", require_grads=w)(builder.get())
bindings = [binding for block in module["main_adjoint"].body.blocks for binding in block.bindings]
made = [binding.value for binding in bindings if isinstance(binding.value, relax.Call)]
names = [call.op.name.removeprefix("relax.").removeprefix("nn.") for call in made]
start = names.index("broadcast_to") + 1
print("\\n".join(names[start:]))
"""


class Bar(NamedTuple):
    """A ratio: the time of `beside` / ours for `what` ("layers" or "steps") of a network."""

    beside: str
    what: str
    network: str
    ratio: float


def layers(page: str, beside: str) -> list[Bar]:
    """The geometric means over the gradients of each network of a table of layers."""
    text = (RESULTS / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| all \| 8 \| gradients \| \d+ \| ([\d.]+) \|", text, re.MULTILINE)
    return [Bar(beside, "layers", NAMES[suite], float(ratio)) for suite, ratio in rows if suite in NAMES]


def steps(page: str) -> list[Bar]:
    """The ratios of whole training steps, the geometric mean of a model's layouts."""
    text = (RESULTS / page).read_text(encoding="utf-8").partition("## With Winograd")[0]
    found: dict[str, list[float]] = {}
    for model, ratio in re.findall(r"^\| (\w+) \| N(?:CHW|HWC) \| ([\d.]+) \|", text, re.MULTILINE):
        found.setdefault(model, []).append(float(ratio))
    return [
        Bar("PyTorch", "steps", NAMES[model], round(math.prod(ratios) ** (1 / len(ratios)), 2))
        for model, ratios in found.items()
    ]


def bars() -> list[Bar]:
    """All bars of the picture, from the top."""
    return [
        *steps("steps-intel-batch8.md"),
        *layers("layers-intel-batch8.md", "PyTorch"),
        *layers("jax-intel-batch8.md", "JAX"),
        *layers("stock-intel-batch8.md", "stock TVM"),
    ]


def weight_gradient(stock: bool) -> list[str]:
    """The operators of the weight's gradient, from the one that comes first."""
    environment = os.environ | {"TVM_DEVICE_BACKEND_AUTOLOAD": "0" if stock else "1", "PYTHONPATH": str(ROOT)}
    source = GRADIENT if stock else "import tvm, tvm_convgrad\ntvm_convgrad.register()" + GRADIENT
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


def drawn() -> dict[str, object]:
    """What the picture shows, as plain values."""
    return {
        "stock": weight_gradient(True),
        "ours": weight_gradient(False),
        "bars": [list(bar) for bar in bars()],
    }


def described(picture: Path) -> dict[str, object]:
    """What a picture was drawn from."""
    found = ElementTree.parse(picture).find(".//{http://purl.org/dc/elements/1.1/}description")
    if found is None or not found.text:
        raise ValueError(f"{picture} has no description; draw it again")
    shown: dict[str, object] = json.loads(found.text)
    return shown


def _graph(axes: Axes, title: str, operators: Sequence[str], colour: str, fill: str, size: float) -> None:
    """A chain of boxes between the two tensors that come in and the gradient."""
    axes.set(xlim=(0, 1), ylim=(0, 6.5))
    axes.axis("off")
    axes.text(0.5, 6.1, title, ha="center", va="center", fontsize=size, fontweight="bold", color=colour)
    names = ["x, dy", *operators, "dw"]
    heights = [5.4 - 5.0 * place / (len(names) - 1) for place in range(len(names))]
    for place, (name, height) in enumerate(zip(names, heights, strict=True)):
        tensor = place in (0, len(names) - 1)
        frame = {"boxstyle": "round,pad=0.38", "facecolor": "white" if tensor else fill, "edgecolor": colour}
        weight = "normal" if tensor else "bold"
        axes.text(0.5, height, name, ha="center", va="center", fontsize=size, fontweight=weight, bbox=frame)
        if place:
            arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 9, "shrinkB": 9}
            axes.annotate("", (0.5, height), (0.5, heights[place - 1]), arrowprops=arrow)


def _speeds(axes: Axes, shown: Sequence[Bar], form: Form) -> None:
    """Horizontal bars by what they are beside, on a logarithmic axis that begins at equal speed."""
    colours = {"PyTorch": "#c2410c", "JAX": "#7c3aed", "stock TVM": GREY}
    height, ticks, names = 0.0, [], []
    previous = None
    for bar in shown:
        if bar[:2] != previous:
            height += 1.1 if previous else 0.0
            title = f"{'training steps' if bar.what == 'steps' else 'gradients of layers'} vs {bar.beside}"
            look = {"va": "center", "fontsize": form.text, "fontweight": "bold", "color": colours[bar.beside]}
            axes.text(1.03, height - 0.02, title, **look)
            height, previous = height + 0.95, bar[:2]
        axes.barh(height, bar.ratio - 1, left=1, height=0.68, color=colours[bar.beside], zorder=2)
        axes.text(
            bar.ratio * 1.04,
            height,
            f"{bar.ratio:.{2 if bar.ratio < 10 else 1 if bar.ratio < 100 else 0}f} ×",
            va="center",
            fontsize=form.text,
        )
        ticks.append(height)
        names.append(bar.network)
        height += 0.9
    axes.set(xscale="log", xlim=(1, form.limit), ylim=(height, -0.7), yticks=ticks, yticklabels=names)
    axes.set_xticks([1, 2, 5, 10, 50, 200], labels=["1", "2", "5", "10", "50", "200"])
    axes.minorticks_off()
    axes.set_xlabel("\n".join(textwrap.wrap(SCALE, 34 if form.tall else 48)), fontsize=form.text)
    axes.tick_params(labelsize=form.text, length=0)
    axes.grid(axis="x", color="#e5e7eb", zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(values: dict[str, object], form: Form, picture: Path) -> None:
    """Write a picture."""
    with rc_context({"svg.hashsalt": "tvm-convgrad", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=form.size, layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        if form.tall:
            graphs, below = figure.subfigures(2, 1, height_ratios=(2.6, 4.6))
            stock, ours = graphs.subplots(1, 2, width_ratios=(1.3, 2.1))
            speeds = below.subplots()
        else:
            stock, ours, speeds = figure.subplots(1, 3, width_ratios=(1.3, 2.1, 3.4))
        size = form.text
        _graph(stock, "wgrad in\nstock TVM", list(values["stock"]), GREY, "#f3f4f6", size)  # type: ignore[call-overload]
        _graph(ours, "wgrad with\ntvm-convgrad", list(values["ours"]), BLUE, LIGHT, size)  # type: ignore[call-overload]
        _speeds(speeds, [Bar(*bar) for bar in values["bars"]], form)  # type: ignore[attr-defined]
        metadata = {"Date": None, "Description": json.dumps(values), "Title": "tvm-convgrad"}
        figure.savefig(picture, format="svg", metadata=metadata)


def main(check: Annotated[bool, typer.Option("--check", help="Compare the files with the tables.")] = False) -> None:
    values = drawn()
    for form in FORMS:
        picture = PICTURES / form.file
        if not check:
            draw(values, form, picture)
        elif described(picture) != values:
            sys.exit(f"{picture.relative_to(ROOT)} is not what is measured; run python benchmarks/front_picture.py")


if __name__ == "__main__":
    typer.run(main)
