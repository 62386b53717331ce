# SPDX-License-Identifier: Apache-2.0
"""Matrices at the ends of what their operators take: too many rows, norms too large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import UnsupportedError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

FILE = Path(__file__).name


class Of(torch.nn.Module):
    """A function of a product with a trained number."""

    def __init__(self, function):
        super().__init__()
        self.function, self.factor = function, torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function(x * self.factor)


def exported(function, *shape):
    return torch.export.export(Of(function).train(), (torch.zeros(shape),))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: torch.linalg.qr(x)[0], "aten.linalg_qr of 17 x 17 elements"),
        (torch.linalg.inv, "aten.linalg_inv_ex of 17 rows"),
    ],
)
def test_large_matrices_are_refused(function, named):
    """With the line of the module."""
    with pytest.raises(
        UnsupportedError, match=rf"{named} is not imported, of up to 16 it is.*, test_torch_linalg.py:\d+"
    ):
        from_exported_program(exported(function, 2, 17, 17))


def test_an_exponential_of_a_norm_that_is_too_large_is_nan():
    """Of 39,000 it is, of 37,000 it is not: a wrong result is not given."""
    step = build_step(
        from_exported_program(exported(torch.linalg.matrix_exp, 2, 2, 2)), loss="mse", optimizer="sgd", lr=0
    )
    x = np.zeros((2, 2, 2), np.float32)
    x[0], x[1] = [[0, 37_000], [-37_000, 0]], [[0, 39_000], [-39_000, 0]]
    found = Runner(step).predict(x)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
