# SPDX-License-Identifier: Apache-2.0
"""FLegalize of stock convolutions: our kernels, or TVM's own by way of NCHW in layouts that it lowers wrongly or not.

Stock leaves a convolution unlowered, so that the build fails, if its result has another layout than its data, and a
transposed one in any layout but NCHW/IOHW; 1-d ones must be NCW or NWC. With spatial axes in another order than DHW it
gives each axis another one's stride and padding, without a word. ConvertLayout makes all of these. Every other call
goes to the stock function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from relax_ops.ir import PREFIX, part
from relax_ops.lowering import with_kernels
from tvm_convgrad.geometry import SPATIAL, data_layout_of, kernel_layout_of

_OPS = {
    **{f"conv{rank}d": getattr(relax.op.nn, f"conv{rank}d") for rank in SPATIAL},
    **{f"conv{rank}d_transpose": getattr(relax.op.nn, f"conv{rank}d_transpose") for rank in SPATIAL},
}


def _canonical(name: str) -> tuple[str, str]:
    rank = int(name[len("conv")])
    kernel = kernel_layout_of(rank)
    return data_layout_of(rank), "IO" + SPATIAL[rank] if name.endswith("_transpose") else kernel


def _is_served(name: str, data: str, kernel: str, out: str) -> bool:
    """Whether stock TVM lowers these layouts rightly. Packed ones are left to it."""
    canonical_data, canonical_kernel = _canonical(name)
    if len(data) != len(canonical_data) or len(kernel) != len(canonical_kernel) or len(out) != len(canonical_data):
        return True
    if name.endswith("_transpose"):
        return (data, kernel, out) == (canonical_data, canonical_kernel, canonical_data)
    spatial = canonical_data[2:]
    in_order = all("".join(a for a in layout if a in spatial) == spatial for layout in (data, kernel))
    return in_order and out == data and (len(spatial) > 1 or data in ("NCW", "NWC"))


def _legalization(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    canonical_data, canonical_kernel = _canonical(name)

    def legalize(block_builder: Any, call: Any) -> Any:
        attrs = call.attrs
        data, kernel = str(attrs.data_layout), str(attrs.kernel_layout)
        out = str(attrs.out_layout) or data
        if _is_served(name, data, kernel, out):
            return stock(block_builder, call)
        own = {"output_padding": attrs.output_padding} if name.endswith("_transpose") else {}
        out_dtype = attrs.out_dtype or None
        result = _OPS[name](
            _permuted(block_builder, call.args[0], data, canonical_data),
            _permuted(block_builder, call.args[1], kernel, canonical_kernel),
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            groups=attrs.groups,
            data_layout=canonical_data,
            kernel_layout=canonical_kernel,
            out_dtype=out_dtype,
            **own,
        )
        return _permuted(block_builder, block_builder.emit(part(result)), canonical_data, out)

    legalize.__doc__ = f"FLegalize of {name}."
    return legalize


def _permuted(block_builder: Any, value: Any, layout: str, wanted: str) -> Any:
    if layout == wanted:
        return value
    return block_builder.emit(relax.op.permute_dims(value, [layout.index(letter) for letter in wanted]))


LEGALIZATIONS = {
    PREFIX + name: with_kernels(_legalization(name, tvm.ir.Op.get(PREFIX + name).get_attr("FLegalize")))
    for name in _OPS
}
"""Legalization of each operator."""
