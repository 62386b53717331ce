# SPDX-License-Identifier: Apache-2.0
"""Failed compilations, kept in the store: a later process has their error at once, and does not try again for a day.

A record is found by the key of the library and the compiler: another compiler, TVM or source tries again.
`forget_failures` and `convgrad env --forget-failures` remove all records.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from tvm_convgrad.bridge.compiler import compiler_identity
from tvm_convgrad.bridge.job import digest
from tvm_convgrad.core.errors import ConvGradError, SetupError
from tvm_convgrad.core.kept_objects import KeptObjects

LASTING_SECONDS = 24 * 3600.0
"""Of a record. What the system lacked, such as memory or a disk's space, is in no key."""

_BEGIN = b'{"failed at": '
_REMEDY = "This is kept for a day; `convgrad env --forget-failures` lets it be tried again now"


def failure_key(key: str) -> str:
    """What the failure of a library is found by."""
    return digest(["failure", key, compiler_identity()])


def answer_of(error: ConvGradError) -> bytes:
    """An error as an answer in the place of a library."""
    return json.dumps({"error": type(error).__name__, "text": str(error)}).encode()


def keep_failure(kept: KeptObjects, key: str, error: ConvGradError) -> None:
    """Record that the library of a key could not be made, and why."""
    text = f"{str(error).rstrip('.')}. {_REMEDY}."
    record = {"failed at": time.time(), "error": type(error).__name__, "text": text}
    kept.put(failure_key(key), json.dumps(record).encode())


def kept_failure(kept: KeptObjects, key: str) -> bytes | None:
    """The answer of a library that could not be made within the last day, or None."""
    content = kept.get(failure_key(key))
    if content is None or not 0 <= time.time() - json.loads(content)["failed at"] < LASTING_SECONDS:
        return None
    return content


def forget_failures(folder: Path | None = None) -> int:
    """Remove all records of a store, None is the default one; how many were removed.

    Raises:
        SetupError: one cannot be removed.
    """
    try:
        return KeptObjects(folder).remove(_BEGIN)
    except OSError as error:
        raise SetupError(f"{error.filename}: it cannot be removed ({error.strerror})") from error


__all__ = ["LASTING_SECONDS", "answer_of", "failure_key", "forget_failures", "keep_failure", "kept_failure"]
