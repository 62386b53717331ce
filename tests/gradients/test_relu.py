# SPDX-License-Identifier: Apache-2.0
"""relu's gradient: 0 at 0 as in PyTorch, from the result and not from the operand."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from tests.layout.models import calls, run


def program():
    x, dy = (relax.Var(name, relax.TensorType((5,), "float32")) for name in ("x", "dy"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, dy]):
        with builder.dataflow():
            y = builder.emit(op.nn.relu(x), "y")
            loss = builder.emit_output(op.sum(builder.emit(op.multiply(y, dy))))
        builder.emit_func_output(loss)
    module = builder.get()
    return relax.transform.Gradient("main", require_grads=module["main"].params[0])(module)


def test_values():
    x = np.array([-1, 0, 2, -np.inf, 3], "float32")
    dy = np.array([1, 2, 3, 4, np.inf], "float32")
    np.testing.assert_array_equal(run(program(), "main_adjoint", [x, dy])[1], [0, 0, 3, 0, np.inf])


def test_operand_is_not_kept():
    module = program()
    readers = [c for c in calls(module, "main_adjoint") if module["main_adjoint"].params[0] in list(c.args)]
    assert [str(c.op.name) for c in readers] == ["relax.nn.relu"]
