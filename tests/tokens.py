# SPDX-License-Identifier: Apache-2.0
"""Small models of tokens, which compile in a second: rows of a table, averaged over those that are no padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.conftest import build_tiny

BATCH, LENGTH, WORDS, KINDS, CLASSES = 4, 5, 10, 7, 3
PADDING = -100

SOURCE = f"""
from tvm import relax
from tvm.relax import op


def make(batch={BATCH}):
    if batch == "dynamic":
        from tvm.tirx import Var
        batch = Var("n", "int64")
    builder = relax.BlockBuilder()
    emit = builder.emit
    tokens = relax.Var("tokens", relax.TensorType((batch, {LENGTH}), "int32"))
    shapes = {{"words": ({WORDS}, 4), "kinds": ({KINDS}, 4), "out": (4, {CLASSES})}}
    p = {{name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}}
    with builder.function("main", [tokens, *p.values()]):
        with builder.dataflow():
            rows = ROWS
            used = emit(op.astype(emit(op.not_equal(tokens, relax.const(0, "int32"))), "float32"))
            h = emit(op.mean(emit(op.multiply(rows, emit(op.expand_dims(used, -1)))), [1]))
            h = builder.emit_output(op.matmul(h, p["out"]))
        builder.emit_func_output(h)
    return builder.get()
"""

ROWS = {
    "direct": 'emit(op.take(p["words"], tokens, 0))',
    "both": 'emit(op.add(emit(op.take(p["words"], tokens, 0)), emit(op.take(p["kinds"], tokens, 0))))',
    "clipped": f'emit(op.take(p["words"], emit(op.clip(tokens, 0, {WORDS - 1})), 0))',
    "padded": f"""emit(op.take(p["words"], emit(op.where(
                emit(op.not_equal(tokens, relax.const({PADDING}, "int32"))), tokens, relax.const(0, "int32"))), 0))""",
    "next": 'emit(op.take(p["words"], emit(op.add(tokens, relax.const(1, "int32"))), 0))',
}
"""What the model reads: rows of one table, of two, at clipped places, row 0 for PADDING, at the place behind each."""


def write_model(folder: Path, rows: str = "direct") -> str:
    """Write a model into `folder`; the argument that commands take for it."""
    path = folder / f"{rows}.py"
    path.write_text(SOURCE.replace("ROWS", ROWS[rows]))
    return f"{path}:make"


def build(folder: Path, rows: str = "direct", batch: int | str | None = None, **options: object) -> Path:
    """Compile a step of a model."""
    return build_tiny(write_model(folder, rows), folder / "step.so", batch, **options)


def make_arrays(samples: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that all models have, and classes."""
    random = np.random.default_rng(samples)
    tokens = random.integers(0, KINDS, (samples, LENGTH)).astype("int32")
    return tokens, random.integers(0, CLASSES, samples)
