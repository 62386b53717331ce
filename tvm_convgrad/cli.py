# SPDX-License-Identifier: Apache-2.0
"""The command `convgrad`: exit code 0 if the work was done, 1 if it failed (a sentence says why), 2 for wrong usage."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated

import typer

import tvm_convgrad
from tvm_convgrad.commands import bench, build, build_runtime, env, explain, import_relay, run, tune, verify
from tvm_convgrad.commands.stages import current_stage, reset_stage
from tvm_convgrad.errors import ConvGradError
from tvm_convgrad.quiet import release

_ROOT = Path(tvm_convgrad.__file__).parent.parent
_PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize")
"""The packages of this project, and the folder that holds them."""

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

    What goes wrong on purpose (ConvGradError) is one sentence. Anything else is a defect of this program or of a
    library that it calls, and is named as such, with its place; with CONVGRAD_TRACEBACK=1 in the environment the
    traceback follows. Warnings of the libraries are for their callers, and are not shown, unless Python was told to
    show them (-W, PYTHONWARNINGS).
    """
    reset_stage()
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        try:
            app()
        except ConvGradError as error:
            release(error)
            _fail(str(error))
        except Exception as error:  # the last resort: whatever it is, it must neither look like success nor be a riddle
            if os.environ.get("CONVGRAD_TRACEBACK") == "1":
                traceback.print_exc()
            message = _unexpected(error)
            release(error)
            _fail(message)


def _unexpected(error: Exception) -> str:
    """The sentence about a defect: what was raised, where, from which call of ours, and what was being done."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [_place(frames[-1])] if frames else []
    folders = [_ROOT / package for package in _PACKAGES]
    own = [frame for frame in frames if any(map(Path(frame.filename).is_relative_to, folders))]
    if own and own[-1] is not frames[-1]:
        places.append(f"called from {_place(own[-1])}")
    text = " ".join(str(error).split())[:500] or "no message"
    stage = f" while {current_stage()}" if current_stage() else ""
    where = ", ".join(places)
    return (
        f"unexpected {type(error).__name__}{stage}: {text} ({where}). This is a defect of tvm-convgrad or of a library "
        "that it calls; set CONVGRAD_TRACEBACK=1 to see the traceback, and send it with the command and the output of "
        "`convgrad env`."
    )


def _place(frame: traceback.FrameSummary) -> str:
    """File, line and function of a frame; the file below the folder of its package."""
    path = Path(frame.filename)
    parts = path.parts
    start = max((place for place, part in enumerate(parts) if part == "site-packages"), default=-1)
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(*parts[start + 1 :])
    return f"{shown}:{frame.lineno} in {frame.name}"


def _fail(message: str) -> None:
    print(f"convgrad: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
