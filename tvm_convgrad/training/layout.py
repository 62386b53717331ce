# SPDX-License-Identifier: Apache-2.0
"""Converting the convolutions of a training step, forward and backward, to another layout."""

from __future__ import annotations

from typing import Any

from relax_ops.layout_cleanup import converted

_NHWC = ["NHWC", "OIHW"]
"""Kernels stay as the parameters are: the generated ones pack their weight anyway, and wgrad writes what the optimizer
updates in place. Turned to OHWI, every weight would be transposed in each step, and its gradient back."""

NHWC_LAYOUTS = {
    "relax.nn.conv2d": _NHWC,
    "relax.nn.conv2d_backward_weight": _NHWC,
    "relax.nn.conv2d_backward_data": _NHWC,
}


def convert_layout(module: Any, layout: str) -> Any:
    """The module with 2-D convolutions in `layout`: "NCHW" leaves it, "NHWC" takes NHWC data and OIHW kernels.

    Inputs, parameters and results keep the layout that the model has; transforms stand at the borders.
    """
    if layout == "NCHW":
        return module
    return converted(NHWC_LAYOUTS)(module)
