# SPDX-License-Identifier: Apache-2.0
"""How much slower `import tvm` gets by this package's registration.

    python benchmarks/import_time.py [--runs 15]

TVM looks for entry points in any case; what this package adds is the loading of its modules and the registration. Both
are timed in fresh processes, in CPU time, so that a busy machine disturbs them little; the first process, which writes
the bytecode, does not count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Annotated

import typer

_MEASURE = """
import time
start = time.process_time()
import tvm
imported = time.process_time()
import tvm_convgrad
tvm_convgrad.register()
print(imported - start, time.process_time() - imported)
"""


def seconds() -> tuple[float, float]:
    """CPU seconds of `import tvm` alone, and of the registration after it, in a fresh process."""
    environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run([sys.executable, "-c", _MEASURE], env=environment, capture_output=True, text=True, check=True)
    alone, added = done.stdout.split()
    return float(alone), float(added)


def main(runs: Annotated[int, typer.Option(min=1, help="Processes.")] = 15) -> None:
    """Print the medians."""
    seconds()
    alone, added = zip(*(seconds() for _ in range(runs)), strict=True)
    print(
        f"import tvm alone {statistics.median(alone) * 1e3:.0f} ms; registration adds "
        f"{statistics.median(added) * 1e3:.0f} ms (least {min(added) * 1e3:.0f}, most {max(added) * 1e3:.0f})"
    )


if __name__ == "__main__":
    typer.run(main)
