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
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tvm_convgrad.errors import ArtifactError

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
    manifest: dict[str, Any]
    digest: str
    payload_bytes: int

    def payload(self) -> bytes:
        """Read the payload."""
        with self.path.open("rb") as file:
            return file.read(self.payload_bytes)


def seal(kind: Kind, payload: bytes, manifest: dict[str, Any]) -> tuple[bytes, str]:
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
        f"{path}: not {kind.noun}, or one that was cut short: its last bytes are not the seal that "
        f"`{kind.maker}` writes; make it anew."
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
            f"{kind.version}; make it anew with `{kind.maker}`."
        )
    if payload_bytes + manifest_bytes + FOOTER_BYTES != size:
        raise ArtifactError(
            f"{path}: {kind.noun} of {payload_bytes + manifest_bytes + FOOTER_BYTES} bytes according to its seal, "
            f"but the file has {size}; it was cut or added to, make it anew with `{kind.maker}`."
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
            f"{path}: {kind.noun} whose content does not match its SHA-256; it is damaged, make it anew with "
            f"`{kind.maker}`."
        )
    return Sealed(path, json.loads(text), digest.hexdigest(), payload_bytes)


def check_destination(path: Path) -> None:
    """Refuse a path that no file can be written to, before the work whose result it is to hold.

    Raises:
        ArtifactError: the folder does not exist, or `path` is a folder itself.
    """
    if not path.parent.is_dir():
        raise ArtifactError(f"{path}: the folder {path.parent} does not exist; make it first.")
    if path.is_dir():
        raise ArtifactError(f"{path}: this is a folder; give the name of the file to write.")


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a crash at any moment leaves the old file or the new one, never a part.

    The bytes go to a hidden file beside `path`, which is flushed to the disk and then renamed. What an earlier
    process on this host left there when it was killed is removed.

    Raises:
        ArtifactError: the folder is missing or cannot be written, or the disk is full.
    """
    host = re.sub(r"\W", "_", socket.gethostname())
    temporary = path.with_name(f".{path.name}.{host}.{os.getpid()}.tmp")
    try:
        for stale in path.parent.glob(f".{path.name}.{host}.*.tmp"):
            if not _alive(int(stale.name.split(".")[-2])):
                stale.unlink(missing_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{path}: cannot be written ({error.strerror}); is the folder there, and writable?") from (
            error
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to somebody else
        return True
    return True
