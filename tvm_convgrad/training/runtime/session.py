# SPDX-License-Identifier: Apache-2.0
"""A compiled training step at work: it holds the state, takes numpy arrays and gives numpy arrays back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.artifact import Artifact, is_for_gpu, load_module, read_artifact
from tvm_convgrad.training.runtime.data import check_classes
from tvm_convgrad.training.runtime.pages import give_back
from tvm_convgrad.training.runtime.schema import Array


class Session:
    """One artifact loaded on the CPU, or the GPU that it was compiled for, with its state.

    Attributes:
        artifact: the checked file with its manifest.
        inputs, target, prediction: what a step takes and gives; `shape[0]` is the batch.
        batch: the fixed number of samples of a step, or None if any number will do.

    Raises:
        ArtifactError: the file is missing, foreign, truncated, damaged, or made for other versions or another CPU.
    """

    def __init__(self, path: str | Path) -> None:
        import tvm
        from tvm import relax

        self.artifact: Artifact = read_artifact(Path(path))
        self.inputs = self.artifact.inputs
        self.target = self.artifact.target
        self.prediction = self.artifact.prediction
        batch = self.inputs[0].shape[0]
        self.batch = batch if isinstance(batch, int) else None
        module = load_module(self.artifact)
        device = tvm.cuda(0) if is_for_gpu(self.artifact.manifest) else tvm.cpu()
        self._tensor = partial(tvm.runtime.tensor, device=device)
        self._vm: Any = relax.VirtualMachine(module, device)
        self._state: Any = self._vm["init"]()
        give_back(self.artifact.path)

    @property
    def classes(self) -> int | None:
        """The number of classes of the model, or None if the targets are not class numbers."""
        if not self.target.dtype.startswith("int"):
            return None
        classes = self.prediction.shape[1]  # [batch, classes, ...], as cross_entropy has it
        return classes if isinstance(classes, int) else None

    @property
    def ignored(self) -> int | None:
        """The class number whose positions have no loss (`ignore_index`), or None."""
        found = self.artifact.options.get("ignore_index")
        return None if found is None else int(found)

    @property
    def state(self) -> dict[str, Array]:
        """A copy of the state by name: parameters, running statistics, optimizer state, counters.

        Setting it takes the same names, shapes and element types, or raises ArtifactError and changes nothing.
        """
        pairs = zip(self.artifact.state, self._state, strict=True)
        return {spec.name: np.array(tensor.numpy()) for spec, tensor in pairs}

    @state.setter
    def state(self, values: dict[str, Array]) -> None:
        specs = self.artifact.state
        if set(values) != {spec.name for spec in specs}:
            missing = sorted({spec.name for spec in specs} - set(values))
            extra = sorted(set(values) - {spec.name for spec in specs})
            raise ArtifactError(
                f"this is no state of this model: missing {missing or 'nothing'}, unknown {extra or 'nothing'}."
            )
        arrays = [spec.accept(values[spec.name], {}, f"state {spec.name!r}") for spec in specs]
        self._state = tuple(self._tensor(array) for array in arrays)

    def reset(self) -> None:
        """Go back to the initial state that the artifact carries."""
        self._state = self._vm["init"]()

    def step(self, x: Any, y: Any, lr: float | None = None) -> tuple[float, Array]:
        """Train on one batch.

        Args:
            x: the input, or a tuple of them, with `batch` samples.
            y: the targets: class numbers or values.
            lr: the learning rate; default: the one given to `build`.

        Returns:
            The loss of the batch before the update, and the predictions.

        Raises:
            ArtifactError: an array of the wrong shape, element type or range.
        """
        extents: dict[str, int] = {}
        arrays = self._accept(x, extents)
        target = self.target.accept(y, extents, "the target")
        if self.classes is not None:
            check_classes(target, self.classes, "the target", self.ignored)
        rate = np.array(self.artifact.options["lr"] if lr is None else lr, "float32")
        loss, predictions, self._state = self._call(
            "step", *map(self._tensor, (*arrays, target, rate)), tuple(self._state)
        )
        return float(loss.numpy()), np.array(predictions.numpy())

    def predict(self, x: Any, batch_size: int = 256) -> Array:
        """The predictions for any number of samples.

        They are computed in batches of the model's fixed batch, or of `batch_size` if that is free. The last batch
        is filled up with copies of its last sample where the batch is fixed, and what they give is dropped.

        Raises:
            ArtifactError: an array of the wrong shape or element type, or a step that does not give one row a sample.
        """
        arrays = self._accept(x, {}, rows=True)
        samples = len(arrays[0])
        if not samples:
            raise ArtifactError("the input has no samples; give at least one.")
        size = self.batch or batch_size
        parts: list[Array] = []
        for start in range(0, samples, size):
            piece = [array[start : start + size] for array in arrays]
            given = len(piece[0])
            if self.batch is not None and given < size:
                piece = [np.concatenate([part, np.repeat(part[-1:], size - given, axis=0)]) for part in piece]
            found = np.array(self._call("predict", *map(self._tensor, piece), tuple(self._state)).numpy())
            if found.shape[:1] != (len(piece[0]),):
                raise ArtifactError(
                    f"{self.artifact.path}: predict gave {list(found.shape)} for {len(piece[0])} samples, so a shape "
                    "of the model fixes another batch; build it anew from a model with a free batch."
                )
            parts.append(found[:given])
        return np.concatenate(parts)

    def _accept(self, x: Any, extents: dict[str, int], *, rows: bool = False) -> list[Array]:
        given = list(x) if isinstance(x, tuple | list) and len(self.inputs) > 1 else [x]
        if len(given) != len(self.inputs):
            raise ArtifactError(
                f"the model takes {len(self.inputs)} inputs ({', '.join(s.name for s in self.inputs)}), "
                f"but {len(given)} were given; pass a tuple."
            )
        arrays = [
            spec.accept(array, extents, f"the input {spec.name!r}", rows=rows)
            for spec, array in zip(self.inputs, given, strict=True)
        ]
        if len({len(array) for array in arrays}) != 1:
            raise ArtifactError(f"the inputs have different numbers of samples, {[len(array) for array in arrays]}.")
        return arrays

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return self._vm[function](*arguments)
        except Exception as error:  # TVM raises many types here; each means that the compiled function refused
            first = str(error).strip().splitlines()
            raise ArtifactError(
                f"{self.artifact.path}: {function} failed: {first[0] if first else type(error).__name__}"
            ) from error
