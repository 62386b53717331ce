# SPDX-License-Identifier: Apache-2.0
"""The command `convgrad`: exit code 0 if the work was done, 1 if it failed (a sentence says why), 2 for wrong usage."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

import tvm_convgrad
from tvm_convgrad.commands import bench, build, build_runtime, env, explain, import_relay, run, tune, verify
from tvm_convgrad.errors import ConvGradError

app = typer.Typer(
    name="convgrad",
    help="Training steps with right and visible convolution gradients, compiled by Apache TVM into one library.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("bench")(bench.bench)
app.command("build")(build.build)
app.command("run")(run.run)
app.command("explain")(explain.explain)
app.command("import")(import_relay.import_program)
app.command("tune")(tune.tune)
app.command("verify")(verify.verify)
app.command("build-runtime")(build_runtime.build_runtime)
app.command("env")(env.env)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(tvm_convgrad.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line.

    What goes wrong on purpose (ConvGradError) is one sentence. Anything else is a defect of this program, and is
    named as such; with CONVGRAD_TRACEBACK=1 in the environment the traceback follows.
    """
    try:
        app()
    except ConvGradError as error:
        _fail(str(error))
    except Exception as error:  # the last resort: whatever it is, it must neither look like success nor be a riddle
        if os.environ.get("CONVGRAD_TRACEBACK") == "1":
            traceback.print_exc()
        summary = " ".join(str(error).split())
        _fail(
            f"unexpected {type(error).__name__}: {summary[:500]} (a defect of tvm-convgrad or TVM; set "
            "CONVGRAD_TRACEBACK=1 to see where)"
        )


def _fail(message: str) -> None:
    print(f"convgrad: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
