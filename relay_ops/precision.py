# SPDX-License-Identifier: Apache-2.0
"""FTVMMixedPrecisionConversionType of the six operators, for relay.transform.ToMixedPrecision.

dgrad becomes what TVM makes of its nn.conv2d_transpose: operands and result of the narrow type. wgrad gets narrow
operands and keeps its float32 result: it sums over batch and extents, and is added to float32 weights. Both sum in
float32.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relay
from tvm.relay.transform.mixed_precision import MIXED_PRECISION_ALWAYS

from relay_ops.ir import PREFIX
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT, NEW_OPS, OpEntry

ConversionRule = Callable[[relay.Call, str], list["int | str"]]


def conversion_rules() -> dict[str, ConversionRule]:
    """The conversion by operator."""
    return {PREFIX + entry.name: _rule(entry) for entry in NEW_OPS}


def _rule(entry: OpEntry) -> ConversionRule:
    def convert(call: relay.Call, narrow: str) -> list[int | str]:
        result = "float32" if entry.direction is BACKWARD_WEIGHT else narrow
        # The second is out_dtype, the third what the result is cast to.
        return [MIXED_PRECISION_ALWAYS, result, result]

    return convert
