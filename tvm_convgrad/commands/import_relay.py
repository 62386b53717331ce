# SPDX-License-Identifier: Apache-2.0
"""`convgrad import`: converts a Relay program to a Relax module, as JSON that today's TVM reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options


def import_program(
    program: Annotated[
        Path, typer.Argument(help="The Relay program: JSON, text, one of these as .gz, or a .tar of TVMC.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The .json file to write; the values of parameters go beside it, as .npz."),
    ],
    params: options.Params = None,
    json: options.Json = False,
) -> None:
    """Convert a Relay program (TVM up to 0.19) to a Relax module, which `build` and today's TVM read.

    Parameters stay parameters of the function; their values, if there are any, are written beside the module.
    """
    start = time.perf_counter()

    import numpy as np
    import tvm

    from tvm_convgrad.core.errors import ModelError
    from tvm_convgrad.importer import import_relay
    from tvm_convgrad.report.tables import print_json, print_pairs
    from tvm_convgrad.training.ir.graph import operator_counts

    if output.suffix != ".json" or not output.parent.is_dir():
        raise ModelError(f"{output}: give the name of a .json file in a folder that exists.")
    beside = program.with_suffix(".params")
    imported = import_relay(program, params or (beside if beside.is_file() else None))
    output.write_text(tvm.ir.save_json(imported.module), encoding="utf-8")
    values = output.with_suffix(".npz")
    if imported.params:
        np.savez(values, allow_pickle=False, **imported.params)
    counts = operator_counts(imported.module["main"])
    report = {
        "program": str(program),
        "written by": imported.version or "an unknown version",
        "output": str(output),
        "parameters": str(values) if imported.params else "",
        "operators": dict(counts.most_common()),
        "lifted": imported.lifted,
        "seconds": time.perf_counter() - start,
    }
    if json:
        print_json(report)
        return
    gradients = "; ".join(f"{count} x {sentence}" for sentence, count in imported.lifted.items()) or "none"
    print_pairs(
        f"{program} in Relax",
        [
            ("written by", report["written by"]),
            ("module", f"{output} ({report['seconds']:.1f} s)"),
            ("parameters", report["parameters"] or "no values were given"),
            (
                "operators",
                ", ".join(f"{count} {name.removeprefix('relax.')}" for name, count in counts.most_common(12)),
            ),
            ("recognised gradients", gradients),
        ],
    )
