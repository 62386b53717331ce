# SPDX-License-Identifier: Apache-2.0
"""What a compiled library is given is checked where it is entered; kernels inside check nothing again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi

from relax_ops.compat import nodes_within
from tests.linked import PLAIN
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.codegen.loops import MAX_INDEX, Loops, load, make_parameter
from tvm_convgrad.training.compile.lower import compile_module
from tvm_convgrad.training.passes.internal_calls import PIPELINE, without_checks

SHAPES = ((2, 4, 9, 9), (8, 4, 3, 3))


@pytest.fixture(scope="module")
def executable():
    """relu(conv2d(x, w)) of any batch."""
    batch = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((batch, *SHAPES[0][1:]), "float32"))
    w = relax.Var("w", relax.TensorType(SHAPES[1], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.nn.conv2d(x, w, padding=1))))
        builder.emit_func_output(result)
    return compile_module(builder.get(), PLAIN)


@pytest.fixture(scope="module")
def main(executable, tmp_path_factory: pytest.TempPathFactory):
    path = str(Path(tmp_path_factory.mktemp("linked")) / "main.so")
    executable.export_library(path)
    return relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())["main"]


def ones(*shape: int, dtype: str = "float32"):
    return tvm.runtime.tensor(np.ones(shape, dtype))


def strided():
    """Every second column of a tensor."""
    return tvm_ffi.from_dlpack(np.ones((*SHAPES[0][:3], 18), "float32")[..., ::2])


def test_right_arguments_are_taken(main) -> None:
    found = main(*(ones(*shape) for shape in SHAPES)).numpy()
    assert found.shape == (2, 8, 9, 9)
    assert found[0, 0, 4, 4] == 36
    assert found[1, 7, 0, 8] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (ones(2, 5, 9, 9), ones(*SHAPES[1])), "5 vs. 4"),
        (lambda: (ones(*SHAPES[0]), ones(8, 4, 3, 2)), "2 vs. 3"),
        (lambda: (ones(2, 4, 81), ones(*SHAPES[1])), "ndim 4 but get 3"),
        (lambda: (ones(*SHAPES[0], dtype="float64"), ones(*SHAPES[1])), "float32 but get float64"),
        (lambda: (strided(), ones(*SHAPES[1])), "compact array"),
    ],
    ids=["channels", "kernel", "rank", "type", "strides"],
)
def test_wrong_arguments_are_refused(main, arguments, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        main(*arguments())


def test_tensors_of_a_tuple_are_checked() -> None:
    """As a step's state is given."""
    pair = relax.Var("pair", relax.TupleType([relax.TensorType(shape, "float32") for shape in SHAPES]))
    builder = relax.BlockBuilder()
    with builder.function("main", [pair]):
        with builder.dataflow():
            x, w = (builder.emit(relax.TupleGetItem(pair, number)) for number in range(2))
            result = builder.emit_output(relax.op.nn.conv2d(x, w, padding=1))
        builder.emit_func_output(result)
    main = relax.VirtualMachine(compile_module(builder.get(), PLAIN), tvm.cpu())["main"]
    assert main((ones(*SHAPES[0]), ones(*SHAPES[1]))).numpy()[0, 0, 4, 4] == 36
    with pytest.raises(ValueError, match="compact array"):
        main((strided(), ones(*SHAPES[1])))


def test_only_entries_and_kernels_with_checks_of_their_own_keep_theirs() -> None:
    module = tvm.IRModule({name: doubled(name, name == "own") for name in ("convgrad_entry_main", "inner", "own")})
    target = tvm.target.Target(PLAIN)
    bound = tvm.tirx.transform.BindTarget(target.with_host(target))(module)
    lowered = without_checks()[0](bound)
    bare = tvm.tirx.transform.SkipAssert()(lowered)
    checked = {v.name_hint for v in lowered.get_global_vars() if not bare[v].body.same_as(lowered[v].body)}
    assert checked == {"convgrad_entry_main", "own"}


