# SPDX-License-Identifier: Apache-2.0
"""A model that compiles in two seconds and data that it learns: for tests of all that comes after the compilation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

BATCH, CLASSES, SIZE = 8, 3, 6

SOURCE = f"""
from tvm import relax


def make(batch={BATCH}):
    if batch == "dynamic":
        from tvm.tirx import Var
        batch = Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((batch, 1, {SIZE}, {SIZE}), "float32"))
    shapes = {{"w": (4, 1, 3, 3), "gamma": (4,), "beta": (4,), "mean": (4,), "var": (4,), "out": (4, {CLASSES})}}
    p = {{name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}}
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            h = builder.emit(relax.op.nn.conv2d(x, p["w"], strides=2, padding=1))
            h = builder.emit(relax.op.nn.batch_norm(h, p["gamma"], p["beta"], p["mean"], p["var"], axis=1)[0])
            h = builder.emit(relax.op.nn.relu(h))
            h = builder.emit(relax.op.mean(h, [2, 3]))
            h = builder.emit_output(relax.op.matmul(h, p["out"]))
        builder.emit_func_output(h)
    return builder.get()
"""


def write_model(folder: Path) -> str:
    """Write the model into `folder`; the argument that commands take for it."""
    path = folder / "net.py"
    path.write_text(SOURCE)
    return f"{path}:make"


def make_arrays(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise, with a bright, a dark or a striped picture under it: class 0, 1, 2."""
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, samples)
    stripes = np.where(np.arange(SIZE) % 2, 2.0, -2.0)
    base = np.stack([np.full((SIZE, SIZE), 1.0), np.full((SIZE, SIZE), -1.0), np.tile(stripes, (SIZE, 1))])
    x = base[y][:, None] + random.normal(0, 0.5, (samples, 1, SIZE, SIZE))
    return x.astype("float32"), y.astype("int64")


def write_data(path: Path, train: int = 53, test: int = 21) -> Path:
    """Write an .npz with training and test arrays; neither number is a multiple of the batch."""
    (x, y), (x_test, y_test) = make_arrays(train, 0), make_arrays(test, 1)
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return path


def with_own_loss() -> str:
    """SOURCE with the cross-entropy in it: the model takes its labels, too, and returns (loss, scores)."""
    source = SOURCE.replace("[x, *p.values()]", '[x, y, *p.values()], {"num_input": 2}')
    source = source.replace("    shapes =", '    y = relax.Var("y", relax.TensorType((batch,), "int64"))\n    shapes =')
    return source.replace("        builder.emit_func_output(h)\n", OWN_LOSS.lstrip("\n"))


OWN_LOSS = """
            label = relax.op.expand_dims(y, 1)
            found = relax.op.gather_elements(relax.op.nn.log_softmax(h), label, 1)
            loss = builder.emit_output(relax.op.negative(relax.op.mean(found)))
        builder.emit_func_output(relax.Tuple([loss, h]))
"""
