# SPDX-License-Identifier: Apache-2.0
"""What `build` and `explain` share: reading a model, and choosing what computes its convolutions, by their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tvm_convgrad.commands import option_values
from tvm_convgrad.commands.stages import print_warnings
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.model.own_loss import OwnLoss

if TYPE_CHECKING:
    from tvm.target import Target

    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.program import TrainingProgram
    from tvm_convgrad.tuning.store import Store


@dataclass(frozen=True)
class ModelOptions:
    """Which model is read, and how.

    Attributes:
        source: the model file, or file.py:function.
        batch: samples of a step, "dynamic" for any number, or None for the model's own batch.
        params: the file of a Relay program's parameters, if it is not the default one.
        outputs: the outputs that are trained, with the weights of their losses, or how the model returns its loss
            itself; None: the only output.
        trained: patterns of the parameters that are trained; none: all of them.
    """

    source: str
    batch: int | Literal["dynamic"] | None = None
    params: Path | None = None
    outputs: dict[str, float] | OwnLoss | None = None
    trained: tuple[str, ...] = ()

    def load(self) -> Model | TrainingProgram:
        """Read the model, and print its warnings.

        Raises:
            ModelError, SetupError: as `load_model`.
        """
        from tvm_convgrad.training.frontends import load_model
        from tvm_convgrad.training.model.model import Model
        from tvm_convgrad.training.model.trained_part import train_only

        loaded = load_model(self.source, batch=self.batch, params=self.params, outputs=self.outputs)
        print_warnings(loaded.warnings)
        if not self.trained:
            return loaded
        if not isinstance(loaded, Model):
            raise ModelError(f"{self.source} computes its own gradients; select the trained parameters in the program.")
        return train_only(loaded, self.trained)


@dataclass(frozen=True)
class CompileOptions:
    """What a step is compiled for, and what may compute its convolutions.

    Attributes:
        target: the TVM target.
        backends: the vendor libraries of --offload.
        tuned: whether the tilings and engines that `convgrad tune` has kept are taken.
        transforms: whether 3x3 kernels may compute by Winograd's transform.
        store: the file of tunings; None: CONVGRAD_TUNINGS, or the user's cache folder.
    """

    target: Target
    backends: tuple[str, ...]
    tuned: bool = True
    transforms: bool = False
    store: Path | None = None

    @contextmanager
    def in_force(self) -> Iterator[Store | None]:
        """A context in which convolutions are chosen by these options; gives the tunings, None with --no-tuned.

        Raises:
            typer.BadParameter: --no-tuned, and settings that take tuned engines only.
        """
        from tvm_convgrad.codegen.hardware import cores_of
        from tvm_convgrad.core.entries import default_path
        from tvm_convgrad.kernels.transforms import allow_transforms
        from tvm_convgrad.kernels.tuned import use_winners
        from tvm_convgrad.offload.cudnn.store import use_engines
        from tvm_convgrad.tuning.store import Store

        winners = Store(self.store or default_path(), cores_of(self.target)) if self.tuned else None
        engines = option_values.engine_store(self.tuned, self.store, self.target)
        with use_winners(winners), allow_transforms(self.transforms), use_engines(engines):
            yield winners
