# SPDX-License-Identifier: Apache-2.0
"""`convgrad build-runtime`: a vendor library's runtime, ahead of the first build or run that needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from tvm_convgrad.commands import option_values, options
from tvm_convgrad.offload.registry import NAMES, backend, require


def build_runtime(
    name: Annotated[
        str, typer.Argument(metavar="BACKEND", callback=option_values.one_of(NAMES), help=f"Of {', '.join(NAMES)}.")
    ] = NAMES[0],
    json: options.Json = False,
) -> None:
    """Compile the runtime of a vendor library into the user's cache (CONVGRAD_RUNTIMES), and check that it loads."""
    from tvm_convgrad.report.tables import print_json, print_pairs

    require([name], None)
    chosen = backend(name)
    library = chosen.library()
    chosen.load(library)
    report = {"backend": name, "runtime": str(library), "library": chosen.version()}
    print_json(report) if json else print_pairs("runtime", list(report.items()))
