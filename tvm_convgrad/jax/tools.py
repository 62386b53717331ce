# SPDX-License-Identifier: Apache-2.0
"""JAX's tools that have a rule for each primitive: checkify, sparsify and roofline treat ours as JAX's convolution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax._src import checkify
from jax.experimental import roofline
from jax.experimental.sparse import transform

from tvm_convgrad.jax.lowering import aside, own
from tvm_convgrad.jax.primitive import Call, convolution_p


def _checked(error: Any, enabled: Any, first: jax.Array, second: jax.Array, *, call: Call) -> tuple[Any, jax.Array]:
    """checkify: the error that a NaN in the result is."""
    result = convolution_p.bind(first, second, call=call)
    return checkify.check_nans(jax.lax.conv_general_dilated_p, error, enabled, result), result


def _sparse(environment: Any, *operands: Any, call: Call) -> Sequence[Any]:
    """sparsify: JAX's own convolution of sparse operands, or its error where it has none."""
    with aside():  # its rule reads the parameters of what it traces
        results, _ = transform.sparsify_raw(partial(own, call=call))(environment, *operands)
    return results


def _bounds(_context: Any, *_shapes: Any, call: Call) -> roofline.RooflineResult:
    """roofline: operations and bytes of JAX's own convolution."""
    _, result = roofline.roofline(partial(own, call=call))(*call.operands)
    return result


checkify.error_checks[convolution_p] = _checked
transform.sparse_rules_bcoo[convolution_p] = transform.sparse_rules_bcsr[convolution_p] = _sparse
roofline.register_roofline(convolution_p)(_bounds)
