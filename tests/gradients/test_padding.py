# SPDX-License-Identifier: Apache-2.0
"""Gradient of nn.pad in its modes: exact against PyTorch and against the adjoint identity."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradients.harness import batch, check, gradients, integers, relax
from tvm_convgrad.core.errors import ProblemError, UnsupportedError

op = relax.op
MODES = ["constant", "reflect", "replicate", "circular"]
X = integers(2, 3, 4, 5)


@pytest.mark.parametrize("axes", [{}, {0: "n", 2: "h", 3: "w"}], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("widths", [(2, 1, 3, 0), (3, 3, 4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_pad(mode, widths, axes):
    functional = pytest.importorskip("torch").nn.functional
    top, bottom, left, right = widths
    check(
        lambda _, x: op.nn.pad(x, [0, 0, 0, 0, *widths], mode),
        lambda x: functional.pad(x, (left, right, top, bottom), mode=mode),
        [X],
        symbolic=batch([X], axes),
        exact=True,
    )


def test_constant_pad_of_every_axis_with_a_value():
    functional = pytest.importorskip("torch").nn.functional
    check(
        lambda _, x: op.nn.pad(x, [1, 0, 0, 2, 1, 1, 0, 3], "constant", 7.0),
        lambda x: functional.pad(x, (0, 3, 1, 1, 0, 2, 1, 0), value=7.0),
        [X],
        exact=True,
    )


@pytest.mark.parametrize(
    ("mode", "numpy_mode"),
    [("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap"), ("constant", "constant")],
)
def test_adjoint_of_numpy_pad(mode, numpy_mode):
    """⟨dY, pad(X)⟩ = ⟨dX, X⟩ in integers, without PyTorch."""
    x = integers(3, 6)
    (found,), (cot,) = gradients(lambda _, v: op.nn.pad(v, [0, 0, 2, 3], mode), [x])
    padded = np.pad(x, ((0, 0), (2, 3)), mode=numpy_mode)
    assert float((cot * padded).sum()) == float((found * x).sum())


def test_negative_widths_crop():
    functional = pytest.importorskip("torch").nn.functional
    check(
        lambda _, x: op.nn.pad(x, [0, 0, 0, 0, -2, 1, 3, -1]),
        lambda x: functional.pad(x, (3, -1, -2, 1)),
        [X],
        exact=True,
    )


def test_too_wide_a_border_is_refused():
    with pytest.raises(ProblemError, match="at most 3"):
        gradients(lambda _, x: op.nn.pad(x, [0, 0, 0, 0, 4, 0, 0, 0], "reflect"), [X])


def test_unknown_mode_is_refused():
    with pytest.raises((UnsupportedError, ValueError), match=r"symmetric|mode"):
        gradients(lambda _, x: op.nn.pad(x, [0, 0, 0, 0, 1, 0, 0, 0], "symmetric"), [X])
