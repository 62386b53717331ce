# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients by kernels equal JAX's in float64 to the last bit, on integers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
bridge = pytest.importorskip("tvm_convgrad.jax")

import jax.numpy as jnp  # noqa: E402

NHWC = ("NHWC", "HWIO", "NHWC")

CASES = {
    "plain": ((2, 6, 9, 8), (10, 6, 3, 3), {"padding": "SAME"}),
    "channels last": ((2, 9, 8, 6), (3, 3, 6, 10), {"padding": "SAME", "dimension_numbers": NHWC}),
    "stride": ((2, 9, 11, 4), (3, 2, 4, 6), {"strides": (2, 3), "padding": "SAME", "dimension_numbers": NHWC}),
    "same lower": ((1, 3, 7, 10), (4, 3, 4, 2), {"strides": (1, 2), "padding": "SAME_LOWER"}),
    "uneven padding": ((2, 4, 6, 7), (5, 4, 3, 3), {"padding": [(0, 2), (3, 1)], "strides": (2, 2)}),
    "dilation": ((1, 5, 12, 9), (7, 5, 3, 2), {"rhs_dilation": (3, 2), "padding": [(2, 2), (0, 1)]}),
    "groups": ((2, 8, 7, 7), (12, 2, 3, 3), {"groups": 4, "padding": "SAME"}),
    "depthwise": ((2, 10, 10, 16), (5, 5, 1, 32), {"groups": 16, "padding": "SAME", "dimension_numbers": NHWC}),
    "one pixel": ((4, 8, 1, 1), (8, 8, 1, 1), {}),
    "mixed layouts": ((2, 6, 9, 8), (10, 3, 3, 6), {"dimension_numbers": ("NCHW", "OHWI", "NHWC")}),
    "odd layouts": ((6, 2, 9, 8), (6, 10, 3, 2), {"dimension_numbers": ("CNHW", "IOHW", "HNWC")}),
    "1-D": ((2, 17, 6), (4, 6, 5), {"strides": (3,), "padding": [(2, 1)], "dimension_numbers": ("NWC", "WIO", "NWC")}),
    "3-D": ((1, 4, 5, 6, 7), (6, 4, 3, 3, 2), {"strides": (1, 2, 1), "padding": "SAME"}),
    "transposed": ((2, 4, 5, 6), (7, 4, 3, 3), {"lhs_dilation": (2, 2), "padding": [(1, 1), (2, 1)]}),
    "transposed, rows unseen": ((2, 3, 4, 5), (4, 3, 2, 3), {"lhs_dilation": (3, 3), "padding": [(1, 2), (0, 3)]}),
    "transposed, dilated": ((1, 5, 4, 3), (3, 2, 3, 4), {"lhs_dilation": (1, 2), "rhs_dilation": (2, 3),
        "padding": [(4, 3), (2, 3)], "dimension_numbers": ("NHWC", "HWIO", "NCHW")}),
    "transposed groups": ((2, 6, 5, 4), (9, 2, 3, 3),
        {"lhs_dilation": (2, 3), "groups": 3, "padding": [(1, 1), (0, 2)]}),
}  # fmt: skip


def convolution(x, w, strides=None, padding="VALID", groups=1, **rest):
    return jax.lax.conv_general_dilated(
        x, w, strides or (1,) * (x.ndim - 2), padding, feature_group_count=groups, **rest
    )


