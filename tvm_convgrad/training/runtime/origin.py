# SPDX-License-Identifier: Apache-2.0
"""The model file that a step was built of, by the digests of its files, which an export checks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.envelope import Manifest

if TYPE_CHECKING:  # an optional package, slow to import
    import onnx

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Origin:
    """The files of a model: SHA-256 in hex by name, the model's own file first.

    Attributes:
        files: names are relative to the folder of the model's file; behind it are files that hold its tensors.
        function: of a Python file, the name of the function; otherwise "".
        producer: of an ONNX file, what it says has made it, such as "pytorch"; otherwise "".
    """

    files: tuple[tuple[str, str], ...]
    function: str = ""
    producer: str = ""

    @classmethod
    def of(cls, source: str) -> Origin:
        """That of a model as `build` takes it, a file or file.py:function.

        Raises:
            ArtifactError: a file is missing, or is not an ONNX file although it is called so.
        """
        path, function = split_source(source)
        names, producer = [path.name], ""
        if path.suffix.lower() == ".onnx":
            proto = _without_external_data(path)
            names += external_files(proto)
            producer = proto.producer_name
        return cls(tuple((name, _digest(path.parent / name)) for name in names), function, producer)

    @classmethod
    def from_json(cls, entry: Manifest) -> Origin:
        """Read the entry `model` of a manifest."""
        return cls(
            tuple((str(name), str(digest)) for name, digest in entry["files"]), entry["function"], entry["producer"]
        )

    def to_json(self) -> Manifest:
        """The entry `model` of a manifest."""
        return {"files": [list(each) for each in self.files], "function": self.function, "producer": self.producer}

    @property
    def suffix(self) -> str:
        """The suffix of the model's file, such as `.onnx`."""
        return Path(self.files[0][0]).suffix.lower()

    @property
    def has_tensor_files(self) -> bool:
        """Whether tensors of the model lie in other files than its own."""
        return len(self.files) > 1

    def check(self, source: str, step: Path) -> None:
        """Refuse a model that is not the one of the build; its own file may have another name or place.

        Raises:
            ArtifactError: a file has changed or is missing, or another function is named.
        """
        path, function = split_source(source)
        if function != self.function:
            raise ArtifactError(
                f"{source}: {step} was built of the function {self.function!r}, not {function!r}; name that one."
            )
        for number, (name, digest) in enumerate(self.files):
            file = path if number == 0 else path.parent / name
            found = _digest(file)
            if found != digest:
                raise ArtifactError(
                    f"{file}: not the file that {step} was built of, or changed since (SHA-256 {digest[:12]}… at the "
                    f"build, {found[:12]}… now); give the file of the build, or build the step again."
                )


def split_source(source: str) -> tuple[Path, str]:
    """The file of a model as `build` takes it, and the name of the function behind it, or ""."""
    file, _, function = source.rpartition(":")
    return (Path(file), function) if file.endswith(".py") else (Path(source), "")


def external_files(proto: onnx.ModelProto) -> list[str]:
    """The names of the files that hold tensors of an ONNX model, sorted; also those of branches and loops."""
    names = {
        entry.value for tensor in _tensors(proto.graph) for entry in tensor.external_data if entry.key == "location"
    }
    return sorted(names)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _without_external_data(path: Path) -> onnx.ModelProto:
    """The model of an ONNX file without the tensors of other files."""
    import onnx  # optional, and slow

    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError and OS errors share no base
        raise ArtifactError(f"{path}: is missing, or is not a valid ONNX file; check the path of the model.") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); check the path of the model.") from error
    return digest.hexdigest()


__all__ = ["Origin", "external_files", "split_source"]
