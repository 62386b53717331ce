# SPDX-License-Identifier: Apache-2.0
"""The bounds of one network, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.bench.bridge import Request
from tvm_convgrad.bench.bridge_pairs import Pairs
from tvm_convgrad.report.tables import print_table, quantity


@dataclass(frozen=True)
class Bound:
    """How much faster a step can become.

    Attributes:
        model, batch, layout: the network, its samples, and NCHW or NHWC.
        seconds: of the framework's own step, the median.
        gradients, all_convolutions: the ratio of the step if gradients of convolutions, or all convolutions, only wrote
            zeros.
        processor_gradients, processor_all: the same of processor time.
        pairs: steps in turns, of which ratios are medians.
    """

    model: str
    batch: int
    layout: str
    seconds: float
    gradients: float
    all_convolutions: float
    processor_gradients: float
    processor_all: float
    pairs: int

    @staticmethod
    def of(request: Request, gradients: Pairs, all_convolutions: Pairs) -> Bound:
        """From pairs of steps with zeros and without."""
        return Bound(
            model=request.model,
            batch=request.batch,
            layout=request.layout,
            seconds=all_convolutions.seconds[1],
            gradients=gradients.ratio,
            all_convolutions=all_convolutions.ratio,
            processor_gradients=gradients.processor_ratio,
            processor_all=all_convolutions.processor_ratio,
            pairs=len(all_convolutions.without),
        )


def show(framework: str, bounds: Sequence[Bound]) -> None:
    """Print a row for each network."""
    columns = (
        "model",
        "batch",
        "layout",
        "step, ms",
        "gradients",
        "at most",
        "all convolutions",
        "at most",
        "of processor time",
        "at most",
        "pairs",
    )
    rows = [
        (
            each.model,
            each.batch,
            each.layout,
            f"{each.seconds * 1e3:.1f}",
            f"{1 - 1 / each.gradients:.0%}",
            quantity(each.gradients),
            f"{1 - 1 / each.all_convolutions:.0%}",
            quantity(each.all_convolutions),
            f"{1 - 1 / each.processor_all:.0%}",
            quantity(each.processor_all),
            each.pairs,
        )
        for each in bounds
    ]
    title = f"{framework}'s step: the part of convolutions, and the ratio if these only wrote zeros"
    print_table(title, columns, rows, right=columns[1:])
