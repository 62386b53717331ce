# SPDX-License-Identifier: Apache-2.0
"""How much slower `import tvm` gets by this package's registration: processes with and without it, interleaved.

    python benchmarks/import_time.py [--runs 15]

The middle of the differences is what counts; CPU time of the process, so that a busy machine disturbs it little.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Annotated

import typer

_MEASURE = "import time; t = time.process_time(); import tvm; print(time.process_time() - t)"


def seconds(autoload: bool) -> float:
    """CPU seconds of `import tvm` in a fresh process."""
    environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    done = subprocess.run([sys.executable, "-c", _MEASURE], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(runs: Annotated[int, typer.Option(min=1, help="Pairs of processes.")] = 15) -> None:
    """Print the median of both, and of the differences."""
    seconds(True)  # warms the file cache
    pairs = [(seconds(False), seconds(True)) for _ in range(runs)]
    without, with_ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    added = statistics.median(b - a for a, b in pairs)
    print(f"import tvm: {without * 1e3:.0f} ms without, {with_ours * 1e3:.0f} ms with, {added * 1e3:+.0f} ms added")


if __name__ == "__main__":
    typer.run(main)
