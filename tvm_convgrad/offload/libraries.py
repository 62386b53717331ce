# SPDX-License-Identifier: Apache-2.0
"""Runtime libraries: built once into the user's cache, by a key of everything that goes into them, and loaded.

A folder of the cache holds one library and its SHA-256. It appears by a rename, whole; what does not fit its digest is
removed and built again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

import tvm_convgrad
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.kept_objects import refusal
from tvm_convgrad.offload import host

VARIABLE = "CONVGRAD_RUNTIMES"
LOCK_SECONDS = 600.0
_DIGEST = "sha256"


@lru_cache(maxsize=32)
def installed_file(package: str, file: str) -> Path | None:
    """A file of an installed package by the end of its path, wherever the wheel puts it; None if it is not there."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for each in files:
        if each.as_posix().endswith(file):
            path = Path(str(each.locate())).resolve()
            return path if path.is_file() else None
    return None


def cache_folder() -> Path:
    """Where runtimes are kept: CONVGRAD_RUNTIMES, or `runtimes` in the user's cache folder."""
    stated = os.environ.get(VARIABLE)
    return Path(stated) if stated else Path(platformdirs.user_cache_dir("tvm-convgrad")) / "runtimes"


def built(folder: Path, file: str) -> Path | None:
    """The library in a folder of the cache if it is there and whole."""
    library, stated = folder / file, folder / _DIGEST
    try:
        whole = stated.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return None
    return library if whole else None


def build(
    name: str, key: str, file: str, source: Path | str, options: Sequence[str], *, command: Sequence[str] = ()
) -> Path:
    """Compile a runtime, unless the cache has it.

    Args:
        name: of the backend.
        key: of the folder, hex digits.
        file: of the library, which is its soname too.
        source: of C++17; or the text of CUDA, which is kept beside the library.
        options: of the compiler.
        command: another compiler than C++'s, with the options that make a library.

    Raises:
        SetupError: no compiler, one that fails, or a cache that cannot be written, or that others can write to.
    """
    folder = cache_folder() / f"{name}-{key}"
    _require_own(folder.parent)
    found = built(folder, file)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=LOCK_SECONDS):
            found = built(folder, file)  # by another process meanwhile
            if found is not None:
                return found
            shutil.rmtree(folder, ignore_errors=True)
            made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))  # mode 0700
            try:
                if isinstance(source, str):
                    written = made / "source.cu"
                    written.write_text(source)
                    source = written
                _compile(name, source, made / file, options, command)
                (made / _DIGEST).write_text(hashlib.sha256((made / file).read_bytes()).hexdigest())
                made.rename(folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except Timeout as error:
        raise SetupError(f"{folder}: another process keeps its lock; end it and try again.") from error
    except OSError as error:
        raise SetupError(
            f"the runtime for {name} cannot be stored in {folder.parent} ({error.strerror}); set {VARIABLE} to a "
            "writable folder."
        ) from error
    return folder / file


def _require_own(folder: Path) -> None:
    """Refuse a cache whose libraries others could have written; those in it are made with mode 0700."""
    with suppress(OSError):  # what cannot be looked at can neither be loaded nor written; the error is raised there
        reason = refusal(folder)
        if reason:
            raise SetupError(f"{folder} holds code that is loaded, but {reason}; set {VARIABLE} to a folder of yours.")


def _compile(name: str, source: Path, library: Path, options: Sequence[str], command: Sequence[str]) -> None:
    command = command or _cpp_command(name, library)
    done = subprocess.run(
        [*command, str(source), "-o", str(library), *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise SetupError(f"the runtime for {name} could not be compiled by {command[0]}: {lines[0].strip()}")


def _cpp_command(name: str, library: Path) -> list[str]:
    compiler = host.compiler()
    if compiler is None:
        raise SetupError(
            f"the runtime for {name} needs a C++ compiler to be built; install g++ or clang++, or set CXX to yours."
        )
    return [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]


def recipe(
    sources: Path,
    *,
    packages: Sequence[str] = (),
    includes: Sequence[Path] = (),
    libraries: Sequence[Path] = (),
    links: Sequence[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """The key of a runtime between TVM and a vendor's library, and the options that compile it.

    Args:
        sources: the folder of the runtime's sources.
        packages: of the registry, whose versions are part of the key, beside TVM's.
        includes: folders of the vendor's headers.
        libraries: folders of the vendor's libraries, which are also searched at run time.
        links: what else is linked, as arguments of the linker.
    """
    folders = [*libraries, *host.library_folders()]
    options = (
        *(f"-isystem{folder}" for folder in dict.fromkeys(map(str, (*includes, *host.includes())))),
        *(f"-L{folder}" for folder in folders),
        "-Wl,--no-as-needed",
        *links,
        *host.options(),
        f"-Wl,-rpath,{':'.join(map(str, folders))}",
    )
    digest = hashlib.sha256()
    for source in (*sorted(sources.iterdir()), *host.headers()):
        digest.update(source.read_bytes())
    versions = [*map(importlib.metadata.version, packages), *host.versions()]
    digest.update("\0".join([tvm_convgrad.__version__, *versions, *options]).encode())
    return digest.hexdigest()[:16], options


def load(name: str, library: Path, entry: str, settings: Mapping[str, str]) -> None:
    """Load a runtime into the process, unless one is there already.

    Args:
        name: of the backend.
        library: the runtime.
        entry: a global function that it has.
        settings: environment variables while it is loaded, where the user has not set them.

    Raises:
        SetupError: the system's loader refuses it.
    """
    if host.is_loaded(name, entry):
        return
    own = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ.update(own)
    try:
        host.load(name, library)
    except OSError as error:
        raise SetupError(
            f"the runtime for {name} cannot be loaded ({error}); `convgrad build-runtime {name}` makes it again."
        ) from error
    finally:
        for key in own:
            del os.environ[key]


__all__ = ["VARIABLE", "build", "built", "cache_folder", "installed_file", "load", "recipe"]
