# SPDX-License-Identifier: Apache-2.0
"""`tvm_convgrad.compile` reads arrays of JAX, which nothing may write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tvm_convgrad
from tvm_convgrad.core.errors import ProblemError

jnp = pytest.importorskip("jax.numpy")


def test_arrays_of_jax_are_operands_and_no_results(tmp_path: Path) -> None:
    wgrad = tvm_convgrad.compile("conv2d_backward_weight", "mb1ic1ih4oc1kh3", folder=tmp_path)
    dy, x, out = jnp.ones((1, 1, 2, 2)), jnp.ones((1, 1, 4, 4)), jnp.zeros((1, 1, 3, 3))
    with pytest.raises(ProblemError, match="out is read-only, as JAX's arrays never change"):
        wgrad(dy, x, out=out)
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(wgrad(dy, x), np.full((1, 1, 3, 3), 4, "float32"))
