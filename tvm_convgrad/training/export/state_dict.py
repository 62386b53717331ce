# SPDX-License-Identifier: Apache-2.0
"""Trained parameters as the `state_dict` of the PyTorch model that a step comes from, in a file of safetensors.

A step holds what its graph reads. What else a `state_dict` has (integer buffers, parameters of parts that are omitted,
the other names of tied parameters) is taken from the model's file. ONNX files have no `num_batches_tracked`; it is set
to the batches of the run. A complex tensor, which a step holds as a real one with a last axis of 2, is complex again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tvm_convgrad.training.frontends.onnx.prepared import prepared
from tvm_convgrad.training.frontends.onnx.torch_parameters import state_dict_names
from tvm_convgrad.training.frontends.torch_export.arrays import array_of
from tvm_convgrad.training.frontends.torch_export.known_types import known_types
from tvm_convgrad.training.frontends.torch_export.places import type_name
from tvm_convgrad.training.runtime.artifact import Artifact
from tvm_convgrad.training.runtime.checkpoint import Checkpoint
from tvm_convgrad.training.runtime.schema import SAVED, Array

_COUNTER = "num_batches_tracked"
_ANONYMOUS = re.compile(r"(onnx::)?[A-Z]\w*_\d+|\d+|val_\d+|.*\.sample")
"""Names that exporters give to what they have computed."""
_SHOWN = 3


@dataclass
class StateDict:
    """Tensors by PyTorch's names, and sentences about those whose values or names do not come from the step."""

    tensors: dict[str, Array]
    notes: list[str] = field(default_factory=list)


def trained_values(artifact: Artifact, checkpoint: Checkpoint) -> dict[str, Array]:
    """The tensors of a checkpoint's state that predictions depend on, by name."""
    return {spec.name: checkpoint.state[spec.name] for spec in artifact.state if spec.role in SAVED}


def state_dict(artifact: Artifact, checkpoint: Checkpoint, model: Path | None) -> StateDict:
    """The `state_dict` of a model after a run.

    Args:
        artifact, checkpoint: the step and its run.
        model: the file of the build, which has been checked; None: only what the step holds, and counters.
    """
    found = StateDict(trained_values(artifact, checkpoint))
    origin = artifact.origin
    if origin is not None and origin.suffix == ".pt2" and model is not None:
        _add_of_pt2(found, model)
    elif origin is not None and origin.producer == "pytorch":
        progress = checkpoint.progress
        counters = _moved_counters(artifact, len(progress.losses) * progress.micro_batches)
        found.tensors |= counters
        if counters:
            found.notes.append(
                f"{_COUNTER} of {len(counters)} batch norms is {max(map(int, counters.values()))}, the batches of this "
                "run: an ONNX file does not say how many there were before"
            )
        if model is not None:
            _add_of_onnx(found, model)
        unnamed = [name for name in found.tensors if _ANONYMOUS.fullmatch(name)]
        if unnamed:
            found.notes.append(
                f"the exporter has left no names of {_listed(unnamed)}, so that load_state_dict does not know them; "
                "export the model with torch.onnx.export(..., dynamo=True), or torch.export"
            )
    if model is None:
        found.notes.append("what the step does not hold of the model is not in the file; give --model to have it, too")
    return found


def safetensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """A file of safetensors with these tensors."""
    from safetensors.numpy import save  # optional

    contiguous = {name: np.array(value, order="C") for name, value in tensors.items()}
    return bytes(save(contiguous, metadata={"format": "pt"}))


def _moved_counters(artifact: Artifact, batches: int) -> dict[str, Array]:
    """For each layer with running statistics the batches of training that it has seen, under PyTorch's name.

    Args:
        batches: those that the step has been called with, each of which it may divide itself.
    """
    roles = {spec.name: spec.role for spec in artifact.state}
    mode, batches = artifact.options.get("bn"), batches * int(artifact.options.get("accumulate", 1))
    counters: dict[str, Array] = {}
    for name, role in roles.items():
        layer = name.removesuffix(".running_mean")
        if role != "running_stat" or layer == name or f"{layer}.{_COUNTER}" in roles:
            continue
        frozen = all(roles.get(f"{layer}.{each}") == "frozen" for each in ("weight", "bias"))
        keeps = mode == "frozen" or (frozen and mode != "train-all")
        counters[f"{layer}.{_COUNTER}"] = np.array(0 if keeps else batches, "int64")
    return counters


def _add_of_pt2(found: StateDict, model: Path) -> None:
    """Add what the `state_dict` of a .pt2 file has besides; another name of a trained tensor has its value."""
    import torch  # optional

    with known_types(model):
        stored = torch.export.load(model).state_dict
    place = {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in stored.items()}
    trained = {place[name]: name for name in found.tensors if name in place and stored[name].numel()}
    kept = []
    for name, tensor in stored.items():
        if name in found.tensors:
            if tensor.is_complex():  # a step holds a real tensor with a last axis of 2
                found.tensors[name] = np.ascontiguousarray(found.tensors[name]).view(type_name(tensor.dtype))[..., 0]
            continue
        twin = trained.get(place[name])
        found.tensors[name] = found.tensors[twin] if twin else array_of(tensor)
        if not twin:
            kept.append(name)
    if kept:
        found.notes.append(f"as they are in {model.name}, since the step does not hold them: {_listed(kept)}")


def _add_of_onnx(found: StateDict, model: Path) -> None:
    """Add tensors of an ONNX file of PyTorch that are of its `state_dict`, and say which are not in the file."""
    import onnx  # optional
    from onnx import numpy_helper

    proto = onnx.load(model)
    stages = prepared(proto, str(model))
    stored = {stages.parameters[tensor.name]: tensor for tensor in stages.own.graph.initializer}
    names = state_dict_names(proto)
    wanted = names or [name for name in stored if "." in name and not _ANONYMOUS.fullmatch(name)]
    kept = [name for name in wanted if name in stored and name not in found.tensors]
    found.tensors |= {name: numpy_helper.to_array(stored[name]) for name in kept}
    if kept:
        found.notes.append(f"as they are in {model.name}, since the step does not hold them: {_listed(kept)}")
    absent = [name for name in names if name not in found.tensors]
    if absent:
        found.notes.append(
            f"the PyTorch model has {_listed(absent)}, which the graph of {model.name} has lost; take them from the "
            "model, with load_state_dict(strict=False)"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


__all__ = ["StateDict", "safetensors_bytes", "state_dict", "trained_values"]
