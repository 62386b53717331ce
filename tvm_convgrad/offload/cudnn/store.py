# SPDX-License-Identifier: Apache-2.0
"""The engines that tuning has found best, in a file beside the other tunings, and the context in which calls take them.

An engine and its knobs mean something for one version of cuDNN, on one model of GPU, under the same settings: all that
is part of an entry's key, with the call and our version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm_convgrad
from tvm_convgrad.core.entries import Entries
from tvm_convgrad.core.entries import default_path as tunings
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.offload.cudnn.settings import Settings, settings
from tvm_convgrad.offload.cudnn.tuning_device import TuningDevice

FORMAT = 1
_FIELDS = {
    "engine": int,
    "knobs": list,
    "workspace": int,
    "notes": list,
    "seconds": float,
    "own_seconds": float,
    "candidates": int,
    "thrown_out": list,
}
_BROKE = {"engine": int, "knobs": list}
_THROWN = {**_BROKE, "reason": str}

EngineKey = tuple[int, tuple[tuple[int, int], ...]]
"""An engine's index and knobs."""


@dataclass(frozen=True)
class Winner:
    """An engine that tuning has found best.

    Attributes:
        engine: with its knobs.
        gain: how many times faster it was than the heuristics' first that may be used.
        device: that it was measured on.
        thrown_out: engines that computed wrong or wrote outside, as index and knobs.
    """

    engine: Listed
    gain: float
    device: str
    thrown_out: frozenset[EngineKey]


class EngineStore:
    """The tuned engines in a file.

    Raises:
        ArtifactError: the file is damaged, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = Entries(path, FORMAT, "engines of cuDNN", _wrong, ", or build with --no-tuned")

    def __len__(self) -> int:
        return len(self._entries)

    def devices(self, call: Call, arch: str, version: int, settings: Settings) -> list[str]:
        """The GPUs of an architecture on which a call was tuned."""
        begin = _key(call, arch, version, settings, "")
        return sorted(key.removeprefix(begin) for key in self._entries if key.startswith(begin))

    def winner(self, call: Call, arch: str, version: int, settings: Settings, device: str) -> Winner | None:
        """What was found best for a call on a device, or None if it was not tuned there."""
        entry = self._entries.get(_key(call, arch, version, settings, device))
        if entry is None:
            return None
        engine = Listed(entry["engine"], entry["workspace"], tuple(entry["notes"]), _knobs(entry["knobs"]), "")
        thrown = frozenset((each["engine"], _knobs(each["knobs"])) for each in entry["thrown_out"])
        return Winner(engine, entry["own_seconds"] / entry["seconds"], device, thrown)

    def record(
        self,
        call: Call,
        device: TuningDevice,
        settings: Settings,
        engine: Listed,
        thrown_out: Sequence[tuple[Listed, str]],
        **measured: float | int,
    ) -> None:
        """Keep the best engine of a call on a device's device; other processes' entries stay.

        Args:
            thrown_out: engines that must not be used, each with the reason.
            measured: its `seconds`, `own_seconds` of the heuristics' first, and how many `candidates` were timed.

        Raises:
            ArtifactError: the file is damaged or cannot be written, or another process keeps its lock.
        """
        entry = {
            "engine": engine.index,
            "knobs": [list(knob) for knob in engine.knobs],
            "workspace": engine.workspace,
            "notes": list(engine.notes),
            "thrown_out": [
                {"engine": each.index, "knobs": [list(knob) for knob in each.knobs], "reason": reason}
                for each, reason in thrown_out
            ],
            **measured,
        }
        self._entries.put(_key(call, device.arch, device.version, settings, device.device), entry)

    def broke(self, call: Call, arch: str, version: int) -> frozenset[EngineKey]:
        """Engines after which a GPU of an architecture answered its process no more when the call was tuned."""
        begin = _broke_key(call, arch, version, "")
        entries = [self._entries.get(key) for key in self._entries if key.startswith(begin)]
        return frozenset((each["engine"], _knobs(each["knobs"])) for entry in entries for each in entry["broke"])

    def record_broke(self, call: Call, device: TuningDevice, engine: Listed) -> None:
        """Keep that an engine broke the GPU, so that no later tuning runs it again; errors as `record`."""
        every = sorted({*self.broke(call, device.arch, device.version), (engine.index, engine.knobs)})
        entry = {"broke": [{"engine": index, "knobs": [list(knob) for knob in knobs]} for index, knobs in every]}
        self._entries.put(_broke_key(call, device.arch, device.version, device.device), entry)


def default_path() -> Path:
    """Beside the tunings of kernels."""
    return beside(tunings())


def beside(tunings: Path) -> Path:
    """The file of engines that belongs to a file of tunings."""
    return tunings.with_name(f"{tunings.stem}.cudnn.json")


_UNSAID = "unsaid"
_store: ContextVar[EngineStore | Literal["unsaid"] | None] = ContextVar("tvm_convgrad_engines", default="unsaid")


@contextmanager
def use_engines(store: EngineStore | None) -> Iterator[None]:
    """Let calls that are compiled inside the block take tuned engines; with None cuDNN's heuristics choose.

    Outside of any block these choose too, unless the settings are `cached`: then the user's own store is read.
    """
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def store_in_use() -> EngineStore | None:
    """The tuned engines that calls which are compiled now take, if any."""
    found = _store.get()
    if found == _UNSAID:
        return EngineStore(default_path()) if settings().cached else None
    return found if isinstance(found, EngineStore) else None


def only_tuned() -> bool:
    """Whether calls that are compiled now may take tuned engines only."""
    return settings().cached and _store.get() is not None


def _key(call: Call, arch: str, version: int, settings: Settings, device: str) -> str:
    """The device is last: programs are compiled where there is none, and then take those of an architecture."""
    ours = f"tvm-convgrad {tvm_convgrad.__version__}"
    return f"{call} | cuDNN {version} | {settings.allowed} | {ours} | {arch} | {device}"


def _broke_key(call: Call, arch: str, version: int, device: str) -> str:
    """Whatever the settings are."""
    return f"broke the GPU: {call} | cuDNN {version} | tvm-convgrad {tvm_convgrad.__version__} | {arch} | {device}"


def _knobs(plain: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((key, value) for key, value in plain)


def _wrong(entry: Any) -> str:
    if isinstance(entry, dict) and set(entry) == {"broke"}:
        every = entry["broke"] if isinstance(entry["broke"], list) else [None]
        return next(filter(None, (_wrong_fields(each, _BROKE) for each in every)), "")
    wrong = _wrong_fields(entry, _FIELDS)
    if wrong:
        return wrong
    if not all(isinstance(note, str) for note in entry["notes"]):
        return "notes are not strings"
    if not (entry["seconds"] > 0 and entry["own_seconds"] > 0 and entry["workspace"] >= 0):
        return "a time that is not positive, or a workspace that is negative"
    return next(filter(None, (_wrong_fields(each, _THROWN) for each in entry["thrown_out"])), "")


def _wrong_fields(entry: Any, fields: dict[str, type]) -> str:
    if not isinstance(entry, dict) or set(entry) != set(fields):
        return f"not the fields {', '.join(fields)}"
    for name, kind in fields.items():
        if type(entry[name]) is not kind:
            return f"{name} is not of type {kind.__name__}"
    pairs = all(isinstance(knob, list) and [type(each) for each in knob] == [int, int] for knob in entry["knobs"])
    return "" if pairs else "knobs are not pairs of numbers"


__all__ = ["EngineStore", "Winner", "beside", "default_path", "only_tuned", "store_in_use", "use_engines"]
