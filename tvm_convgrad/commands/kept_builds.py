# SPDX-License-Identifier: Apache-2.0
"""Whole builds that are kept: the library of the same model file and options is taken, and nothing is compiled.

Only files that say where all of a model lies are looked up, and no Python source. A look-up does not load TVM, which
takes longer than all else that is left.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.entries import default_path
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.core.kept_objects import VARIABLE, KeptObjects
from tvm_convgrad.offload.registry import NAMES, packages_of
from tvm_convgrad.report.tables import installed_version
from tvm_convgrad.threads import JOBS, available_cores
from tvm_convgrad.training.runtime.artifact import Artifact
from tvm_convgrad.training.runtime.origin import external_files

if TYPE_CHECKING:
    from tvm_convgrad.commands.compilation import ModelOptions

_SUFFIXES = (".pt2", ".onnx")
_ELSEWHERE = b"location"  # in an .onnx file: the key of a tensor that lies in another file
_HEAD_BYTES = 8
_DECIDING = ("CONVGRAD_", "TVM_", "CXX", "CC", "LD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
_SOURCES = ("tvm_convgrad", "relax_ops", "legalize")
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "torch", "onnx", "numpy", "ml_dtypes")
_MEASURED = ("tunings.json", "offload.json")
_COMPILERS = ("g++", "clang++", "c++", "ld")


@dataclass(frozen=True)
class Built:
    """A finished build.

    Attributes:
        artifact: the library.
        tuned: how many kernels and engines were tuned.
        warnings: sentences about the model.
    """

    artifact: Artifact
    tuned: int
    warnings: tuple[str, ...]


class KeptBuilds:
    """The place of one build, by its model and options, among kept objects."""

    def __init__(
        self, kept: KeptObjects, source: ModelOptions, options: Mapping[str, object], store: Path | None
    ) -> None:
        """The build of a model with these options, as they were given, and the tunings in `store`."""
        self._kept, self._source, self._options = kept, source, options
        self._tunings = store or default_path()

    def take(self, output: Path) -> Built | None:
        """Write the library of an equal build to `output`; None if there is none.

        Raises:
            ArtifactError: it cannot be written there.
        """
        key = self._key()
        content = self._kept.get(key) if key else None
        if content is None:
            return None
        begin = _HEAD_BYTES + int.from_bytes(content[:_HEAD_BYTES], "little")
        head = json.loads(content[_HEAD_BYTES:begin])
        write_atomic(output, content[begin:])
        return Built(Artifact(output, head["id"], head["manifest"]), head["tuned"], tuple(head["warnings"]))

    def keep(self, built: Built) -> None:
        """Keep a build, under what decides now: what is measured while a step is compiled is in force for the next."""
        key = self._key()
        if not key:
            return
        artifact = built.artifact
        described = {
            "id": artifact.id,
            "manifest": artifact.manifest,
            "tuned": built.tuned,
            "warnings": list(built.warnings),
        }
        head = json.dumps(described).encode()
        self._kept.put(key, len(head).to_bytes(_HEAD_BYTES, "little") + head + artifact.path.read_bytes())
        self._kept.trim()

    def _key(self) -> str:
        """Of all that decides about the library; empty for a model of which a file cannot be read, or is unknown."""
        path = Path(self._source.source)
        if path.suffix.lower() not in _SUFFIXES:
            return ""
        content = _digest(path)
        others = _external_data(path) if content and path.suffix.lower() == ".onnx" else {}
        if not content or others is None:  # reading the model says what is wrong
            return ""
        measured = [self._tunings, *(self._tunings.with_name(name) for name in _MEASURED), *_default_measurements()]
        deciding = [
            [content, others],
            asdict(self._source),
            self._options,
            [_digest(each) for each in measured],
            list(_programs()),
            {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(_DECIDING) and name not in (VARIABLE, JOBS)
            },
        ]
        # Keys are not sorted: the first of several outputs is the predictions.
        return hashlib.sha256(json.dumps(deciding, default=str).encode()).hexdigest()


def _external_data(path: Path) -> dict[str, str] | None:
    """Digests of the files that hold tensors of an ONNX file; None if one cannot be read."""
    if _ELSEWHERE not in path.read_bytes():
        return {}
    import onnx  # optional, and slow

    try:
        names = external_files(onnx.load(path, load_external_data=False))
    except Exception:  # protobuf's DecodeError is its own; what reads the model says that the file is damaged
        return None
    digests = {name: _digest(path.parent / name) for name in names}
    return digests if all(digests.values()) else None


def _default_measurements() -> list[Path]:
    """What `tune --offload` has measured lies beside the default tunings, whatever --store names."""
    return [default_path().with_name(name) for name in _MEASURED]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _programs() -> Iterator[object]:
    """What makes a library of a model: this CPU, this package, those that read models, TVM, vendors' libraries, g++."""
    yield [platform.machine(), platform.system(), sys.version, sorted(local_features()), available_cores(), _cpu()]
    for name in _SOURCES:
        digest = hashlib.sha256()
        for source in sorted(file for file in _folder(name).rglob("*") if file.suffix in (".py", ".cc", ".cu", ".h")):
            digest.update(f"{source.name} {source.stat().st_size}".encode() + source.read_bytes())
        yield digest.hexdigest()
    yield [(name, installed_version(name)) for name in (*_PACKAGES, *(p for name in NAMES for p in packages_of(name)))]
    for folder in (_folder("tvm"), _folder("tvm_ffi")):
        yield [(str(library), _state(library)) for library in sorted(folder.glob("lib/*"))]
    paths = {name: shutil.which(name) for name in (*_COMPILERS, os.environ.get("CXX", "g++"))}
    yield [(name, _state(Path(path).resolve())) for name, path in sorted(paths.items()) if path]


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    return Path(found.origin).parent if found is not None and found.origin else Path("/nonexistent")


def _state(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _cpu() -> str:
    """This CPU's model, as the system names it: code for the target "native" depends on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model", "cpu family", "CPU part"))))


__all__ = ["Built", "KeptBuilds"]