@pytest.mark.parametrize(
    "extent",
    [lambda h: h // 2, lambda h: tirx.min(tirx.max(h - 2, 0), h) - tirx.min(tirx.max(h - 7, 0), h)],
    ids=["half", "slice"],
)
def test_divisions_by_free_extents_do_not_choose_between_signs(extent) -> None:
    """By extents that may be 0 for all that TVM knows: with choices, LLVM compiled some functions for minutes."""
    n, h, w = (tirx.Var(name, "int64") for name in "nhw")
    rows = extent(h)
    x = te.placeholder((n, 4, rows, w), name="x")
    whole = te.placeholder((n, h, w), name="whole")  # from which h is read
    function = te.create_prim_func([x, whole, topi.reshape(x, (n, 4, w, rows))])
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    schedule = tvm.s_tir.Schedule(module)
    schedule.parallel(schedule.fuse(*schedule.get_loops(schedule.get_sblock("T_reshape"))[:3]))
    target = tvm.target.Target(PLAIN)
    lowered = without_checks()[0](tvm.tirx.transform.BindTarget(target.with_host(target))(schedule.mod))
    divisions = [
        each for f in lowered.functions.values() for each in nodes_within(f.body, tirx.FloorDiv, tirx.FloorMod)
    ]
    assert len(divisions) > 3
    assert not [each for each in divisions if not isinstance(each.b, tirx.Max | tirx.IntImm)]


def doubled(name: str, own: bool):
    """result = 2 source, of at most 9 elements if it has a check of its own."""
    loops, extent = Loops(), tvm.tirx.Var("n", "int64")
    source, result = (make_parameter(each, (extent,), "float32") for each in ("source", "result"))
    count = loops.batch(extent, MAX_INDEX // 18) if own else tvm.tirx.Cast("int32", extent)
    with loops.loop(count) as i:
        loops.store(result, i, load(source, i) * tvm.tirx.const(2.0, "float32"))
    return loops.finish([source, result], name)


def test_guarded_remainders_keep_their_wide_indices():
    """By LLVM's optimiser, for this CPU: with AVX-512 and 32-bit indices the result was wrong (see the pipeline)."""
    ten, sixteen = (tirx.IntImm("int64", extent) for extent in (10, 16))
    a = te.placeholder([tirx.IntImm("int64", extent) for extent in (2, 4, 5, 4)], name="a")
    b = te.placeholder([tirx.IntImm("int64", extent) for extent in (2, 4, 5, 2)], name="b")
    c = te.placeholder([tirx.IntImm("int64", extent) for extent in (5, 4)], name="c")

    def element(i, j):
        right = te.if_then_else(j % 4 >= 2, b[i // 5, j // 4, i % 5, j % 4 - 2], tirx.const(0, "float32"))
        return c[i % 5, j % 4] * a[i // 5, j // 4, i % 5, j % 4] + right

    function = te.create_prim_func([a, b, c, te.compute((ten, sixteen), element)])
    module = tvm.IRModule({"main": function.with_attrs({"tirx.is_scheduled": True, "global_symbol": "main"})})
    library = tvm.tirx.build(module, native_target(), PIPELINE)
    rng = np.random.default_rng(0)
    x, y, z = (rng.integers(-4, 5, shape).astype("float32") for shape in ((2, 4, 5, 4), (2, 4, 5, 2), (5, 4)))
    found = tvm.runtime.tensor(np.full((10, 16), np.nan, "float32"))
    library["main"](*map(tvm.runtime.tensor, (x, y, z)), found)
    wanted = x * z + np.concatenate([np.zeros_like(y), y], -1)
    np.testing.assert_array_equal(found.numpy(), wanted.transpose(0, 2, 1, 3).reshape(10, 16))


def test_guarded_divisions_by_an_extent_are_computed_before_the_loop():
    """By LLVM's optimiser, for this CPU: with AVX-512 rows whose first element is masked had another row's factor."""
    n = tirx.Var("n", "int64")
    factors, image = te.placeholder([tirx.IntImm("int64", 2)], name="factors"), te.placeholder([n, n], name="image")

    def element(i, j):
        return te.if_then_else(i % n - j >= 4, tirx.const(-9, "float32"), factors[i // n] * image[i % n, j])

    function = te.create_prim_func([factors, image, te.compute((2 * n, n), element)])
    module = tvm.IRModule({"main": function.with_attrs({"tirx.is_scheduled": True, "global_symbol": "main"})})
    library = tvm.tirx.build(module, native_target(), PIPELINE)
    for size in (1, 7, 8, 16, 33):
        x = np.random.default_rng(0).integers(-4, 5, (size, size)).astype("float32")
        found = tvm.runtime.tensor(np.full((2 * size, size), np.nan, "float32"))
        library["main"](tvm.runtime.tensor(np.array([2, 3], "float32")), tvm.runtime.tensor(x), found)
        wanted = np.where(np.subtract.outer(np.arange(size), np.arange(size)) >= 4, -9, np.stack([2 * x, 3 * x]))
        np.testing.assert_array_equal(found.numpy(), wanted.reshape(2 * size, size))


def test_guarded_divisions_behind_a_common_subexpression_are_computed_before_the_loop():
    """i % (m n) is one, by whose quotient the factor is found."""
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    factors, image = te.placeholder([m], name="factors"), te.placeholder([m, n, n], name="image")

    def element(i, j):
        at = i % (m * n)
        return te.if_then_else(i % n - j >= 4, tirx.const(-9, "float32"), factors[at // n] * image[at // n, at % n, j])

    function = te.create_prim_func([factors, image, te.compute((2 * m * n, n), element)])
    module = tvm.IRModule({"main": function.with_attrs({"tirx.is_scheduled": True, "global_symbol": "main"})})
    library = tvm.tirx.build(module, native_target(), PIPELINE)
    for size in (7, 8, 16, 33):
        rng = np.random.default_rng(0)
        scale, x = rng.integers(2, 5, 3).astype("float32"), rng.integers(-4, 5, (3, size, size)).astype("float32")
        found = tvm.runtime.tensor(np.full((6 * size, size), np.nan, "float32"))
        library["main"](tvm.runtime.tensor(scale), tvm.runtime.tensor(x), found)
        wanted = np.where(np.subtract.outer(np.arange(size), np.arange(size)) >= 4, -9, scale[:, None, None] * x)
        np.testing.assert_array_equal(found.numpy(), np.concatenate([wanted, wanted]).reshape(6 * size, size))


def test_divisions_of_vectors_stay_as_they_are():
    """As depthwise convolutions have them, of the places of their pixels."""
    x = te.placeholder([tirx.IntImm("int64", 64)], "int32", name="x")
    function = te.create_prim_func([x, te.compute((64,), lambda i: x[i] + tirx.Cast("int32", i) // 3)])
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    (loop,) = schedule.get_loops(schedule.get_sblock("compute"))
    schedule.vectorize(schedule.split(loop, [None, 16])[1])
    scheduled = schedule.mod["main"].with_attrs({"tirx.is_scheduled": True, "global_symbol": "main"})
    library = tvm.tirx.build(tvm.IRModule({"main": scheduled}), native_target(), PIPELINE)
    values, found = np.arange(5, 69, dtype="int32"), tvm.runtime.tensor(np.zeros(64, "int32"))
    library["main"](tvm.runtime.tensor(values), found)
    np.testing.assert_array_equal(found.numpy(), values + np.arange(64) // 3)
