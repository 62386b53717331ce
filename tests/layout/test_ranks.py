# SPDX-License-Identifier: Apache-2.0
"""1-D and 3-D convolutions, and transposed ones, in training graphs with the channels last."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from relax_ops.passes.layout import ConvertLayout
from tests.layout.models import calls, run, transforms
from tvm_convgrad.core.geometry import SPATIAL

CONV = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}
MAX_POOL = {1: op.nn.max_pool1d, 2: op.nn.max_pool2d, 3: op.nn.max_pool3d}


def u_net(rank):
    """conv - relu - pool - conv - relu - transposed conv, joined with what was before the pool - conv; mean square.

    Returns the module with its gradients and the arrays for it.
    """
    letters, side = SPATIAL[rank], (8, 6, 4)[:rank]
    shapes = {
        "x": (2, 3, *side),
        "w1": (4, 3, *[3] * rank),
        "b1": (4,),
        "w2": (6, 4, *[3] * rank),
        "w3": (6, 4, *[2] * rank),
        "w4": (5, 8, *[3] * rank),
    }
    x, w1, b1, w2, w3, w4 = params = [relax.Var(n, relax.TensorType(s, "float64")) for n, s in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            conv = lambda a, w: builder.emit(CONV[rank](a, w, padding=1))  # noqa: E731
            wide = builder.emit(op.expand_dims(b1, [0, *range(2, rank + 2)]))
            skip = builder.emit(op.nn.relu(builder.emit(op.add(conv(x, w1), wide))))
            low = builder.emit(MAX_POOL[rank](skip, (2,) * rank, (2,) * rank))
            low = builder.emit(op.nn.relu(conv(low, w2)))
            up = builder.emit(TRANSPOSED[rank](low, w3, strides=2, kernel_layout="IO" + letters))
            y = conv(builder.emit(op.concat([up, skip], 1)), w4)
            loss = builder.emit_output(op.mean(builder.emit(op.multiply(y, y))))
        builder.emit_func_output(loss, params)
    module = builder.get()
    module = relax.transform.Gradient("main", require_grads=list(module["main"].params[1:]))(module)
    rng = np.random.default_rng(rank)
    return module, [rng.standard_normal(shape) for shape in shapes.values()]


@pytest.mark.parametrize("kernel", ["O{}I", "{}IO"])
@pytest.mark.parametrize("rank", SPATIAL)
def test_u_net_with_channels_last(rank, kernel):
    letters = SPATIAL[rank]
    data, kernel = f"N{letters}C", kernel.format(letters)
    names = [f"relax.nn.conv{rank}d{suffix}" for suffix in ("", "_backward_weight", "_backward_data")]
    desired = {name: [data, kernel] for name in names}
    # The weight of the transposed convolution is that of its gradient, a convolution, with I and O changed.
    desired[f"relax.nn.conv{rank}d_transpose"] = [data, kernel.translate(str.maketrans("IO", "OI"))]
    module, arrays = u_net(rank)
    changed = ConvertLayout(desired)(module)
    layouts = {str(c.attrs.data_layout) for c in calls(changed, "main_adjoint", *(n[6:] for n in desired))}
    assert layouts == {data}
    forward, both = transforms(changed, "main"), transforms(changed, "main_adjoint")
    assert forward == 5  # the input and four weights
    # Four weight gradients; the transposed convolution's weight is read in the other order by its gradient.
    assert both <= forward + 4
    if kernel.endswith("O"):
        return  # values once for each rank, as builds are slow
    for have, want in zip(run(changed, "main_adjoint", arrays), run(module, "main_adjoint", arrays), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-10, atol=1e-12)