def integers(shape, seed: int, limit: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(np.float64)


def traced(x, w, options):
    """The convolution, and the gradients of both operands for a gradient of integers."""
    y, back = jax.vjp(lambda *both: convolution(*both, **options), x, w)
    return y, *back(jnp.asarray(integers(y.shape, 2), y.dtype))


def everything(x, w, options):
    return [np.asarray(each, np.float64) for each in traced(x, w, options)]


def check(x_shape, w_shape, options, dtype: str = "float32", limit: int = 3) -> None:
    """Within `patch`: results equal those of float64, which go to JAX."""
    x, w = integers(x_shape, 0, limit), integers(w_shape, 1, limit)
    before = bridge.stats()
    jitted = jax.jit(lambda *both: traced(*both, options))
    found = [np.asarray(each, np.float64) for each in jitted(jnp.asarray(x, dtype), jnp.asarray(w, dtype))]
    after = bridge.stats()
    assert after.kernel_calls - before.kernel_calls == 3, bridge.explain()[-3:]
    assert after.xla == before.xla
    with jax.enable_x64(True):
        wanted = everything(jnp.asarray(x), jnp.asarray(w), options)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_all_directions(name: str, kernels_always: None) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("seed", range(4))
def test_random_convolutions(seed: int, kernels_always: None) -> None:
    """Rank, layouts, strides, padding, dilation and groups by chance."""
    draw = random.Random(seed)
    rank = draw.choice((1, 2, 3))
    letters = "DHW"[-rank:]
    groups = draw.choice((1, 1, 2, 3))
    into, out = groups * draw.randint(1, 4), groups * draw.randint(1, 4)
    kernel = [draw.randint(1, 3) for _ in range(rank)]
    x = {"N": draw.randint(1, 3), "C": into, **{axis: draw.randint(6, 9) for axis in letters}}
    w = {"O": out, "I": into // groups, **dict(zip(letters, kernel, strict=True))}
    data, weight, result = ("".join(draw.sample(s + letters, rank + 2)) for s in ("NC", "OI", "NC"))
    transposed = draw.random() < 0.4
    # Pairs of strides and padding belong to the axes in the order of the rhs.
    order = [axis for axis in weight if axis in letters]
    dilation = {axis: draw.randint(1, 2) for axis in letters}
    covered = [dilation[axis] * (w[axis] - 1) + 1 for axis in order]
    steps = tuple(draw.randint(1, 3) for _ in order)
    options = {
        "padding": [(draw.randint(0, k - 1), draw.randint(0, k - 1)) for k in covered],
        "rhs_dilation": tuple(dilation[axis] for axis in order),
        "dimension_numbers": (data, weight, result),
        "groups": groups,
        ("lhs_dilation" if transposed else "strides"): steps,
    }
    check([x[axis] for axis in data], [w[axis] for axis in weight], options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types(dtype: str, kernels_always: None) -> None:
    """Sums of at most 2^8 of ones, which both types hold, are exact whatever the order of sums."""
    x, w = integers((1, 4, 6, 6), 0, 1), integers((3, 4, 2, 2), 1, 1)
    found = everything(jnp.asarray(x, dtype), jnp.asarray(w, dtype), {})
    with jax.enable_x64(True):
        wanted = everything(jnp.asarray(x), jnp.asarray(w), {})
    assert max(abs(each).max() for each in wanted) <= 2**8
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


LEFT = {
    "batch_group_count is 2": (((4, 3, 6, 6), (4, 3, 3, 3)), "float32", {"batch_group_count": 2}),
    "not for complex64": (((2, 3, 6, 6), (4, 3, 3, 3)), "complex64", {}),
    "not for int32": (((2, 3, 6, 6), (4, 3, 3, 3)), "int32", {}),
    "is negative": (((2, 3, 6, 6), (4, 3, 3, 3)), "float32", {"padding": [(-1, 0), (0, 0)]}),
    "beyond a kernel": (((2, 3, 6, 6), (4, 3, 3, 3)), "float32", {"padding": [(4, 0), (0, 0)], "lhs_dilation": (2, 2)}),
    "both lhs_dilation and window_strides": (
        ((2, 3, 6, 6), (4, 3, 3, 3)), "float32",
        {"strides": (2, 2), "lhs_dilation": (2, 2), "padding": [(1, 1), (1, 1)]},
    ),
    "preferred_element_type is float32": (
        ((2, 3, 6, 6), (4, 3, 3, 3)), "bfloat16", {"preferred_element_type": jnp.float32}
    ),
    "no elements": (((0, 3, 6, 6), (4, 3, 3, 3)), "float32", {}),
    "3, 4 or 5 axes": (((2, 3), (4, 3)), "float32", {"strides": ()}),
}  # fmt: skip


@pytest.mark.parametrize("why", LEFT)
def test_what_falls_through(why: str, store: Path) -> None:
    """JAX's own result, to the last bit, and the reason."""
    shapes, dtype, options = LEFT[why]
    x, w = (jnp.asarray(integers(shape, seed), dtype) for seed, shape in enumerate(shapes))
    wanted = convolution(x, w, **options)
    with bridge.patch(always=True, folder=store):
        found = convolution(x, w, **options)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert any(why in told.why and told.where == "XLA" for told in bridge.explain())


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_strides": (1,)},
        {"padding": "HALF"},
        {"dimension_numbers": ("NCHW", "OIHW", "NCH")},
        {"feature_group_count": 2},
        {"padding": [(1, 1)]},
    ],
)
def test_what_jax_refuses_it_refuses_in_its_own_words(arguments: dict[str, object], store: Path) -> None:
    x, w = jnp.ones((2, 3, 6, 6)), jnp.ones((4, 3, 3, 3))
    whole = {"window_strides": (1, 1), "padding": "VALID", **arguments}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as own:
        jax.lax.conv_general_dilated(x, w, **whole)
    for function in (jax.lax.conv_general_dilated, bridge.conv_general_dilated):
        with bridge.patch(always=True, folder=store), pytest.raises(own.type) as found:
            function(x, w, **whole)
        assert str(found.value) == str(own.value)


def test_arrays_of_numpy(kernels_always: None) -> None:
    """They have the types that JAX gives them: float64 is float32 there."""
    x, w = integers((2, 6, 9, 8), 0), integers((10, 6, 3, 3), 1)
    before = bridge.stats().kernel_calls
    found = convolution(x, w, padding="SAME")
    assert found.dtype == "float32"
    assert bridge.stats().kernel_calls == before + 1
    with jax.enable_x64(True):
        np.testing.assert_array_equal(found, convolution(x, w, padding="SAME"))


def test_the_function_has_jaxs_parameters() -> None:
    import inspect

    own, ours = (
        inspect.signature(each).parameters for each in (jax.lax.conv_general_dilated, bridge.conv_general_dilated)
    )
    assert list(own) == list(ours)
    assert [each.default for each in own.values()] == [each.default for each in ours.values()]
