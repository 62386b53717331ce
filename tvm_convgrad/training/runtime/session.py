# SPDX-License-Identifier: Apache-2.0
"""A loaded step or inference library: it holds the state, takes arrays of any library, gives numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.core.flat import FlatLayout
from tvm_convgrad.core.state_names import LEFT_OUT_UPDATES, LOSS_SCALE
from tvm_convgrad.threads import limit_thread, use_threads
from tvm_convgrad.training.runtime.arrays import array_of, as_array, tensor_of
from tvm_convgrad.training.runtime.artifact import Artifact, is_for_gpu, load_module, read_artifact
from tvm_convgrad.training.runtime.pages import give_back
from tvm_convgrad.training.runtime.schema import Array, TensorSpec

Instrument: TypeAlias = Callable[..., int]
"""What TVM's virtual machine calls around each call; it returns 0 to go on."""


class Gradients(NamedTuple):
    """The result of `Session.gradients`: the loss, the predictions, and all gradients in one flat float32 array."""

    loss: float
    predictions: Array
    flat: Array


class Session:
    """A library of `convgrad build`, loaded on the CPU or GPU that it was compiled for, with its training state.

    Arrays of numpy, PyTorch, JAX or TVM are accepted and passed by DLPack without a copy. An array is copied if it has
    another element type, is not contiguous, is not aligned to 64 bytes, or is a read-only numpy array. Results are new
    arrays, except for `tensors` and `statistics`, which are views of the state.

    Attributes:
        artifact: the verified file with its manifest.
        inputs, prediction: name, shape and element type of each input and of the predictions; `shape[0]` is the batch.
        batch: the number of samples of a step, or None if it is not fixed.
        threads: the number of threads of TVM's thread pool, of which a process has one.
        on_gpu: whether it computes on a GPU.

    Args:
        path: the file that `convgrad build` or `convgrad export --inference` wrote.
        threads: number of threads. None means the size of TVM's pool if it exists already, else TVM_NUM_THREADS, else
            the number of cores (divided among the processes of one torchrun). Results do not depend on it.

    Raises:
        ArtifactError: the file is missing, damaged, no library of this package, or built for other versions or a CPU
            with other instruction sets.
        SetupError: TVM's pool exists with a number of threads other than `threads`, or there are fewer cores.

    Example:
        session = Session("step.so")
        loss, scores = session.step(images, labels, lr=0.05)
        classes = session.predict(images).argmax(axis=1)
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        self.artifact: Artifact = read_artifact(Path(path))
        self.threads = use_threads(threads)  # before TVM's pool takes its own default, half of the CPUs
        import tvm
        from tvm import relax

        self.inputs = self.artifact.inputs
        self.prediction = self.artifact.prediction
        batch = self.inputs[0].shape[0]
        self.batch = batch if isinstance(batch, int) else None
        module = load_module(self.artifact)
        self.on_gpu = is_for_gpu(self.artifact.manifest)
        self._device = tvm.cuda(0) if self.on_gpu else tvm.cpu()
        self._vm: Any = relax.VirtualMachine(module, self._device)
        self._state: Any = ()
        self.reset()
        self._given: tuple[Any, ...] = ()
        give_back(self.artifact.path)

    @property
    def target(self) -> TensorSpec:
        """Name, shape and element type of the target of the loss.

        Raises:
            ArtifactError: this is an inference library.
        """
        return self.artifact.target

    @property
    def classes(self) -> int | None:
        """The number of classes, or None if targets are not class numbers or the model returns its loss itself."""
        return self.artifact.classes

    @property
    def returns_loss(self) -> bool:
        """Whether the model returns its loss itself (build --loss model), so that its target has no known meaning."""
        return bool(self.artifact.options.get("loss") == "model")

    @property
    def ignored(self) -> int | None:
        """The class number that the loss ignores (`ignore_index`), or None."""
        return self.artifact.ignored

    @property
    def state(self) -> dict[str, Array]:
        """A copy of the state by name: parameters, running statistics, optimizer state, counters.

        Assigning a dict with the same names, shapes and element types replaces the state; any other dict raises
        ArtifactError and changes nothing.
        """
        pairs = zip(self.artifact.state, self._state, strict=True)
        return {spec.name: np.array(tensor.numpy()) for spec, tensor in pairs}

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        import tvm

        specs = self.artifact.state
        if set(values) != {spec.name for spec in specs}:
            missing = sorted({spec.name for spec in specs} - set(values))
            extra = sorted(set(values) - {spec.name for spec in specs})
            raise ArtifactError(
                f"this is not a state of this model: missing {missing or 'nothing'}, unknown {extra or 'nothing'}."
            )
        arrays = [self._array(spec, values[spec.name], {}, f"state {spec.name!r}") for spec in specs]
        self._state = tuple(tvm.runtime.tensor(array, device=self._device) for array in arrays)  # steps overwrite it

    @property
    def tensors(self) -> dict[str, Any]:
        """The TVM tensors of the state by name, not copied: the next update overwrites them.

        `numpy.from_dlpack` and `torch.from_dlpack` give arrays of the same memory.
        """
        return {spec.name: tensor for spec, tensor in zip(self.artifact.state, self._state, strict=True)}

    @property
    def statistics(self) -> dict[str, Array]:
        """The running statistics by name, as views of the state: writing to them changes the state."""
        tensors = self.tensors
        return {spec.name: array_of(tensors[spec.name]) for spec in self.artifact.state if spec.role == "running_stat"}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context manager in which `predict` and `evaluate` use the moving averages; do not train inside it.

        Raises:
            ArtifactError: the step was built without --ema.
        """
        averages, tensors, before = self.artifact.averages, self.tensors, self._state
        self._state = tuple(tensors[averages.get(spec.name, spec.name)] for spec in self.artifact.state)
        try:
            yield
        finally:
            self._state = before

    @property
    def scaling(self) -> dict[str, float]:
        """The current `loss_scale` and the number of `left_out_updates` with a dynamic loss scale, else empty."""
        tensors = self.tensors
        if LOSS_SCALE not in tensors:
            return {}
        scale, left_out = tensors[LOSS_SCALE], tensors[LEFT_OUT_UPDATES]
        return {"loss_scale": float(scale.numpy()), "left_out_updates": int(left_out.numpy())}

    def reset(self) -> None:
        """Restore the initial state that is stored in the artifact; does nothing for an inference library."""
        if self.artifact.trains:
            self._state = self._vm["init"]()

    def step(self, x: Any, y: Any, lr: float | None = None) -> tuple[float, Array]:
        """Train on one batch.

        Args:
            x: the input, or a tuple of the inputs, with `batch` samples.
            y: the targets: class numbers or values.
            lr: the learning rate; None means that of `build`.

        Returns:
            The loss of the batch before the update, and the predictions (the loss again if the model returns none).

        Raises:
            ArtifactError: an array has a wrong shape or element type, no samples, or a value out of range.
            UnsupportedError: the learning rate is negative or no finite float32 number.
        """
        arguments, rate = self._batch(x, y, trains=True), self._rate(lr)
        self._given = (arguments[-1], rate)
        loss, predictions, self._state = self._call("step", *arguments, rate, tuple(self._state))
        return float(loss.numpy()), array_of(predictions)

    def wait(self) -> None:
        """Wait until the device has computed what was called; on a CPU it has when a call returns."""
        if self.on_gpu:
            self._device.sync()

    @contextmanager
    def instrumented(self, note: Instrument, given: list[Any]) -> Iterator[None]:
        """A context manager in which `note` is called before and after each function that the virtual machine calls.

        Args:
            note: receives the function, its name, whether this is before the call, the result (None before the call),
                and the arguments; it returns 0.
            given: a list to which the target and the learning rate of the last step are appended at the end.
        """
        self._vm.set_instrument(note)
        try:
            yield
        finally:
            self._vm.set_instrument(None)
            given += self._given

    def gradients(self, x: Any, y: Any, number: int | None = None) -> Gradients:
        """The first half of a split step: loss, predictions and gradients of a batch; `apply` is the second half.

        Running statistics are updated, as in a forward pass of PyTorch; the rest of the state is unchanged.
        `artifact.flat` has the offset of each gradient. With micro-batches they are gradients of the mean loss.

        Args:
            x, y: as for `step`.
            number: the number of the batch, from 0, which seeds the masks of dropout; None means the number of updates
                so far. Give different numbers to batches that are averaged before one `apply`.

        Raises:
            ArtifactError: an array has a wrong shape or element type, a value is out of range, or the step was not
                built with --split.
        """
        self._check_split()
        arguments = self._batch(x, y, trains=True)
        loss, predictions, flat, moved = self._call("gradients", *arguments, self._state_with(number))
        fresh = iter(moved)
        self._state = tuple(
            next(fresh) if spec.role == "running_stat" else tensor
            for spec, tensor in zip(self.artifact.state, self._state, strict=True)
        )
        return Gradients(float(loss.numpy()), array_of(predictions), array_of(flat))

    def apply(self, flat: Any, lr: float | None = None) -> None:
        """The second half of a split step: clip the gradients if the step was built so, and update the parameters.

        Args:
            flat: the flat gradients, in the layout of `gradients`, such as their mean over several processes.
            lr: the learning rate; None means that of `build`.

        Raises:
            ArtifactError: the array has a wrong shape or element type, or the step was not built with --split.
            UnsupportedError: the learning rate is negative or no finite float32 number.
        """
        layout = self._check_split()
        spec = TensorSpec("gradients", (layout.size,), "float32")
        tensor = tensor_of(self._array(spec, flat, {}, "the flat gradient"), flat, self._device)
        self._state = self._call("apply", tensor, self._rate(lr), tuple(self._state))

    def evaluate(self, x: Any, y: Any) -> tuple[float, Array]:
        """The loss and the predictions of a batch, with running statistics and without dropout.

        Args:
            x, y: as for `step`.

        Raises:
            ArtifactError: an array has a wrong shape or element type, a value is out of range, or the step was not
                built with --split (not needed if the model returns its loss itself).
        """
        if not self.returns_loss:
            self._check_split()
        loss, predictions = self._call("evaluate", *self._batch(x, y), tuple(self._state))
        return float(loss.numpy()), array_of(predictions)

    def _check_split(self) -> FlatLayout:
        """The layout of the gradients; raises if the step has none."""
        self.artifact.require_training()
        layout = self.artifact.flat
        if layout is None:
            raise ArtifactError(
                f"{self.artifact.path}: the step has no functions gradients, apply and evaluate; build it with --split."
            )
        return layout

    def _state_with(self, number: int | None) -> tuple[Any, ...]:
        """The state, with another number of updates."""
        import tvm

        others = list(self._state)[:-1]
        if number is None or self.artifact.state[-1].role != "counter":
            return tuple(self._state)
        return (*others, tvm.runtime.tensor(np.array(number, "int64"), device=self._device))

    def _batch(self, x: Any, y: Any, *, trains: bool = False) -> list[Any]:
        """Inputs and target as tensors, checked."""
        extents: dict[str, int] = {}
        arrays = self._accept(x, extents)
        if not len(arrays[0]):
            raise ArtifactError("the input has no samples, of which no mean loss exists; give at least one.")
        least = self.inputs[0].least
        if trains and len(arrays[0]) < least:
            raise ArtifactError(
                f"the input has {len(arrays[0])} sample, of which a batch norm has one value for each channel and no "
                f"variance; give at least {least}, or build with --bn frozen."
            )
        target = self._array(self.target, y, extents, "the target")
        return [
            tensor_of(array, given, self._device)
            for array, given in zip((*arrays, target), (*self._inputs(x), y), strict=True)
        ]

    def _rate(self, lr: float | None) -> Any:
        import tvm

        given = self.artifact.options["lr"] if lr is None else lr
        try:
            with np.errstate(over="ignore"):
                rate = np.array(float(given), "float32")
        except (TypeError, ValueError, OverflowError):
            rate = np.array(np.nan, "float32")
        if not (np.isfinite(rate) and rate >= 0):
            raise UnsupportedError(f"the learning rate must be a float32 number from 0 on, but is {given!r}.")
        return tvm.runtime.tensor(rate, device=self._device)

    def predict(self, x: Any, batch_size: int = 256) -> Array:
        """The predictions for any number of samples.

        Args:
            x: the input, or a tuple of the inputs, with any number of samples.
            batch_size: samples per call, if the model's batch is not fixed. If it is, the last batch is padded with
                copies of its last sample, and their predictions are dropped.

        Returns:
            One row per sample.

        Raises:
            ArtifactError: an array has a wrong shape or element type, a value is out of range, or the model does not
                return one row per sample.
        """
        if not self.prediction.shape:
            raise ArtifactError(
                f"{self.artifact.path}: the model returns its loss alone (build --loss model), so that nothing is "
                "predicted; let it return predictions besides, which do not depend on the target."
            )
        arrays = self._accept(x, {}, rows=True)
        samples = len(arrays[0])
        if not samples:
            raise ArtifactError("the input has no samples; give at least one.")
        if batch_size < 1:
            raise ArtifactError(f"predict: batch_size is {batch_size}; it must be at least 1.")
        size = self.batch or batch_size
        parts: list[Array] = []
        for start in range(0, samples, size):
            piece = [array[start : start + size] for array in arrays]
            given = len(piece[0])
            if self.batch is not None and given < size:
                piece = [np.concatenate([part, np.repeat(part[-1:], size - given, axis=0)]) for part in piece]
            for spec in self.inputs:
                spec.check_limits(0, len(piece[0]), "a batch of predict")
            tensors = [tensor_of(part, None, self._device) for part in piece]
            state = [tuple(self._state)] if self.artifact.trains else []
            found = array_of(self._call("predict", *tensors, *state))
            if found.shape[:1] != (len(piece[0]),):
                raise ArtifactError(
                    f"{self.artifact.path}: predict gave {list(found.shape)} for {len(piece[0])} samples, so a shape "
                    "of the model fixes another batch; build it again from a model with a free batch."
                )
            parts.append(found[:given])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _inputs(self, x: Any) -> list[Any]:
        """The array for each input; a tuple of one is not a batch of one if its array has the input's axes."""
        is_one = isinstance(x, tuple) and len(x) == 1 and getattr(x[0], "ndim", None) == len(self.inputs[0].shape)
        return list(x) if is_one or (isinstance(x, tuple | list) and len(self.inputs) > 1) else [x]

    def _array(self, spec: TensorSpec, given: Any, extents: dict[str, int], what: str, *, rows: bool = False) -> Array:
        """An array of any library as `TensorSpec.accept` gives it."""
        return spec.accept(as_array(given, what), extents, what, rows=rows)

    def _accept(self, x: Any, extents: dict[str, int], *, rows: bool = False) -> list[Array]:
        given = self._inputs(x)
        if len(given) != len(self.inputs):
            raise ArtifactError(
                f"the model takes {len(self.inputs)} inputs ({', '.join(s.name for s in self.inputs)}), "
                f"but {len(given)} were given; pass a tuple."
            )
        arrays = [
            self._array(spec, array, extents, f"the input {spec.name!r}", rows=rows)
            for spec, array in zip(self.inputs, given, strict=True)
        ]
        if len({len(array) for array in arrays}) != 1:
            raise ArtifactError(f"the inputs have different numbers of samples, {[len(array) for array in arrays]}.")
        return arrays

    def _call(self, function: str, *arguments: Any) -> Any:
        limit_thread(self.threads)  # methods may be called in another thread than the one that made the session
        try:
            return self._vm[function](*arguments)
        except Exception as error:  # TVM raises many types here; each means that the compiled function refused
            first = str(error).strip().splitlines()
            raise ArtifactError(
                f"{self.artifact.path}: {function} failed: {first[0] if first else type(error).__name__}"
            ) from error
