# SPDX-License-Identifier: Apache-2.0
"""1,000 damaged artifacts and checkpoints under ASan and UBSan: a refusal each, and the session still trains."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tvm_convgrad.device.files import INCLUDE, SOURCES, Runtime
from tvm_convgrad.training.runtime.artifact import ARTIFACT, inspect_artifact
from tvm_convgrad.training.runtime.checkpoint import CHECKPOINT, Progress, save
from tvm_convgrad.training.runtime.envelope import FOOTER_BYTES, Kind, Manifest, seal, unseal
from tvm_convgrad.training.runtime.session import Session

PLAIN, SEALED = 300, 200
"""Of each kind of file: damage that the seal shows, and damage under a right seal."""
VALUES: tuple[object, ...] = (None, True, -1, 2**62, 1e308, "", "x" * 5000, [], {}, [[]], [2**40, 2**40], [-3])


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, with the library in it."""
    runtime, program = Runtime.installed(), tmp_path_factory.mktemp("damage") / "damage"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0", "-g1"]
    includes = [f"-I{INCLUDE}", f"-I{SOURCES}", "-isystem", str(runtime.include), '-DCONVGRAD_TVM_VERSION="0.27.0"']
    main = program.with_suffix(".o")
    subprocess.run(["cc", *sanitizers, *includes[:1], "-c", Path(__file__).parent / "damage.c", "-o", main], check=True)
    libraries = [runtime.tvm, runtime.ffi, *(f"-Wl,-rpath,{each.parent}" for each in (runtime.tvm, runtime.ffi))]
    command = ["c++", "-std=c++17", *sanitizers, *includes, main, *sorted(SOURCES.glob("*.cc")), "-o", program]
    subprocess.run([*command, "-Wl,--no-as-needed", *libraries], check=True)
    return program


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(manifest: Manifest, path: tuple[Any, ...], value: object) -> Manifest:
    found = copy.deepcopy(manifest)
    holder: Any = found
    for key in path[:-1]:
        holder = holder[key]
    if value is Ellipsis:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return found


def plainly_damaged(content: bytes, dice: random.Random) -> bytes:
    """Flipped bits, a part, or something added, in the seal and the manifest as often as elsewhere."""
    kind = dice.randrange(4)
    if kind == 0:
        return content[: dice.choice([dice.randrange(len(content)), len(content) - dice.randrange(1, 200)])]
    if kind == 1:
        return dice.randbytes(dice.randrange(1, 99)) + content
    if kind == 2:
        return content + dice.randbytes(dice.randrange(1, 99))
    damaged = bytearray(content)
    for _ in range(dice.randrange(1, 4)):
        place = dice.choice([dice.randrange(len(content)), len(content) - 1 - dice.randrange(FOOTER_BYTES)])
        damaged[place] ^= 1 << dice.randrange(8)
    return bytes(damaged) if bytes(damaged) != content else content[:-1]


def read_by_c(path: tuple[Any, ...]) -> bool:
    """Whether the C library needs this place of the manifest of an artifact."""
    top = (path[0], *(path[1:2] if path[0] in ("versions", "schema", "options") else ()))
    needed = [("versions", "tvm"), ("versions", "tvm_ffi"), ("versions",), ("target",), ("cpu_features",), ("schema",)]
    needed += [("schema", name) for name in ("inputs", "prediction", "state")] + [("options",), ("options", "lr")]
    return top in needed


def sealed_damage(kind: Kind, payload: bytes, manifest: Manifest, dice: random.Random) -> Iterator[bytes]:
    """Manifests that do not describe the payload."""
    for text in (b"[" * 2_000_000, b"{", b"[]", b"\xff\xfe", b'{"a":' * 100_000, b"", b'{"schema": 1e999}', b'"' * 9):
        yield from_text(kind, payload, text)
    found = [path for path in places(manifest) if kind is CHECKPOINT or read_by_c(path)]
    while True:
        path = dice.choice(found)
        before: Any = manifest
        for key in path:
            before = before[key]
        value = dice.choice([..., *VALUES])
        if value is not ... and (type(value) is type(before) or harmless(path, value)):
            continue
        if value is ... and harmless(path, ...):
            continue
        yield seal(kind, payload, changed(manifest, path, value))[0]


def harmless(path: tuple[Any, ...], value: object) -> bool:
    """What may be missing, or of another value, without a difference to the C library."""
    if path[-1] in ("role", "epoch", "position", "micro_batches", "data") and value is ...:
        return True  # a role "" changes which tensors are parameters, a fresh run is at 0; "data" is checked below
    return path[-1] == "lr" and isinstance(value, int | float) and not isinstance(value, bool)


def from_text(kind: Kind, payload: bytes, text: bytes) -> bytes:
    """A file with this text for a manifest, under a right seal."""
    lengths = struct.pack("<QQII", len(payload), len(text), kind.version, 0)
    return payload + text + lengths + hashlib.sha256(payload + text + lengths).digest() + kind.magic


def test_damaged_files_are_refused(damage: Path, tiny_step: Path, tmp_path: Path) -> None:
    dice = random.Random(22)
    artifact, session = inspect_artifact(tiny_step), Session(tiny_step)
    x, y = tiny.make_arrays(tiny.BATCH, 0)
    losses = [session.step(x, y)[0] for _ in range(3)]
    progress = Progress(artifact.id, "d" * 64, 3, tiny.BATCH, 0.1, losses=losses)
    checkpoint = unseal(CHECKPOINT, save(tmp_path, progress, session.state))
    lines = []
    for word, kind, path in (("open", ARTIFACT, tiny_step), ("load", CHECKPOINT, checkpoint.path)):
        content, sealed = path.read_bytes(), unseal(kind, path)
        files = [plainly_damaged(content, dice) for _ in range(PLAIN)]
        under_seal = sealed_damage(kind, sealed.payload(), sealed.manifest, dice)
        files += [next(under_seal) for _ in range(SEALED)]
        for number, damaged in enumerate(files):
            place = tmp_path / f"{word}-{number}"
            place.write_bytes(damaged)
            lines.append(f"{word} {place}")
    options = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        [damage, tiny_step],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | options,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *answers, last = done.stdout.splitlines()
    assert len(answers) == len(lines) == 2 * (PLAIN + SEALED)
    taken = [line for line, answer in zip(lines, answers, strict=True) if not answer.startswith("refused ")]
    assert taken == [], [shown(Path(line.split()[1])) for line in taken[:3]]
    fresh = Session(tiny_step)
    expected = fresh.step(np.zeros_like(x), np.zeros_like(y))[0]
    assert last == f"loss {expected:.9g}"


def shown(path: Path) -> str:
    """The end of a file that should have been refused."""
    return json.dumps(path.read_bytes()[-1500:-FOOTER_BYTES].decode(errors="replace"))
