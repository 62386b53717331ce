# SPDX-License-Identifier: Apache-2.0
"""`convgrad build-runtime`: a vendor library's runtime, ahead of the first build or run that needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from tvm_convgrad.commands import options


def build_runtime(
    name: Annotated[str, typer.Argument(metavar="BACKEND", help="onednn, cudnn or cutlass.")] = "onednn",
    json: options.Json = False,
) -> None:
    """Compile what calls a vendor library into the user's cache (CONVGRAD_RUNTIMES), and load it once."""
    from tvm_convgrad.offload.common import NAMES, backend, load_runtime, require
    from tvm_convgrad.report.tables import print_json, print_pairs

    if name not in NAMES:
        raise typer.BadParameter(f"{name}: use {', '.join(NAMES)}.")
    chosen = backend(name)
    require([name], None)
    library = chosen.library()
    load_runtime(name, library)
    report = {"backend": name, "runtime": str(library), "library": chosen.version()}
    print_json(report) if json else print_pairs("runtime", list(report.items()))
