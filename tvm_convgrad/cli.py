# SPDX-License-Identifier: Apache-2.0
"""The command `convgrad`: exit code 0 if the work was done, 1 if it failed (a sentence says why), 2 for wrong usage."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
import typer.main

import tvm_convgrad
from tvm_convgrad.commands import (
    bench,
    build,
    build_runtime,
    bundle,
    config,
    env,
    explain,
    export,
    import_relay,
    profile,
    run,
    tune,
    verify,
)
from tvm_convgrad.commands.help import GroupedCommand
from tvm_convgrad.commands.stages import current_stage, reset_stage
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.quiet import release
from tvm_convgrad.core.rare_collections import rare_collections

_ROOT = Path(tvm_convgrad.__file__).parent.parent
_PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize")
"""The folder that holds the packages of this project, and their names."""

OLD_OPTIONS = {
    "bench": {"--face": "--direction"},
    "tune": {"--face": "--direction"},
    "verify": {"--op": "--direction"},
}
"""For each command the earlier names of its options, which still work, and their names of today."""

app = typer.Typer(
    name="convgrad",
    help="Compile the training step of a model into one library with Apache TVM, and train with it. Also: show, tune, "
    "check and measure the kernels of its convolutions and their gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TRAIN, _KERNELS, _OTHER = "Train a model", "Kernels: look, tune, check, measure", "Other"
for _panel, _name, _function in (
    (_TRAIN, "build", build.build),
    (_TRAIN, "run", run.run),
    (_TRAIN, "export", export.export),
    (_TRAIN, "bundle", bundle.bundle),
    (_KERNELS, "explain", explain.explain),
    (_KERNELS, "profile", profile.profile),
    (_KERNELS, "tune", tune.tune),
    (_KERNELS, "verify", verify.verify),
    (_KERNELS, "bench", bench.bench),
    (_OTHER, "import", import_relay.import_program),
    (_OTHER, "build-runtime", build_runtime.build_runtime),
    (_OTHER, "config", config.config),
    (_OTHER, "env", env.env),
):
    app.command(_name, cls=GroupedCommand, rich_help_panel=_panel)(_function)


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


_INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

_interrupts: list[int] = []
"""The signals of Ctrl-C so far: TVM makes errors of other kinds of a KeyboardInterrupt in a pass of ours."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def main() -> None:
    """Run the command line.

    An error that this package raises (ConvGradError) is printed as one sentence. Any other one is a defect of this
    package or of a library that it calls, and is reported as such, with its file and line; with CONVGRAD_TRACEBACK=1 in
    the environment the traceback is printed, too. Warnings of libraries are not shown, unless Python's options -W or
    PYTHONWARNINGS ask for them.
    """
    reset_stage()
    _interrupts.clear()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), rare_collections():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        try:
            _command()(_with_new_names(sys.argv[1:]))
        except ConvGradError as error:
            release(error)
            _fail(str(error))
        except OSError as error:
            if error.errno not in _FULL:
                _fail_unexpectedly(error)
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}nothing more can be written ({error.strerror}); make room, and run the command again.")
        except Exception as error:  # a defect: it must not look like success, and its message must name the place
            _fail_unexpectedly(error)


@cache
def _command() -> Callable[[list[str]], object]:
    """The commands as click's: making these of the signatures takes 35 ms, which a process needs to spend once."""
    return typer.main.get_command(app)


def _with_new_names(arguments: list[str]) -> list[str]:
    """The command line with earlier names of options replaced, each with a note on standard error."""
    renamed = OLD_OPTIONS.get(arguments[0], {}) if arguments else {}
    changed = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if name in renamed:
            print(f"convgrad: note: {name} is called {renamed[name]} now.", file=sys.stderr)
        changed.append(renamed.get(name, name) + separator + value)
    return changed


def _unexpected(error: Exception) -> str:
    """The sentence about a defect: the exception, where it was raised and from which call of ours, and the stage."""
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


def _fail_unexpectedly(error: Exception) -> NoReturn:
    if _interrupts:
        sys.exit(_INTERRUPTED)
    if os.environ.get("CONVGRAD_TRACEBACK") == "1":
        traceback.print_exc()
    message = _unexpected(error)
    release(error)
    _fail(message)


def _fail(message: str) -> NoReturn:
    if _interrupts:  # what fails is a consequence
        sys.exit(_INTERRUPTED)
    print(f"convgrad: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
