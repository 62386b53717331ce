# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: one family, each also a ValueError or TypeError, so that old handlers catch them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class ConvGradError(Exception):
    """Base of every error that tvm-convgrad raises on purpose; its text is a sentence with the remedy."""


class ProblemError(ConvGradError, ValueError):
    """A convolution that cannot exist: extents, channels, groups, padding, strides or layouts that contradict."""


class DTypeError(ConvGradError, TypeError):
    """An element type that the operation does not accept."""


class DescriptorError(ConvGradError, ValueError):
    """A problem descriptor string that does not parse."""


class UnsupportedError(ConvGradError, ValueError):
    """A valid request that this version does not serve; the text has the remedy."""


class SetupError(ConvGradError, RuntimeError):
    """Something of the surroundings (TVM version, optional package, compiler) is missing or does not fit."""


class ModelError(ConvGradError, ValueError):
    """A model file or program that cannot be read or turned into a training step."""


class ArtifactError(ConvGradError, ValueError):
    """A compiled step, checkpoint or data file that is truncated, foreign or of another version."""


class TrainingError(ConvGradError, ArithmeticError):
    """A training run that cannot go on, such as one whose loss is no longer a number."""


class DataError(TrainingError):
    """A training run that cannot go on because of its data, such as samples that are not finite."""


FAMILY = (
    ConvGradError,
    ProblemError,
    DTypeError,
    DescriptorError,
    UnsupportedError,
    SetupError,
    ModelError,
    ArtifactError,
    TrainingError,
    DataError,
)
"""All of them. A binding registers them with TVM: an exception keeps its class through C++ only if TVM has its name."""


@contextmanager
def attributed_to(operator: str) -> Iterator[None]:
    """Put the operator's name before the sentence of a ProblemError or DTypeError that is raised inside."""
    try:
        yield
    except (ProblemError, DTypeError) as error:
        if str(error).startswith(operator):
            raise
        raise type(error)(f"{operator}: {error}") from None


_TVM_NOTATION = (
    (re.compile(r"T\.(?:u?int\d+|bool)\((-?\w+)\)"), r"\1"),
    (re.compile(r"(?:, with product \d+|\(?# Metadata omitted\..*)"), ""),
)
"""How TVM prints numbers, products of extents, and remarks about its printer."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, without the full stop; its type if it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    for pattern, replacement in _TVM_NOTATION:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".")
