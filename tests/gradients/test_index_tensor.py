# SPDX-License-Identifier: Apache-2.0
"""Gradients of index_tensor and of an index_put that adds: sums of places that occur several times; all exact."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.gradients.harness import check, integers
from tvm_convgrad.training.compile.lower import simplified

op = relax.op
X = integers(5, 4, 3)
PLACES = {
    "one_axis": ([[3, -1, 3, 0, 3]],),
    "two_axes": ([1, -5, 1, 0], [2, 0, 2, -1]),
    "broadcast": ([[1], [4], [1]], [0, 0, 3]),
    "all_axes": ([1, 1, 1], [0, 0, 0], [-1, 2, 1]),
}


def constants(name: str) -> relax.Tuple:
    return relax.Tuple([relax.const(np.array(each, "int64"), "int64") for each in PLACES[name]])


@pytest.mark.parametrize("name", PLACES)
def test_index_tensor(name: str) -> None:
    torch = pytest.importorskip("torch")
    index = tuple(torch.tensor(each) for each in PLACES[name])
    check(lambda _, x: op.index_tensor(x, constants(name)), lambda x: x[index], [X], exact=True)


def test_sums_are_not_taken_in_parallel() -> None:
    """TVM's index_put has a parallel loop over places, of which two may be one: none is left that adds."""
    builder = relax.BlockBuilder()
    x, values = relax.Var("x", relax.TensorType((5, 4), "float32")), relax.Var("v", relax.TensorType((3,), "float32"))
    with builder.function("main", [x, values]):
        with builder.dataflow():
            places = relax.Tuple(
                [relax.const(np.array([1, -4, 1]), "int64"), relax.const(np.array([0, 0, 3]), "int64")]
            )
            result = builder.emit_output(op.index_put(x, places, values, accumulate=True))
        builder.emit_func_output(result)
    module = simplified(builder.get())
    assert "index_put" not in module.script()
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    given = integers(5, 4).astype("float32"), np.array([1, 2, 4], "float32")
    found = machine["main"](*map(tvm.runtime.tensor, given)).numpy()
    wanted = given[0].copy()
    np.add.at(wanted, ([1, 1, 1], [0, 0, 3]), given[1])
    assert np.array_equal(found, wanted)
