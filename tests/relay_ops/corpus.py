# SPDX-License-Identifier: Apache-2.0
"""Finds the programs that a real Relay wrote, in ../shared/relay_corpus (or $TVM_CONVGRAD_RELAY_CORPUS)."""

from __future__ import annotations

import gzip
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("TVM_CONVGRAD_RELAY_CORPUS", Path(__file__).parents[3] / "shared" / "relay_corpus"))
ABSENT = "the corpus of Relay programs is not here; set TVM_CONVGRAD_RELAY_CORPUS to its folder"


@cache
def entries(kind: str) -> list[dict[str, Any]]:
    """The entries of a kind; none where the corpus is absent."""
    if not (FOLDER / "index.json").is_file():
        return []
    found = json.loads((FOLDER / "index.json").read_text())["entries"]
    return [entry for entry in found if entry["kind"] == kind]


def text(name: str) -> str:
    """A file of the corpus, unpacked."""
    data = (FOLDER / name).read_bytes()
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode()
