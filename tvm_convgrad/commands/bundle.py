# SPDX-License-Identifier: Apache-2.0
"""`convgrad bundle`: an archive with a library and all that another machine needs to train with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.commands.stages import stages


def bundle(
    step: Annotated[Path, typer.Argument(help="The library that `build` wrote, for any machine with Linux.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The archive to write, such as device.tar.")],
    wheels: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The wheels of apache-tvm and apache-tvm-ffi for the other machine. Default: pip fetches them, where "
            "the installed ones are not for it.",
        ),
    ] = None,
    linker: options.Linker = None,
    json: options.Json = False,
) -> None:
    """Pack a library into an archive for its machine, with TVM's runtime, the C library, an example and licences."""
    from json import loads

    import tvm

    from tvm_convgrad.core.errors import ArtifactError
    from tvm_convgrad.core.files import check_destination, write_atomic
    from tvm_convgrad.device.bundle import check_artifact, make_bundle
    from tvm_convgrad.device.wheels import fetch, files_of_wheels, installed_files
    from tvm_convgrad.report.tables import byte_count, print_json, print_pairs
    from tvm_convgrad.training.compile.linking import architecture_of, linker_for
    from tvm_convgrad.training.compile.workspace import workspace
    from tvm_convgrad.training.runtime.artifact import inspect_artifact, versions

    if output.suffix != ".tar":
        raise ArtifactError(f"{output}: a bundle is a tar archive; give a name that ends in .tar.")
    check_destination(output)
    artifact = inspect_artifact(step)
    check_artifact(artifact)
    target = tvm.target.Target(loads(artifact.manifest["target"]))
    architecture, made = architecture_of(target), artifact.manifest["versions"]
    own = architecture == architecture_of(tvm.target.Target("llvm")) and made == versions() | {
        "tvm_convgrad": made["tvm_convgrad"]
    }
    links = linker_for(target, linker)
    with stages("looking for libraries") as enter, workspace() as folder:
        if wheels is None and own:
            machine = installed_files()
        else:
            if wheels is None:
                enter(f"fetching wheels for {architecture}")
                fetch(architecture, made, folder)
            machine = files_of_wheels(wheels or folder, architecture, made, folder)
        enter("compiling the C library")
        packed = make_bundle(artifact, output.name.partition(".")[0], machine, links, folder)
        enter(f"writing {output}")
        content = packed.archive()
        write_atomic(output, content)
    sizes = {place: len(part) for place, part in packed.files.items()}
    if json:
        print_json({"output": str(output), "bytes": len(content), "id": artifact.id, "files": sizes})
        return
    rows = [(place, byte_count(size)) for place, size in sizes.items() if not place.startswith("licenses/")]
    print_pairs(f"bundle of {step}", [("archive", f"{output} ({byte_count(len(content))})"), *rows])
