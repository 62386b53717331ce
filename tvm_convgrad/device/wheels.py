# SPDX-License-Identifier: Apache-2.0
"""TVM's run-time libraries for another machine, out of the wheels of apache-tvm and apache-tvm-ffi for it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tvm_convgrad.core.errors import ArtifactError, SetupError
from tvm_convgrad.device.files import ROOT, Runtime

PACKAGES = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
"""The packages, by their names in a manifest's `versions`."""
_LIBRARIES = {"tvm": "tvm/lib/libtvm_runtime.so", "tvm_ffi": "tvm_ffi/lib/libtvm_ffi.so"}
_LICENCES = ("LICENSE", "NOTICE")


@dataclass(frozen=True)
class MachineFiles:
    """What a bundle takes from TVM's packages: the libraries of a machine, and licences by the names to give them."""

    runtime: Runtime
    licences: dict[str, bytes]


def installed_files() -> MachineFiles:
    """Those of the installed packages, for this machine.

    Raises:
        SetupError: a library is missing.
    """
    licences: dict[str, bytes] = {}
    for package in PACKAGES.values():
        for file in importlib.metadata.files(package) or ():
            _add_licence(licences, package, PurePosixPath(file), Path(str(file.locate())))
    return MachineFiles(Runtime.installed(), licences)


def own_licence() -> bytes:
    """The licence of this package, installed or in a checkout."""
    try:
        listed = importlib.metadata.files("tvm-convgrad") or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    places = [Path(str(file.locate())) for file in listed if file.name == "LICENSE"]
    found = next((path for path in (*places, ROOT.parents[1] / "LICENSE") if path.is_file()), None)
    if found is None:
        raise SetupError("the file LICENSE of tvm-convgrad is missing; reinstall it.")
    return found.read_bytes()


def files_of_wheels(folder: Path, architecture: str, versions: dict[str, str], into: Path) -> MachineFiles:
    """Those of the wheels in a folder.

    Args:
        folder: it has the wheels of both packages; others are passed over.
        architecture: such as "aarch64".
        versions: of `PACKAGES`, which the artifact was compiled with.
        into: where the libraries are written.

    Raises:
        ArtifactError: a wheel is missing or damaged.
    """
    licences: dict[str, bytes] = {}
    libraries: dict[str, Path] = {}
    for name, package in PACKAGES.items():
        pattern = f"{package.replace('-', '_')}-{versions[name]}-*_{architecture}.whl"
        wheel = next(iter(sorted(folder.glob(pattern))), None)
        if wheel is None:
            raise ArtifactError(
                f"{folder}: there is no {pattern}; fetch it with `{' '.join(fetch_command(architecture, versions))}`."
            )
        try:
            with zipfile.ZipFile(wheel) as archive:
                libraries[name] = into / PurePosixPath(_LIBRARIES[name]).name
                libraries[name].write_bytes(archive.read(_LIBRARIES[name]))
                for entry in archive.namelist():
                    path = PurePosixPath(entry)
                    if not entry.endswith("/") and _is_licence(path):
                        licences[_licence_name(package, path)] = archive.read(entry)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise ArtifactError(
                f"{wheel}: not a wheel of {package}, or a damaged one ({error}); download it again."
            ) from error
    headers = Runtime.installed().include
    return MachineFiles(Runtime(libraries["tvm"], libraries["tvm_ffi"], headers, versions["tvm"]), licences)


def fetch_command(architecture: str, versions: dict[str, str], folder: str = "FOLDER") -> list[str]:
    """The command that fetches the wheels into a folder."""
    platforms = [f"manylinux_2_28_{architecture}", f"manylinux_2_17_{architecture}"]
    return [
        *("pip", "download", "--no-deps", "--only-binary", ":all:", "-d", folder),
        *(word for each in platforms for word in ("--platform", each)),
        *(f"{package}=={versions[name]}" for name, package in PACKAGES.items()),
    ]


def fetch(architecture: str, versions: dict[str, str], folder: Path) -> None:
    """Fetch the wheels with pip.

    Raises:
        SetupError: pip fails.
    """
    command = fetch_command(architecture, versions, str(folder))
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise SetupError(
            f"the libraries for {architecture} could not be fetched ({words[-1] if words else 'pip failed'}); run "
            f"`{' '.join(fetch_command(architecture, versions))}` elsewhere, and give --wheels FOLDER."
        )


def _is_licence(path: PurePosixPath) -> bool:
    return path.name in _LICENCES or (path.parent.name == "licenses" and path.name.startswith(_LICENCES))


def _licence_name(package: str, path: PurePosixPath) -> str:
    part = f"{path.parent.name}-" if path.parent.parent.name == "3rdparty" else ""
    return f"{package}-{part}{path.name}"


def _add_licence(licences: dict[str, bytes], package: str, path: PurePosixPath, place: Path) -> None:
    if _is_licence(path) and place.is_file():
        licences[_licence_name(package, path)] = place.read_bytes()


__all__ = ["PACKAGES", "MachineFiles", "fetch", "fetch_command", "files_of_wheels", "installed_files", "own_licence"]
