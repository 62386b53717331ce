# SPDX-License-Identifier: Apache-2.0
"""Loading the library of an artifact, also where the process has loaded an earlier build of the same path.

The dynamic loader compares names before files: it answers a second dlopen of a name with the library that is loaded
under it, although `convgrad build` has replaced the file since, as it does in a notebook. TVM does not close libraries.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ArtifactError

if TYPE_CHECKING:
    import tvm

_MAPS = Path("/proc/self/maps")

_lock = threading.Lock()
_first: dict[str, str] = {}
"""For each name that was given to the loader the digest of the file that it was then."""

_contents: dict[tuple[int, int], str] = {}
"""For each file (device, inode) that was loaded, under any name, the digest that it had."""


def load_library(path: Path, digest: str) -> tvm.runtime.Module:
    """TVM's module of the library at `path`, whose content has this digest.

    Another content than that of the first time is loaded under a name of its own, a link to the file. So is a file
    whose name does not end with .so, by which TVM knows a library.

    Raises:
        ArtifactError: the file was overwritten in place while it was loaded, which the loader takes for the old one.
    """
    import tvm  # here: an artifact is read and checked without TVM
    import tvm_ffi

    name = str(path.resolve())  # as `load_module` passes it to the loader
    with _lock:
        facts = path.stat()
        file = (facts.st_dev, facts.st_ino)
        if _contents.get(file, digest) != digest and _is_mapped(file):
            raise ArtifactError(
                f"{path}: was overwritten in place while an earlier build of it is loaded in this process, which may "
                "crash now; start the process again, and replace a library by renaming, as `convgrad build` does."
            )
        _contents[file] = digest
        if name.endswith(".so") and _first.setdefault(name, digest) == digest:
            return tvm.runtime.load_module(name)
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder) / f"{digest}.so"
            link.symlink_to(name)
            return tvm_ffi.load_module(link)  # that of TVM follows links


def _is_mapped(file: tuple[int, int]) -> bool:
    """Whether a file is in the memory of the process; one that was freed may have given its inode to another."""
    device, inode = file
    place = f"{os.major(device):02x}:{os.minor(device):02x} {inode} "
    return _MAPS.exists() and place in _MAPS.read_text()


__all__ = ["load_library"]
