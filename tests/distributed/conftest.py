# SPDX-License-Identifier: Apache-2.0
"""A tiny step in two, with a free batch, batch norm, dropout and Adam: all that a state can have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.conftest import build_tiny


@pytest.fixture(scope="session")
def full_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    pooled = "            h = builder.emit(relax.op.mean(h, [2, 3]))\n"
    dropped = "            h = builder.emit(relax.op.nn.dropout(h, 0.2)[0])\n"
    model = folder / "net.py"
    model.write_text(tiny.SOURCE.replace(pooled, pooled + dropped))
    return build_tiny(
        f"{model}:make", folder / "step.so", batch="dynamic", optimizer="adamw", lr=0.01, clip_norm=1.0, split=True
    )


@pytest.fixture(scope="session")
def full_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """65 training, 10 validation and 21 test samples."""
    path = tmp_path_factory.mktemp("data") / "data.npz"
    parts = {part: tiny.make_arrays(count, seed) for seed, (part, count) in enumerate(COUNTS.items())}
    arrays = {f"{name}_{part}": array for part, pair in parts.items() for name, array in zip("xy", pair, strict=True)}
    np.savez(path, **arrays)
    return path


COUNTS = {"train": 65, "val": 10, "test": 21}
