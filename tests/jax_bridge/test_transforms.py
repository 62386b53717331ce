# SPDX-License-Identifier: Apache-2.0
"""JAX's transforms of convolutions by kernels: derivatives of any order, vmap, scan, checkpoint, devices, export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
bridge = pytest.importorskip("tvm_convgrad.jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.jet import jet  # noqa: E402

from tests.jax_bridge.test_results import integers  # noqa: E402

OPTIONS = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
X, W = (2, 7, 6, 4), (3, 2, 2, 6)


def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, feature_group_count=2, **OPTIONS)


def cubic(x, w):
    """A loss of third order in each operand, on integers exact in float32 as in float64."""
    y = convolve(x, w)
    return (y * y * jnp.asarray(integers(y.shape, 5, 1), y.dtype)).sum()


def operands(dtype="float32", count: int = 2):
    return [jnp.asarray(integers(shape, seed, 1), dtype) for seed, shape in enumerate((X, W) * (count // 2))]


def in_float64(function, arguments):
    """JAX's own results."""
    with jax.enable_x64(True):
        return jax.jit(function)(*(jnp.asarray(np.asarray(each), "float64") for each in arguments))


def by_kernels(function, arguments, store: Path):
    """Results where every convolution is a kernel's, inside of jit."""
    with bridge.patch(always=True, folder=store):
        before = bridge.stats()
        found = jax.block_until_ready(jax.jit(function)(*arguments))
        after = bridge.stats()
    assert after.kernel_calls > before.kernel_calls
    assert after.xla == before.xla, bridge.explain()[-5:]
    return found


def same(function, arguments, store: Path) -> None:
    found, wanted = by_kernels(function, arguments, store), in_float64(function, arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other))


def test_forward_mode(store: Path) -> None:
    def tangent(x, w, dx, dw):
        return jax.jvp(cubic, (x, w), (dx, dw))

    same(tangent, operands(count=4), store)


def test_gradients_of_gradients(store: Path) -> None:
    """Reverse over reverse, both operands: all three directions are differentiated."""

    def second(x, w):
        return jax.grad(lambda *both: sum((each * each).sum() for each in jax.grad(cubic, (0, 1))(*both)), (0, 1))(x, w)

    same(second, [each * (np.arange(each.size).reshape(each.shape) % 5 == 0) for each in operands()], store)


def test_hessian_vector_product(store: Path) -> None:
    """Forward over reverse, and reverse over forward."""

    def product(x, w, dx, dw):
        return jax.jvp(jax.grad(cubic, (0, 1)), (x, w), (dx, dw))

    def other(x, w, dx, dw):
        return jax.grad(lambda *both: jax.jvp(cubic, both, (dx, dw))[1], (0, 1))(x, w)

    same(product, operands(count=4), store)
    same(other, operands(count=4), store)


@pytest.mark.parametrize("axes", [(0, None), (None, 3), (1, 4), (4, 0)])
def test_vmap(axes: tuple[int | None, int | None], store: Path) -> None:
    """Over either operand or both, along any axis, of all directions: each entry's convolution and gradients."""
    arguments = []
    for seed, (shape, axis) in enumerate(zip((X, W), axes, strict=True)):
        whole = list(shape)
        if axis is not None:
            whole.insert(axis, 3)
        arguments.append(jnp.asarray(integers(whole, seed, 1), "float32"))

    def batched(x, w):
        return jax.vmap(jax.value_and_grad(cubic, (0, 1)), axes)(x, w)

    same(batched, arguments, store)


@pytest.mark.parametrize("axes", [(0, None), (None, 3), (1, 4)])
def test_vmap_over_no_entries(axes: tuple[int | None, int | None], store: Path) -> None:
    """A batch of 0, as JAX has it: empty results inside of vmap, gradients of 0 outside."""
    shapes = [shape if axis is None else np.insert(shape, axis, 0) for shape, axis in zip((X, W), axes, strict=True)]
    arguments = [jnp.ones(tuple(map(int, shape))) for shape in shapes]
    inside = jax.vmap(jax.value_and_grad(cubic, (0, 1)), axes)

    def outside(x, w):
        return jax.grad(lambda *both: jax.vmap(cubic, axes)(*both).sum(), (0, 1))(x, w)

    for function in (inside, outside):
        with bridge.patch(always=True, folder=store):
            found = jax.tree.leaves(jax.jit(function)(*arguments))
        wanted = jax.tree.leaves(jax.jit(function)(*arguments))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


