# SPDX-License-Identifier: Apache-2.0
"""The corpus of Relay programs at ../shared/relay_corpus (or $TVM_CONVGRAD_RELAY_CORPUS): reading and checking it."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(os.environ.get("TVM_CONVGRAD_RELAY_CORPUS", Path(__file__).parents[3] / "shared" / "relay_corpus"))
ABSENT = f"the corpus of Relay programs is not at {FOLDER}; set TVM_CONVGRAD_RELAY_CORPUS to its folder"
SINGLE, NET, NARROW = 1e-5, 1e-4, 1e-2
"""Largest error, as a share of the largest number of an output: of single operators, of networks, of float16."""


@dataclass(frozen=True)
class Entry:
    """One program of the corpus: what its index says."""

    folder: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def single(self) -> bool:
        return str(self.about["kind"]).startswith("op")

    def path(self, form: str) -> Path | None:
        """The file of a form: json, text, tar, params_file or io; None if it has none."""
        found = self.about.get(form)
        return self.folder / found if found else None

    @property
    def forms(self) -> list[str]:
        return [form for form in ("json", "text", "tar") if self.about.get(form)]


@cache
def entries(folder: Path = FOLDER) -> list[Entry]:
    index = folder / "index.json"
    if not index.exists():
        return []
    return [Entry(folder, about) for about in json.loads(index.read_text())["entries"]]


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def arguments(entry: Entry, module: Any, params: dict[str, Any]) -> list[Any]:
    """The values of the parameters of `main`: recorded inputs, and the parameters of the file."""
    stored = entry.path("io")
    assert stored is not None
    with np.load(stored) as archive:
        inputs = {key[3:]: archive[key] for key in archive.files if key.startswith("in:")}
    names = entry.about.get("param_order")
    values = []
    for index, param in enumerate(module["main"].params):
        name = str(param.name)
        old = names[index] if names else name
        found = next((source[key] for source in (params, inputs) for key in (name, old) if key in source), None)
        assert found is not None, f"{entry.name}: no value for {name}"
        values.append(found)
    return values


def expected(entry: Entry) -> list[np.ndarray[Any, Any]]:
    stored = entry.path("io")
    assert stored is not None
    with np.load(stored) as archive:
        return [archive[f"out:{i}"] for i in range(sum(key.startswith("out:") for key in archive.files))]


def flat(result: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays of a result, of nested tuples too."""
    if hasattr(result, "numpy"):
        return [result.numpy()]
    return [array for item in result for array in flat(item)]


def run(module: Any, values: list[Any], target: Any) -> list[np.ndarray[Any, Any]]:
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.compile(module, target=target), tvm.cpu())
    return flat(machine["main"](*[tvm.runtime.tensor(np.ascontiguousarray(value)) for value in values]))


def error_of(entry: Entry, results: list[np.ndarray[Any, Any]]) -> float:
    """The largest error of any output, as a share of its largest number; infinite if something is missing."""
    wanted = expected(entry)
    if len(wanted) != len(results):
        return float("inf")
    worst = 0.0
    for want, have in zip(wanted, results, strict=True):
        narrow = tolerance(entry) == NARROW and have.dtype == "float16"  # recorded in float32
        if want.shape != have.shape or (want.dtype != have.dtype and not narrow):
            return float("inf")
        wide, result = want.astype("float64"), have.astype("float64")
        if not np.all(np.isfinite(result)):
            return float("inf")
        scale = max(float(np.max(np.abs(wide), initial=0.0)), 1e-30)
        worst = max(worst, float(np.max(np.abs(result - wide), initial=0.0)) / scale)
    return worst


def tolerance(entry: Entry) -> float:
    if "fp16" in entry.name:
        return NARROW
    return SINGLE if entry.single else NET


def check(entry: Entry, form: str, target: str = "native") -> dict[str, Any]:
    """Import, compile, run and compare: what came of it, as plain values."""
    from tvm_convgrad.core.errors import ConvGradError
    from tvm_convgrad.importer import import_relay
    from tvm_convgrad.training.compile.targets import parse_target

    path, params = entry.path(form), entry.path("params_file")
    assert path is not None
    start = time.perf_counter()
    report: dict[str, Any] = {"name": entry.name, "form": form}
    try:
        imported = import_relay(path, params)
        report |= {"lifted": imported.lifted, "import_s": time.perf_counter() - start}
        results = run(imported.module, arguments(entry, imported.module, imported.params), parse_target(target))
    except ConvGradError as error:
        return report | {"state": "refused", "why": str(error)}
    except Exception as error:
        return report | {"state": "failed", "why": f"{type(error).__name__}: {str(error)[-600:]}"}
    error = error_of(entry, results)
    report |= {"error": error, "seconds": time.perf_counter() - start}
    return report | {"state": "right" if error <= tolerance(entry) else "wrong"}
