# SPDX-License-Identifier: Apache-2.0
"""The options for images: how they are normalised, fitted, augmented, and by how many processes they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tvm_convgrad.commands.option_values import one_of, parse_numbers
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.images.options import FITS, KINDS, ImageOptions, parse_augmentations
from tvm_convgrad.training.step import options as step_options

Mean = Annotated[
    str | None,
    typer.Option(
        metavar="M,M,...",
        help="Normalisation of images: what is subtracted from each channel of pixels from 0 to 1. `run` takes that of "
        "the build; default: 0.",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(metavar="S,S,...", help="Normalisation of images: what each channel is divided by then; default: 1."),
]
Fit = Annotated[
    str,
    typer.Option(
        metavar="|".join(FITS),
        callback=one_of(FITS),
        help="How images of another size come to the model's: their middle, all distorted, or all with black borders.",
    ),
]
ConvertChannels = Annotated[
    bool, typer.Option("--convert-channels", help="Take images that are grey or coloured where the model's are not.")
]
Augment = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND[:NAME=N,...]",
        help=f"A random change of training images: {', '.join(KINDS)}, such as crop:padding=4. Repeatable, in order.",
    ),
]
ImageWorkers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes that decode images ahead of the step. Default: one for each two CPUs."),
]
ImageMemory = Annotated[
    int,
    typer.Option(
        min=0, metavar="MIB", help="Images are decoded once, before the run, if they need no more memory than this."
    ),
]


def image_options(
    mean: str | None,
    std: str | None,
    fit: str,
    convert: bool,
    augment: Sequence[str] | None,
    workers: int | None,
    memory: int,
) -> ImageOptions:
    """The values of the options for images together.

    Raises:
        typer.BadParameter: what is not a number, or no augmentation.
    """
    changes = tuple(augment or ())
    try:
        parse_augmentations(changes)
    except UnsupportedError as error:
        raise typer.BadParameter(f"--augment: {error}") from error
    centre, spread = parse_numbers("--mean", mean), parse_numbers("--std", std)
    return ImageOptions(centre, spread, fit, convert, changes, workers, memory << 20)


def check_normalisation(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    """Refuse a normalisation of images that cannot be, before a model is read.

    Raises:
        typer.BadParameter: with the sentence of the rule.
    """
    try:
        step_options.check_normalisation(mean, std)
    except UnsupportedError as error:
        raise typer.BadParameter(str(error).removeprefix("build_step: ")) from error