def test_vmap_of_vmap_and_grad_outside(store: Path) -> None:
    x = jnp.asarray(integers((3, 2, *X), 0, 1), "float32")
    w = jnp.asarray(integers((3, *W), 1, 1), "float32")

    def loss(x, w):
        return jax.vmap(lambda some, one: jax.vmap(cubic, (0, None))(some, one).sum())(x, w).sum()

    same(jax.grad(loss, (0, 1)), (x, w), store)


def test_scan_and_while(store: Path) -> None:
    def steps(x, w):
        def step(carry, _):
            return carry - jnp.sign(jax.grad(cubic, 1)(x, carry)), carry.sum()

        done, sums = jax.lax.scan(step, w, None, length=3)
        return jax.lax.fori_loop(0, 2, lambda _, each: each + jnp.sign(jax.grad(cubic, 1)(x, each)), done), sums

    same(steps, operands(), store)


@pytest.mark.parametrize("policy", [None, "dots_saveable", "nothing_saveable"])
def test_checkpoint(policy: str | None, store: Path) -> None:
    chosen = None if policy is None else getattr(jax.checkpoint_policies, policy)
    same(jax.grad(jax.checkpoint(cubic, policy=chosen), (0, 1)), operands(), store)


def test_outside_of_jit(store: Path) -> None:
    x, w = operands()
    with bridge.patch(always=True, folder=store):
        before = bridge.stats().kernel_calls
        found = jax.grad(cubic, (0, 1))(x, w)
        assert bridge.stats().kernel_calls >= before + 3
    for one, other in zip(found, in_float64(jax.grad(cubic, (0, 1)), (x, w)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_jit(store: Path) -> None:
    """In jax.disable_jit() XLA computes one call after the other."""
    x, w = operands()
    with bridge.patch(always=True, folder=store), jax.disable_jit():
        found = jax.grad(cubic, (0, 1))(x, w)
    for one, other in zip(found, in_float64(jax.grad(cubic, (0, 1)), (x, w)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_taylor_series(store: Path) -> None:
    """JAX divides the terms by factorials, which rounds each factor of sums of 12 products."""
    x, w = operands()

    def series(x, w):
        value, terms = jet(convolve, (x, w), ((x * 2, x * 4), (w * 8, w * 2)))
        return value, *terms

    found, wanted = by_kernels(series, (x, w), store), in_float64(series, (x, w))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=64 * 2.0**-24 * np.abs(other).max())


def test_linearize_and_transpose(store: Path) -> None:
    x, w = operands()

    def both(x, w):
        _, tangent = jax.linearize(lambda each: convolve(x, each), w)
        y = tangent(w)
        return y, *jax.linear_transpose(tangent, w)(y)

    same(both, (x, w), store)


def test_the_public_function(store: Path) -> None:
    """Without a patch, and in the layouts and with the convolutions that other functions of JAX make."""
    x, w = operands()
    own = convolve(x, w)
    with bridge.patch(always=True, folder=store):
        found = bridge.conv_general_dilated(x, w, feature_group_count=2, **OPTIONS)
        y = jax.lax.conv_transpose(x, jnp.ones((3, 3, 5, 4)), (2, 2), "SAME", transpose_kernel=True)
        signal = jnp.convolve(jnp.arange(9.0), jnp.arange(3.0))
    np.testing.assert_array_equal(found, own)
    assert y.shape == (2, 14, 12, 5)
    np.testing.assert_array_equal(signal, np.convolve(np.arange(9.0), np.arange(3.0)))
    assert any(told.call.startswith("dgrad") and told.where == "kernel" for told in bridge.explain())


def test_weak_types(store: Path) -> None:
    """The result of two weak operands is weak: added to bfloat16, it is bfloat16."""
    weak = [jax.lax.full_like(1.0, 1.0, shape=shape) for shape in (X, W)]
    assert all(jax.typeof(each).weak_type for each in weak)

    def gradients(x, w):
        return convolve(x, w), *jax.grad(lambda *both: convolve(*both).sum(), (0, 1))(x, w)

    for x, w in (weak, (weak[0], operands()[1]), (operands()[0], weak[1])):
        wanted = [(each.weak_type, each.dtype) for each in jax.eval_shape(gradients, x, w)]
        with bridge.patch(always=True, folder=store):
            for function in (gradients, jax.jit(gradients)):
                assert [(jax.typeof(each).weak_type, each.dtype) for each in function(x, w)] == wanted
    with bridge.patch(always=True, folder=store):
        assert (convolve(*weak) + jnp.bfloat16(1)).dtype == jnp.bfloat16


@pytest.mark.parametrize("jitted", [False, True])
def test_debug_nans(jitted: bool, store: Path) -> None:
    with bridge.patch(always=True, folder=store), jax.debug_nans(True):
        function = jax.jit(lambda x, w: convolve(x, w) * 2) if jitted else convolve
        x, w = operands()
        function(x, w)
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in conv_general_dilated"):
            function(x.at[0, 3, 3].set(jnp.inf), w * 0)


def test_export_falls_through(store: Path) -> None:
    """An exported program may run where no kernel is."""
    with bridge.patch(always=True, folder=store):
        exported = jax.export.export(jax.jit(convolve))(*operands())
    assert "@tvm_convgrad" not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(*operands()), convolve(*operands()))
    assert any("exported" in told.why for told in bridge.explain())


DEVICES = """
import sys
import jax, numpy as np, jax.numpy as jnp
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
import tvm_convgrad.jax as bridge
assert len(jax.devices()) == 2
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def loss(x, w): return (jax.lax.conv_general_dilated(x, w, (1, 1), "SAME") ** 2).sum()
def sharded(x, w): return jax.lax.psum(jax.grad(loss, 1)(x, w), "x")
x, w = jnp.asarray(np.arange(4 * 3 * 25).reshape(4, 3, 5, 5) % 7, "float32"), jnp.ones((2, 3, 3, 3))
wanted = jax.grad(loss, 1)(x, w)
with bridge.patch(always=True, folder=Path(sys.argv[1])):
    found = {
        "jit": jax.jit(jax.grad(loss, 1))(jax.device_put(x, NamedSharding(mesh, P("x"))), w),
        "shard_map": jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(),
                                           check_vma=False))(x, w),
        "pmap": jax.pmap(sharded, "x", in_axes=(0, None))(x.reshape(2, 2, 3, 5, 5), w)[0],
    }
    beside = jax.jit(lambda x, w: (x.sum(), jax.grad(loss, 1)(jnp.arange(150.0).reshape(2, 3, 5, 5), w)))(
        jax.device_put(x, NamedSharding(mesh, P("x"))), w)[1]
    checked = jax.shard_map(lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"), mesh=mesh,
                            in_specs=(P("x"), P()), out_specs=P("x"))(x, w)
for name, each in found.items():
    np.testing.assert_array_equal(np.asarray(each), np.asarray(wanted), err_msg=name)
np.testing.assert_array_equal(checked, jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))
np.testing.assert_array_equal(beside, jax.grad(loss, 1)(jnp.arange(150.0).reshape(2, 3, 5, 5), w))
assert bridge.stats().kernel_calls == 0, bridge.explain()
print(*bridge.explain(), sep="\\n")
"""


def test_programs_of_several_devices_fall_through(store: Path) -> None:
    """jit over sharded arrays, shard_map and pmap: XLA splits its own convolutions among devices."""
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, str(store)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr
    assert "2 devices" in done.stdout
    assert "shard_map" in done.stdout
