# SPDX-License-Identifier: Apache-2.0
"""A tar archive with all that a machine needs to train with an artifact in C."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.device.files import EXAMPLE, INCLUDE, NAME, ROOT
from tvm_convgrad.device.library import build_library
from tvm_convgrad.device.wheels import MachineFiles, own_licence
from tvm_convgrad.training.compile.linking import Linker
from tvm_convgrad.training.runtime.artifact import Artifact, is_for_gpu

_PAGE = ROOT / "bundle.md"
_PROGRAMS = ("bin/",)
_ORIGIN = "$ORIGIN"


@dataclass(frozen=True)
class Bundle:
    """The files of a bundle by their places in it."""

    name: str
    files: Mapping[str, bytes]

    def archive(self) -> bytes:
        """The tar archive: the same bytes for the same files."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for place, content in sorted(self.files.items()):
                entry = tarfile.TarInfo(f"{self.name}/{place}")
                entry.size = len(content)
                entry.mode = 0o755 if place.startswith(_PROGRAMS) else 0o644
                archive.addfile(entry, io.BytesIO(content))
        return out.getvalue()


def check_artifact(artifact: Artifact) -> None:
    """Refuse an artifact that needs more than the C library and TVM's run time.

    Raises:
        UnsupportedError: it is for a GPU, or calls a vendor's library.
    """
    if is_for_gpu(artifact.manifest):
        raise UnsupportedError(f"{artifact.path}: it runs on a GPU, and bundles are for CPUs; build it for a CPU.")
    called = ", ".join(artifact.manifest["runtimes"])
    if called:
        raise UnsupportedError(
            f"{artifact.path}: it calls {called}, whose runtime is compiled on the machine that runs it; build it with "
            "--offload none for a bundle."
        )


def make_bundle(artifact: Artifact, name: str, machine: MachineFiles, linker: Linker, folder: Path) -> Bundle:
    """The bundle of an artifact.

    Args:
        artifact: for the machine of `machine`; `check_artifact` has passed.
        name: of the folder in the archive.
        machine: its libraries.
        linker: for it.
        folder: where the library and the example are compiled.

    Raises:
        SetupError: the compiler fails; with its own words.
    """
    library, program = folder / NAME, folder / "train"
    build_library(linker, library, machine.runtime, ("-O2", "-s"), search=(_ORIGIN,))
    _build_example(linker, program, library)
    files = {
        "step.so": artifact.path.read_bytes(),
        f"lib/{NAME}": library.read_bytes(),
        "lib/libtvm_runtime.so": machine.runtime.tvm.read_bytes(),
        "lib/libtvm_ffi.so": machine.runtime.ffi.read_bytes(),
        "bin/train": program.read_bytes(),
        "include/convgrad.h": (INCLUDE / "convgrad.h").read_bytes(),
        "example/train.c": (EXAMPLE / "train.c").read_bytes(),
        "licenses/tvm-convgrad-LICENSE": own_licence(),
        **{f"licenses/{licence}": text for licence, text in machine.licences.items()},
        "README.md": _page(artifact, name).encode(),
    }
    sums = [f"{hashlib.sha256(content).hexdigest()}  {place}\n" for place, content in sorted(files.items())]
    return Bundle(name, {**files, "SHA256SUMS": "".join(sums).encode()})


def _build_example(linker: Linker, program: Path, library: Path) -> None:
    linker.link_program(
        str(program),
        [str(EXAMPLE / "train.c")],
        [
            *("-O2", "-s", f"-I{INCLUDE}"),
            *(str(library), f"-Wl,-rpath,{_ORIGIN}/../lib", "-Wl,--allow-shlib-undefined"),
        ],
    )


def _page(artifact: Artifact, name: str) -> str:
    """The page that says how to run it."""
    try:
        text = _PAGE.read_text()
    except OSError as error:
        raise SetupError(f"{_PAGE} is missing; reinstall tvm-convgrad.") from error
    features = artifact.manifest["cpu_features"]
    inputs = ", ".join(f"{spec.name}: {spec}" for spec in artifact.inputs)
    return Template(text).substitute(
        name=name,
        target=artifact.manifest["target"],
        features=", ".join(features) if features else "none beyond the architecture's own",
        inputs=inputs,
        id=artifact.id,
        tvm=artifact.manifest["versions"]["tvm"],
        ffi=artifact.manifest["versions"]["tvm_ffi"],
    )


__all__ = ["Bundle", "check_artifact", "make_bundle"]
