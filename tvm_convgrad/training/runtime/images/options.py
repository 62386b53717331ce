# SPDX-License-Identifier: Apache-2.0
"""How images are prepared for a step, and the texts of augmentations: `flip`, `crop:padding=4`. Loads no numpy.

flip:p=0.5                          left and right exchanged with probability p
vflip:p=0.5                         top and bottom exchanged
crop:padding=4                      a black border is added, and a part of the former size cut out
resized:scale=0.08,ratio=0.75       a part with `scale` to 1 of the area and sides of `ratio` to 1/`ratio`, resized;
                                    it takes the place of the fit, and stands first
rotate:degrees=15                   by up to so many degrees in either direction; corners become black
jitter:brightness=0.2,contrast=0.2,saturation=0.2
                                    each changed by a factor from 1 - value to 1 + value, in this order
erase:p=0.5,scale=0.2               a rectangle of up to `scale` of the area becomes grey
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_convgrad.core.errors import UnsupportedError

FITS = ("crop", "stretch", "pad")
"""How an image of another size comes to the model's: its middle, all of it distorted, or all with black borders."""


@dataclass(frozen=True)
class ImageOptions:
    """How images are to be prepared.

    Attributes:
        mean, std: of each channel, or one for all, where pixels are from 0 to 1: (pixel / 255 - mean) / std is what the
            model takes. None: those of the build, or 0 and 1.
        fit: "crop", "stretch" or "pad", see `FITS`.
        convert: take images of other channels than the model's, too.
        augment: random changes of training images, see above.
        workers: processes that decode ahead of the step; 0: none. None: one for each two CPUs.
        memory: bytes; images that need no more when they are decoded are decoded once, before the run. Each of
            training, validation and test has so many.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    fit: str = "crop"
    convert: bool = False
    augment: tuple[str, ...] = ()
    workers: int | None = None
    memory: int = 1 << 30


@dataclass(frozen=True)
class _Kind:
    """A kind of augmentation: the numbers that it takes with (default, least, most), and whether pixels move."""

    values: Mapping[str, tuple[float, float, float]]
    moves: bool = True


_P = (0.5, 0.0, 1.0)
_TINY = 1e-3

KINDS: Mapping[str, _Kind] = {
    "flip": _Kind({"p": _P}),
    "vflip": _Kind({"p": _P}),
    "crop": _Kind({"padding": (4.0, 1.0, 4096.0)}),
    "resized": _Kind({"scale": (0.08, _TINY, 1.0), "ratio": (0.75, _TINY, 1.0)}),
    "rotate": _Kind({"degrees": (15.0, 0.0, 180.0)}),
    "jitter": _Kind(dict.fromkeys(("brightness", "contrast", "saturation"), (0.2, 0.0, 1.0)), moves=False),
    "erase": _Kind({"p": _P, "scale": (0.2, 0.0, 1.0)}, moves=False),
}

RESIZED = "resized"
_WHOLE = ("padding",)


@dataclass(frozen=True)
class Augmentation:
    """One random change and its settings.

    >>> Augmentation.parse("crop:padding=2").values
    {'padding': 2.0}
    """

    text: str
    kind: str
    values: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Augmentation:
        """Read `KIND:NAME=N,...`.

        Raises:
            UnsupportedError: an unknown kind or name, or a number out of its range.
        """
        kind, _, rest = text.partition(":")
        if kind not in KINDS:
            raise UnsupportedError(f"the augmentation {text!r} is not one of {', '.join(KINDS)}.")
        limits = KINDS[kind].values
        values = {name: default for name, (default, _, _) in limits.items()}
        for word in filter(None, rest.split(",")):
            name, _, number = word.partition("=")
            if name not in limits:
                raise UnsupportedError(f"the augmentation {text!r}: {kind} takes {', '.join(limits)}, not {name!r}.")
            _, least, most = limits[name]
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not least <= value <= most or (name in _WHOLE and value != int(value)):
                sort = "a whole number" if name in _WHOLE else "a number"
                raise UnsupportedError(
                    f"the augmentation {text!r}: {name} has to be {sort} from {least:g} to {most:g}, not {number!r}."
                )
            values[name] = value
        return cls(text, kind, values)

    @property
    def moves(self) -> bool:
        """Whether pixels change their places, which targets with a value for each pixel do not follow."""
        return KINDS[self.kind].moves


def parse_augmentations(texts: Sequence[str]) -> tuple[Augmentation, ...]:
    """Several, in the order in which they are applied.

    Raises:
        UnsupportedError: as `Augmentation.parse`; or `resized` is not first.
    """
    found = tuple(map(Augmentation.parse, texts))
    if RESIZED in [each.kind for each in found[1:]]:
        raise UnsupportedError(
            "the augmentation 'resized' is not the first one; give it first and once, since it replaces the fit."
        )
    return found


__all__ = ["FITS", "KINDS", "RESIZED", "Augmentation", "ImageOptions", "parse_augmentations"]
