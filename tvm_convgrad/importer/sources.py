# SPDX-License-Identifier: Apache-2.0
"""Where programs come from: JSON, text, compressed files of either, TVMC model archives, parameter files."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import program as ir
from tvm_convgrad.importer.json_graph import is_relay_json
from tvm_convgrad.importer.json_nodes import parse_json
from tvm_convgrad.importer.tensors import read_params
from tvm_convgrad.importer.text_parser import parse_text

MAX_BYTES = 1 << 30
Params = Mapping[str, ArrayLike]


@dataclass(frozen=True)
class Loaded:
    """A program and the parameter values that came with it."""

    program: ir.Program
    params: dict[str, ir.Array]


def load(source: str | Path, params: str | Path | Params | None = None) -> Loaded:
    """Read a program.

    Args:
        source: a file (JSON, text, .gz of one of them, TVMC .tar), or the JSON or text itself.
        params: a file of relay.save_param_dict, or arrays by name; an archive's own ones come first.

    Raises:
        ModelError: something cannot be read.
    """
    given = _params(params)
    name, data = _read(source)
    loaded = parse(data, name)
    constants = {key: value for key, value in given.items() if key.startswith("meta[")}
    program = _with_constants(loaded.program, constants) if constants else loaded.program
    return Loaded(program, {**loaded.params, **{key: v for key, v in given.items() if key not in constants}})


def parse(data: bytes, name: str) -> Loaded:
    """The program of a file's bytes."""
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data, name)
    if data[257:262] == b"ustar":
        return _archive(data, name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{name} is not text ({error.reason} at byte {error.start}), and no archive.") from error
    if text.lstrip()[:1] == "{" and not text.lstrip()[1:].lstrip().startswith(("%", "let")):
        if not is_relay_json(text):
            raise ModelError(f"{name} is not JSON of Relay; if newer TVM wrote it, it is not a Relay program.")
        return Loaded(parse_json(text, name), {})
    return Loaded(parse_text(text, name), {})


def looks_like_relay(path: Path) -> bool:
    """Whether a file that is called .json is Relay's rather than Relax's, judged by its beginning."""
    with path.open("rb") as file:
        head = file.read(65536)
    if head[:2] == b"\x1f\x8b":
        return True
    return is_relay_json(head.decode("utf-8", errors="replace"))


def _params(params: str | Path | Params | None) -> dict[str, ir.Array]:
    if params is None:
        return {}
    if isinstance(params, str | Path):
        return read_params(_bounded(Path(params)), str(params))
    return {
        str(name): value.numpy() if hasattr(value, "numpy") else np.asarray(value) for name, value in params.items()
    }


def _read(source: str | Path) -> tuple[str, bytes]:
    if isinstance(source, str) and ("\n" in source or source.lstrip()[:1] in ("{", "#")):
        return "the program", source.encode("utf-8", errors="replace")
    return str(source), _bounded(Path(source))


def _bounded(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path} has more than {MAX_BYTES} bytes.")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path} cannot be read ({reason}); give a file, or the text of a program.") from error


def _unzipped(data: bytes, name: str) -> bytes:
    machine = zlib.decompressobj(wbits=31)
    try:
        text = machine.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ModelError(f"{name} is a damaged .gz file ({error}).") from error
    if machine.unconsumed_tail:
        raise ModelError(f"{name} unpacks to more than {MAX_BYTES} bytes.")
    if not machine.eof:
        raise ModelError(f"{name} is a truncated .gz file.")
    return text


def _archive(data: bytes, name: str) -> Loaded:
    """TVMCModel.save: model.json and model.params (older: mod.json and mod.params) in a tar."""
    found: dict[str, bytes] = {}
    members: list[str] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                members.append(member.name)
                kind = Path(member.name).suffix
                file = tar.extractfile(member) if member.isreg() and kind in (".json", ".params") else None
                if file is not None and member.size <= MAX_BYTES and kind not in found:
                    found[kind] = file.read()
                if len(members) > 1000:
                    raise ModelError(f"{name} has more than 1000 members; it is not an archive of TVMC.")
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        raise ModelError(f"{name} is a damaged archive ({error}).") from error
    if ".json" not in found:
        listed = ", ".join(members[:10]) or "nothing"
        raise ModelError(
            f"{name} holds no model.json (but {listed}): it is not a model of TVMC, but a compiled package?"
        )
    loaded = parse(found[".json"], f"{name}:model.json")
    params = read_params(found[".params"], f"{name}:model.params") if ".params" in found else {}
    return Loaded(replace(loaded.program, source=name), params)


def _with_constants(program: ir.Program, given: Mapping[str, ir.Array]) -> ir.Program:
    """The program with the constants of the metadata that its text refers to."""
    for expr in ir.walk(program):
        if isinstance(expr, ir.Constant) and expr.value is None and expr.name in given:
            object.__setattr__(expr, "value", np.asarray(given[expr.name]))
    return program
