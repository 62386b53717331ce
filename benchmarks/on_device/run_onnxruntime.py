# SPDX-License-Identifier: Apache-2.0
"""A training step of ONNX Runtime: `prepare FOLDER` makes its artifacts, `step FOLDER THREADS SECONDS` measures.

Run by the Python that has onnxruntime-training, as a script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import onnxruntime
from onnxruntime.training import api, artifacts
from process import LR, batch, measure


def prepare(folder: Path) -> None:
    """Gradients, optimizer and checkpoint of model.onnx; running statistics are not trained."""
    import onnx

    model = onnx.load(folder / "model.onnx")
    (folder / "onnxruntime").mkdir(exist_ok=True)
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    frozen = {name for node in norms for name in node.input[3:5]}
    used = {name for node in model.graph.node for name in node.input}
    floats = {each.name for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT}
    artifacts.generate_artifacts(
        model,
        requires_grad=sorted(floats & used - frozen - constants(model)),
        frozen_params=sorted(frozen),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=str(folder / "onnxruntime"),
    )


def constants(model) -> set[str]:
    """Initializers without extents, such as bounds of a Clip."""
    return {each.name for each in model.graph.initializer if not each.dims}


def load(folder: Path, threads: int) -> Callable[[], float]:
    """The step: gradients, update, and the gradients cleared."""
    made = folder / "onnxruntime"
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    state = api.CheckpointState.load_checkpoint(str(made / "checkpoint"))
    module = api.Module(str(made / "training_model.onnx"), state, device="cpu", session_options=settings)
    optimizer = api.Optimizer(str(made / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(LR)
    module.train()
    arrays = batch(folder)

    def step() -> float:
        loss = module(arrays["x"], arrays["y"])
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def main() -> None:
    """Prepare or measure, as the command line says."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "prepare":
        prepare(folder)
        return
    library = Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*.so")
    made = [folder / "onnxruntime" / name for name in ("training_model.onnx", "optimizer_model.onnx", "checkpoint")]
    measure(lambda: load(folder, int(sys.argv[3])), float, float(sys.argv[4]), library, made)


if __name__ == "__main__":
    main()
