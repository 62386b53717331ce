# SPDX-License-Identifier: Apache-2.0
"""A training step of ExecuTorch: `prepare FOLDER` makes its program, `step FOLDER THREADS SECONDS` measures.

Run by the Python that has executorch, as a script. `layer` in the place of `step` measures a program without gradients
of its own: those of one convolution. Its kernels for gradients are portable ones, which run on one thread.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from process import LR, batch, measure, norm

PROGRAM = "executorch.pte"
LIBRARIES = (
    "lib/libexecutorch.so",
    "lib/libexecutorch_kernels_optimized.so",
    "lib/libexecutorch_threadpool.so",
    "extension/training/pybindings/_training_lib*.so",
)


def prepare(folder: Path) -> None:
    """The program of joint.pt2, which returns its loss, or of layer.pt2."""
    from executorch.exir import EdgeCompileConfig, to_edge
    from torch.export.experimental import _export_forward_backward

    joint = folder / "joint.pt2"
    program = torch.export.load(joint if joint.exists() else folder / "layer.pt2")
    if joint.exists():
        program = _export_forward_backward(program)
    edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    (folder / PROGRAM).write_bytes(edge.to_executorch().buffer)


def load_step(folder: Path) -> Callable[[], float]:
    """The step: loss and gradients, and the update."""
    from executorch.extension.training import _load_for_executorch_for_training, get_sgd_optimizer

    module = _load_for_executorch_for_training(str(folder / PROGRAM))
    arrays = batch(folder)
    given = (torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))
    optimizer = None

    def step() -> float:
        nonlocal optimizer
        loss = module.forward_backward("forward", given)[0]
        optimizer = optimizer or get_sgd_optimizer(module.named_parameters(), LR)
        optimizer.step(module.named_gradients())
        return float(loss)

    return step


def load_layer(folder: Path) -> Callable[[], float]:
    """Both gradients of a convolution."""
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    module = _load_for_executorch(str(folder / PROGRAM))
    arrays = batch(folder)
    given = tuple(torch.from_numpy(arrays[name]) for name in ("dy", "x", "w"))
    return lambda: module.forward(given, clone_outputs=False)[1].numpy()


def main() -> None:
    """Prepare or measure, as the command line says."""
    warnings.simplefilter("ignore")
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "prepare":
        prepare(folder)
        return
    import executorch.extension.training  # noqa: F401  - before the memory is looked at

    load, read = (load_step, float) if action == "step" else (load_layer, norm)
    torch.set_num_threads(int(sys.argv[3]))
    root = Path(torch.__file__).parents[1] / "executorch"
    libraries = [path for name in LIBRARIES for path in root.glob(name)]
    measure(lambda: load(folder), read, float(sys.argv[4]), libraries, [folder / PROGRAM])


if __name__ == "__main__":
    main()
