# SPDX-License-Identifier: Apache-2.0
"""The groups of `--help`: the options of each command by purpose, each group with an example of its options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperOption


class Group(NamedTuple):
    """Options that serve one purpose.

    Attributes:
        purpose: in few words.
        example: some of them with values; "" where the group needs none.
        options: their names, as parameters of the command's function.
    """

    purpose: str
    example: str
    options: tuple[str, ...]

    @property
    def title(self) -> str:
        """The heading of the group, which fits into 80 columns."""
        return f"{self.purpose}, such as {self.example}" if self.example else self.purpose


_COMPILE = ("target", "linker", "layout", "offload", "transforms", "tuned", "store", "cache")
_PRECISION = ("dtype", "results", "loss_scale")
_LOSS = ("loss", "model_target", "label_smoothing", "class_weights", "ignore_index", "positive_weight", "delta")
_OPTIMIZER = ("optimizer", "lr", "momentum", "nesterov", "betas", "weight_decay", "decayed")
_OUTPUT = Group("What is printed", "", ("json",))
_DIRECTION = ("direction", "dtype", "results", "layout", "batch", "loss", "model_output", "model_target")

GROUPS: Mapping[str, tuple[Group, ...]] = MappingProxyType(
    {
        "build": (
            Group("Files", "-o step.so --batch 32", ("output", "batch", "params", "model_output")),
            Group("Optimizer", "--optimizer adamw --lr 0.001", _OPTIMIZER),
            Group("Gradients", "--train 'layer4.*,fc' --clip-norm 1", ("train", "clip_norm", "clip_value", "ema")),
            Group("Loss", "--loss cross_entropy --label-smoothing 0.1", _LOSS),
            Group("Precision", "--dtype bfloat16", _PRECISION),
            Group("The step", "--bn frozen --seed 1", ("bn", "dropout", "seed", "split")),
            Group("Memory", "--memory 512MB --recompute cheap", ("memory", "recompute", "accumulate")),
            Group("Images", "--mean 0.5 --std 0.25", ("mean", "std")),
            Group("Compiling", "--target native --layout NHWC", _COMPILE),
            _OUTPUT,
        ),
        "run": (
            Group("Training", "--data data.npz --epochs 8", ("data", "epochs", "batch_size", "accumulate", "seed")),
            Group("Learning rate", "--lr 0.1 --schedule cosine:warmup=5", ("lr", "schedule")),
            Group(
                "Images",
                "--augment flip --augment crop:padding=4",
                ("mean", "std", "fit", "convert_channels", "augment", "workers", "image_memory"),
            ),
            Group(
                "Validation and test",
                "--validate-every 100 --patience 5",
                (
                    *("validate", "validate_every", "monitor", "patience", "use_best"),
                    *("averages", "test_data", "require_accuracy"),
                ),
            ),
            Group(
                "Checkpoints",
                "--checkpoint-dir checkpoints --resume",
                ("checkpoint_dir", "checkpoint_every", "resume", "save_state", "allow_nonfinite"),
            ),
            Group("Records", "--log log.jsonl --plot loss.png", ("log", "tensorboard", "plot")),
            Group("Processes", "--threads 4", ("threads", "distributed", "statistics", "rank_timeout")),
            _OUTPUT,
        ),
        "export": (
            Group("Files", "-o trained.onnx --force", ("checkpoint", "output", "model", "averages", "force")),
            Group(
                "A library for inference",
                "--inference --batch 1 --target native",
                ("inference", "batch", "target", "linker", "params"),
            ),
            _OUTPUT,
        ),
        "bundle": (Group("Files", "-o device.tar", ("output", "wheels", "linker")), _OUTPUT),
        "explain": (
            Group(
                "The model",
                "--batch 32 --loss mse",
                ("batch", "params", "model_output", "model_target", "loss", "dtype", "results"),
            ),
            Group("Compiling", "--target native --layout NHWC", _COMPILE),
            Group("What is shown", "--refused --html report.html", ("refused", "html", "cudnn", "json")),
        ),
        "profile": (
            Group("The step", "--data data.npz --steps 20", ("data", "batch_size", "steps", "threads")),
            Group("Images", "--augment flip", ("mean", "std", "fit", "convert_channels", "augment")),
            Group("What is shown", "--rows 40 --html profile.html", ("rows", "trace", "plot", "html", "json")),
        ),
        "import": (Group("Files", "-o model.json", ("output", "params")), _OUTPUT),
        "tune": (
            Group("What is tuned", "--suite resnet50 --direction wgrad", ("problem", "suite", *_DIRECTION)),
            Group("How", "--budget 5m --transforms", ("budget", "threads", "offload", "cudnn", "transforms")),
            Group("For what", "--target native", ("target", "store")),
            _OUTPUT,
        ),
        "verify": (
            Group("What is checked", "--all --direction wgrad", ("problem", "all_problems", "tiling", "direction")),
            Group("Random problems", "--fuzz 100 --seed 7", ("fuzz", "seed")),
            Group("By what", "--impl kernel", ("impl", "target")),
            _OUTPUT,
        ),
        "bench": (
            Group(
                "Layers", "--suite resnet50 --batch 8,32", ("suite", "problem", "batch", "layout", "direction", "dtype")
            ),
            Group(
                "Steps",
                "--step resnet18 --optimizer adam",
                ("step", "per_sample", "bridge", "calls", "optimizer", "loss"),
            ),
            Group("Contenders", "--impl kernel --against torch,jax", ("impl", "against", "target")),
            Group("Measuring", "--seconds 0.2 --threads 2", ("seconds", "threads")),
            Group("Results", "--json layers.json --resume", ("json", "resume", "roofline", "markdown")),
        ),
        "build-runtime": (_OUTPUT,),
        "config": (
            Group("Folders", "--cmakedir", ("cmakedir", "includedir", "sourcedir")),
            Group("TVM", "--tvm-library", ("tvm_library", "tvm_ffi_library", "tvm_ffi_include", "tvm_version")),
        ),
        "env": (Group("Kept kernels", "--forget-failures", ("forget_failures",)), _OUTPUT),
    }
)
"""The groups of each command; a test sees to it that each option is in one, and that the examples are right."""


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in the groups above."""

    def __init__(self, name: str | None, **settings: Any) -> None:  # Any: what click hands on
        super().__init__(name, **settings)
        titles = {option: group.title for group in GROUPS.get(name or "", ()) for option in group.options}
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.rich_help_panel = titles.get(parameter.name or "", parameter.rich_help_panel)


__all__ = ["GROUPS", "Group", "GroupedCommand"]
