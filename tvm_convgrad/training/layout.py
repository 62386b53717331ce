# SPDX-License-Identifier: Apache-2.0
"""Converting the convolutions of a training step, forward and backward, to another layout."""

from __future__ import annotations

from typing import Any

from relax_ops.layout_cleanup import converted

_GRADIENTS = ("conv2d_backward_weight", "conv2d_backward_data")
_KERNELS = {"NHWC": "OIHW", "NHWC:OHWI": "OHWI"}
"""With "NHWC" kernels stay as the parameters are: the generated ones pack their weight anyway, and wgrad writes what
the optimizer updates in place. With OHWI, which CUTLASS wants, each step turns every weight, and its gradient back.
"""

LAYOUTS = ("NCHW", *_KERNELS)
"""What `convert_layout` takes."""


def convert_layout(module: Any, layout: str) -> Any:
    """The module with 2-D convolutions in `layout`: "NCHW" leaves it, "NHWC" takes OIHW kernels, "NHWC:OHWI" OHWI ones.

    Inputs, parameters and results keep the layout that the model has; transforms stand at the borders.
    """
    if layout == "NCHW":
        return module
    wanted = ["NHWC", _KERNELS[layout]]
    return converted({f"relax.nn.{op}": wanted for op in ("conv2d", *_GRADIENTS)})(module)
