# SPDX-License-Identifier: Apache-2.0
"""Gradient of image.resize2d: the matrices against the forward operator, both ways of applying them, PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from relax_ops.rules.resize import _MODES, resize_matrix
from tests.gradients.harness import batch, check, gradients, load, relax, sample, tvm
from tvm_convgrad.core.errors import UnsupportedError

op = relax.op
ROUNDINGS = ("", "round", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SIZES = [(4, 8), (4, 12), (6, 3), (5, 7), (7, 5), (8, 2), (3, 1), (5, 5)]


def _configurations(mode):
    for source, result in SIZES:
        if mode in ("align_corners", "tf_crop_and_resize") and result == 1:
            continue  # the forward operator divides by zero there
        yield source, result, "linear", ""
        for rounding in ROUNDINGS:
            yield source, result, "nearest_neighbor", rounding


@pytest.mark.parametrize("mode", _MODES)
def test_matrices_are_those_of_the_forward_operator(mode):
    """The forward operator applied to the unit matrix gives the matrix's columns; all in one compiled module."""
    builder = relax.BlockBuilder()
    configurations = list(_configurations(mode))
    for index, (source, result, method, rounding) in enumerate(configurations):
        x = relax.Var("x", relax.TensorType((1, source, source, 2), "float32"))
        with builder.function(f"f{index}", [x]):
            with builder.dataflow():
                y = op.image.resize2d(
                    x,
                    (result, 2),
                    roi=(0.125, 0.0, 0.75, 1.0),
                    method=method,
                    coordinate_transformation_mode=mode,
                    rounding_method=rounding,
                    extrapolation_value=0.0,
                )
                output = builder.emit_output(y)
            builder.emit_func_output(output)
    machine = load(builder.get())
    for index, (source, result, method, rounding) in enumerate(configurations):
        unit = np.repeat(np.eye(source, dtype="float32")[None, :, :, None], 2, 3)
        found = machine[f"f{index}"](tvm.runtime.tensor(unit)).numpy()[0, :, :, 0].T
        matrix = resize_matrix(source, result, method, mode, rounding, 0.125, 0.75)
        np.testing.assert_allclose(
            found, matrix, atol=2e-6, err_msg=f"{source} to {result} {method} {mode} {rounding!r}"
        )


@pytest.mark.parametrize("size", [(12, 10), (3, 7), (6, 5), (60, 50)], ids=str)
@pytest.mark.parametrize("corners", [False, True], ids=["half_pixel", "align_corners"])
def test_linear(size, corners):
    functional = pytest.importorskip("torch").nn.functional
    arrays = [sample(2, 3, 6, 5)]
    symbolic = batch(arrays, {0: "n", 2: "h", 3: "w"} if size == (12, 10) else {0: "n"})
    check(
        lambda _, x: op.image.resize2d(
            x, size, coordinate_transformation_mode="align_corners" if corners else "half_pixel"
        ),
        lambda x: functional.interpolate(x, size, mode="bilinear", align_corners=corners),
        arrays,
        symbolic=symbolic,
        terms=16 + size[0] * size[1] // 10,
    )


def test_nearest_with_channels_last():
    functional = pytest.importorskip("torch").nn.functional
    arrays = [sample(2, 6, 5, 3)]
    check(
        lambda _, x: op.image.resize2d(
            x,
            (12, 7),
            layout="NHWC",
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        lambda x: functional.interpolate(x.permute(0, 3, 1, 2), (12, 7), mode="nearest").permute(0, 2, 3, 1),
        arrays,
        symbolic=batch(arrays),
        terms=16,
    )


def test_symbolic_factor_of_two():
    """The result's extents are 2·h and 2·w, as an upsampling layer has them."""
    functional = pytest.importorskip("torch").nn.functional
    arrays = [sample(2, 3, 4, 5)]

    def build(_, x):
        shape = x.ty.shape.values
        return op.image.resize2d(
            x,
            op.image.image.ShapeExpr([shape[2] * 2, shape[3] * 2]),
            method="nearest_neighbor",
            rounding_method="round",
        )

    with pytest.raises(KeyError):
        # TVM's Gradient pass itself fails on a symbolic shape among the arguments; the training step's does not.
        gradients(build, arrays, symbolic=batch(arrays, {2: "h", 3: "w"}))
    check(build, lambda x: functional.interpolate(x, (8, 10), mode="nearest"), arrays, terms=16)


@pytest.mark.parametrize("pair", list(itertools.product(["linear"], ["half_pixel", "tf_crop_and_resize"])), ids=str)
def test_adjoint_identity(pair):
    """⟨dY, R·X⟩ = ⟨dX, X⟩ without PyTorch, for a crop that leaves the image too."""
    method, mode = pair
    x = sample(2, 3, 6, 5)
    roi = (-0.25, 0.125, 0.75, 1.25)
    (found,), (cot,) = gradients(
        lambda _, v: op.image.resize2d(v, (7, 4), roi, method=method, coordinate_transformation_mode=mode), [x]
    )
    rows = resize_matrix(6, 7, method, mode, "", roi[0], roi[2])
    columns = resize_matrix(5, 4, method, mode, "", roi[1], roi[3])
    np.testing.assert_allclose(
        (cot.astype("float64") * (rows @ x.astype("float64") @ columns.T)).sum(), (found * x).sum(), atol=1e-4
    )


def test_cubic_is_refused():
    with pytest.raises(UnsupportedError, match="linear"):
        gradients(lambda _, x: op.image.resize2d(x, (12, 10), method="cubic"), [sample(1, 1, 6, 5)])
