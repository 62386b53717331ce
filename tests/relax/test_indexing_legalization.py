# SPDX-License-Identifier: Apache-2.0
"""Lowering of take and slice_scatter inside `rules()`: numpy's values, and none of TVM's warnings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.linked import quick_module

SHAPE = (3, 7, 5)


def run(make: Callable[..., relax.Expr], *arrays: np.ndarray) -> np.ndarray:
    """What a function of one operator gives."""
    builder = relax.BlockBuilder()
    given = [
        relax.Var(f"x{number}", relax.TensorType(each.shape, str(each.dtype))) for number, each in enumerate(arrays)
    ]
    with builder.function("main", given):
        builder.emit_func_output(builder.emit(make(*given)))
    return quick_module(builder.get())["main"](*map(tvm.runtime.tensor, arrays)).numpy()


@pytest.mark.parametrize(
    ("axis", "begin", "end", "stride"),
    [(0, 0, 3, 1), (0, 2, 3, 1), (1, 1, 6, 2), (1, 4, 7, 1), (2, 0, 4, 3), (2, 4, 5, 1), (1, 3, 3, 1)],
)
def test_slices_are_written(capfd: pytest.CaptureFixture[str], axis: int, begin: int, end: int, stride: int) -> None:
    x = np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE)
    places = [slice(None)] * axis + [slice(begin, end, stride)]
    part = -1 - np.arange(x[tuple(places)].size, dtype="float32").reshape(x[tuple(places)].shape)
    found = run(lambda x, part: op.slice_scatter(x, part, begin, end, stride, axis), x, part)
    x[tuple(places)] = part
    np.testing.assert_array_equal(found, x)
    assert "Fast mode" not in capfd.readouterr().err


def test_slices_of_slices_are_written() -> None:
    """As the gradient of x[:, 1::2, ::3], whose loops are scheduled together."""

    def put_back(part: relax.Expr) -> relax.Expr:
        rows = op.slice_scatter(op.zeros([3, 3, 5], "float32"), op.multiply(part, relax.const(2.0)), 0, 4, 3, 2)
        return op.slice_scatter(op.zeros(SHAPE, "float32"), rows, 1, 6, 2, 1)

    part = 1 + np.arange(18, dtype="float32").reshape(3, 3, 2)
    wanted = np.zeros(SHAPE, "float32")
    wanted[:, 1:6:2, :4:3] = 2 * part
    np.testing.assert_array_equal(run(put_back, part), wanted)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("extents", [(), (4,), (2, 1, 3)])
def test_elements_are_taken(capfd: pytest.CaptureFixture[str], axis: int, extents: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, places = rng.integers(0, 99, SHAPE).astype("float32"), rng.integers(0, SHAPE[axis], extents)
    found = run(lambda x, places: op.take(x, places, axis), x, places)
    np.testing.assert_array_equal(found, np.take(x, places, axis))
    assert "Fast mode" not in capfd.readouterr().err
