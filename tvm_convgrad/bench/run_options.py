# SPDX-License-Identifier: Apache-2.0
"""The options that measurements of layers, of training steps and of per-sample gradients share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tvm_convgrad.bench.configuration import Configuration


@dataclass(frozen=True)
class RunOptions:
    """Where and how long to measure, and where to write.

    Attributes:
        config: the device, the implementation that is measured there, and its element type.
        seconds: time for the pairs of each measurement; at least `measure.MIN_PAIRS` pairs are timed.
        threads: threads of every contender; None: TVM_NUM_THREADS, or all cores.
        path: the JSON file that is written after each measurement; None: no file.
    """

    config: Configuration
    seconds: float = 0.5
    threads: int | None = None
    path: Path | None = None
