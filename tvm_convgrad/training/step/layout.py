# SPDX-License-Identifier: Apache-2.0
"""Converting the convolutions of a training step, forward and backward, to another layout."""

from __future__ import annotations

import tvm

from relax_ops.passes.layout import ConvertLayout

_GRADIENTS = ("conv2d_backward_weight", "conv2d_backward_data")
KERNEL_LAYOUTS = {"NHWC": "OIHW", "NHWC:OHWI": "OHWI"}
"""With "NHWC" kernels stay as the parameters are: the generated ones pack their weight anyway, and wgrad writes what
the optimizer updates in place. With OHWI, which CUTLASS requires, each step transposes every weight, and its
gradient back.
"""


def convert_layout(module: tvm.IRModule, layout: str) -> tvm.IRModule:
    """The module with 2-D convolutions in `layout`: one of `names.LAYOUTS`.

    "NCHW" leaves it as it is, "NHWC" keeps OIHW kernels, "NHWC:OHWI" takes OHWI ones.
    Inputs, parameters and results keep the layout that the model has; transforms stand at the borders.
    """
    if layout == "NCHW":
        return module
    wanted = ["NHWC", KERNEL_LAYOUTS[layout]]
    return ConvertLayout({f"relax.nn.{op}": wanted for op in ("conv2d", *_GRADIENTS)})(module)
