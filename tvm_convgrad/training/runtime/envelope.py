# SPDX-License-Identifier: Apache-2.0
"""A sealed file: payload, JSON manifest, and a footer whose SHA-256 covers both; written all at once or not at all.

    payload            any bytes; for an artifact an ELF shared object, which loaders read without minding what follows
    manifest           UTF-8 JSON object
    footer, 64 bytes   <payload length u64> <manifest length u64> <format version u32> <zero u32> <sha256> <magic>

All integers are little-endian. The digest covers payload, manifest and the 24 footer bytes before it, so neither a
lost byte nor a changed one goes unseen, and the manifest can be read without loading the payload.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from tvm_convgrad.core.errors import ArtifactError

Manifest: TypeAlias = dict[str, Any]
"""A JSON object."""

_LENGTHS = struct.Struct("<QQII")
FOOTER_BYTES = _LENGTHS.size + 32 + 8
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Kind:
    """What a sealed file is: `magic` (8 bytes), the one format `version` read and written, a `noun`, its `maker`."""

    magic: bytes
    version: int
    noun: str
    maker: str


@dataclass(frozen=True)
class Sealed:
    """A sealed file that has been checked: its manifest, its SHA-256 in hex, and the length of its payload."""

    path: Path
    manifest: Manifest
    digest: str
    payload_bytes: int

    def payload(self) -> bytes:
        """Read the payload."""
        with self.path.open("rb") as file:
            return file.read(self.payload_bytes)


def seal(kind: Kind, payload: bytes, manifest: Manifest) -> tuple[bytes, str]:
    """Return the bytes of a sealed file and its digest in hex."""
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
    lengths = _LENGTHS.pack(len(payload), len(text), kind.version, 0)
    digest = hashlib.sha256(payload + text + lengths)
    return payload + text + lengths + digest.digest() + kind.magic, digest.hexdigest()


def unseal(kind: Kind, path: Path) -> Sealed:
    """Check the sealed file at `path` from end to end and return its manifest; nothing in it is executed.

    Raises:
        ArtifactError: the file is missing, foreign, truncated, damaged, or of another format version.
    """
    try:
        with path.open("rb") as file:
            return _unseal(kind, path, file)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; make it with `{kind.maker}`.") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path}: this is a directory, not {kind.noun}.") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}).") from error


def _unseal(kind: Kind, path: Path, file: BinaryIO) -> Sealed:
    size = file.seek(0, os.SEEK_END)
    foreign = ArtifactError(
        f"{path}: not {kind.noun}, or a truncated one: its last bytes are not the seal that "
        f"`{kind.maker}` writes; make it again."
    )
    if size < FOOTER_BYTES:
        raise foreign
    file.seek(size - FOOTER_BYTES)
    footer = file.read(FOOTER_BYTES)
    if footer[-8:] != kind.magic:
        raise foreign
    payload_bytes, manifest_bytes, version, _ = _LENGTHS.unpack_from(footer)
    if version != kind.version:
        raise ArtifactError(
            f"{path}: {kind.noun} of format version {version}, and this tvm-convgrad reads version "
            f"{kind.version}; make it again with `{kind.maker}`."
        )
    if payload_bytes + manifest_bytes + FOOTER_BYTES != size:
        raise ArtifactError(
            f"{path}: {kind.noun} of {payload_bytes + manifest_bytes + FOOTER_BYTES} bytes according to its seal, "
            f"but the file has {size}; it was truncated or added to, make it again with `{kind.maker}`."
        )
    file.seek(0)
    digest = hashlib.sha256()
    left = payload_bytes
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise foreign
        digest.update(chunk)
        left -= len(chunk)
    text = file.read(manifest_bytes)
    digest.update(text)
    digest.update(footer[: _LENGTHS.size])
    if digest.digest() != footer[_LENGTHS.size : _LENGTHS.size + 32]:
        raise ArtifactError(
            f"{path}: {kind.noun} whose content does not match its SHA-256; it is damaged, make it again with "
            f"`{kind.maker}`."
        )
    return Sealed(path, _manifest(kind, path, text), digest.hexdigest(), payload_bytes)


def _manifest(kind: Kind, path: Path, text: bytes) -> Manifest:
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: {kind.noun} whose manifest is not JSON; make it again with `{kind.maker}`."
        ) from error
    if not isinstance(manifest, dict):
        raise ArtifactError(
            f"{path}: {kind.noun} whose manifest is not a JSON object; make it again with `{kind.maker}`."
        )
    return manifest
