# SPDX-License-Identifier: Apache-2.0
"""The six operators of the family: conv{1,2,3}d_backward_weight and conv{1,2,3}d_backward_data.

In the argument of relax.transform.ConvertLayout an entry of ours reads as one of a stock convolution does:

    {"relax.nn.conv2d": ["NHWC", "OHWI"],
     "relax.nn.conv2d_backward_weight": ["NHWC", "OHWI"],
     "relax.nn.conv2d_backward_data": ["NHWC", "OHWI"]}

First the layout of the data and of grad (for backward_data the result is the data), then that of the kernel (for
backward_weight the result); an optional third one is grad's, if it differs from the data's, as the third of a stock
convolution is its result's. An operator without entry reads its operands as they are stored: backward_data then gives
its result the order of axes that grad has, backward_weight leaves the kernel as the program writes it.
"""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax.op.grad import no_grad

from relax_ops.attrs import ATTRS
from relax_ops.expressions import known_extents
from relax_ops.gradients.common import shape_of
from relax_ops.ir import PREFIX, attributes_of, entry_of, shape_values
from relax_ops.layouts.algebra import initial, relative, stored
from relax_ops.layouts.site import Decision, Site, unconverted
from relax_ops.lowering import legalize
from relax_ops.ops import register_ops
from relax_ops.per_sample.gram import pays, sum_of_gram_products
from relax_ops.per_sample.states import Summed, apart
from relax_ops.program import Convolution
from relax_ops.rules.contract import Legalization, OperatorRules
from relax_ops.rules.convolution import convolution_of, partials_of
from relax_ops.vmap.convolution import vmap_call
from relax_ops.vmap.mapped_axis import Axes, Unknown
from relax_ops.vmap.unfolded import UnfoldingBuilder, patches
from tvm_convgrad.core.arguments import desired_layouts
from tvm_convgrad.core.catalogue import BACKWARD_DATA, NEW_OPS, OpEntry
from tvm_convgrad.core.geometry import data_layout_of

_NAMES = {"grad": "grad_layout", "data": "data_layout", "weight": "kernel_layout"}


def family_gradient(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of the operators of this package, so that Gradient can be applied again and again."""
    direction = entry_of(orig_call).direction
    partials = partials_of(direction, orig_call, _family_convolution(orig_var, orig_call), output_grad, builder)
    return [*partials, no_grad(orig_call.args[2])] if direction is BACKWARD_DATA else partials


def _family_convolution(orig_var: relax.Var, call: relax.Call) -> Convolution:
    attributes, entry = attributes_of(call), entry_of(call)
    layouts = {name: attributes.layout(name) for name in ("grad", "data", "weight")}
    if entry.direction is BACKWARD_DATA:
        data_shape, weight_shape = shape_values(call.args[2]), shape_of(call.args[1], entry.name)
    else:
        data_shape, weight_shape = shape_of(call.args[1], entry.name), shape_of(orig_var, entry.name)
    return convolution_of(entry.name, entry.rank, call.attrs, layouts, data_shape, weight_shape)


def family_layout(site: Site) -> Decision:
    """The rule of all six operators.

    Raises:
        UnsupportedError: the wanted layouts are too few or too many, or packed.
        ProblemError: they are not permutations of the tensors' axes.
    """
    entry = entry_of(site.call)
    direction = entry.direction
    names = {tensor: str(getattr(site.attrs, attribute)) for tensor, attribute in _NAMES.items()}
    wanted = _wanted(site, entry)
    if wanted is None:
        layouts = {direction.operands[0]: site.tensor(0), direction.operands[1]: site.tensor(1)}
        layouts[direction.result] = layouts["grad"] if direction is BACKWARD_DATA else initial(entry.rank + 2)
    else:
        layouts = {tensor: relative(names[tensor], wanted[tensor]) for tensor in names}
    arguments = {}
    if direction is BACKWARD_DATA:
        shape = shape_values(site.call.args[2])
        if shape is None:
            return unconverted(site.call)
        arguments[2] = relax.ShapeExpr(stored(shape, layouts["data"]))
    attrs = {name: getattr(site.attrs, name) for name in entry.attributes}
    attrs.update({_NAMES[tensor]: "".join(stored(names[tensor], layouts[tensor])) for tensor in names})
    inputs = [layouts[operand] for operand in direction.operands]
    return Decision(inputs, layouts[direction.result], ATTRS[direction.name](**attrs), arguments)


def _wanted(site: Site, entry: OpEntry) -> dict[str, str] | None:
    entries = site.desired.get(site.name)
    if entries is None:
        return None
    data, kernel, grad = desired_layouts(site.name, entry.rank, entries)
    return {"data": data, "weight": kernel, "grad": grad}


def backward_data_axis(call: relax.Call, axes: Axes) -> int | str:
    """dgrad of the samples by weights that are the same for all."""
    if axes[1] is not None or axes[0] != str(call.attrs.grad_layout).index("N"):
        return Unknown("the samples are not its batch")
    return str(call.attrs.data_layout).index("N")


def _terms_of_wgrad(call: relax.Call, axes: Axes) -> Summed | None:
    """wgrad: the terms are its vmap over the samples, with the entries of one as its batch."""
    entry, attributes = entry_of(call), attributes_of(call)
    batch = {name: attributes.layout(name).index("N") for name in entry.direction.operands}
    if any(axis not in (None, batch[name]) for name, axis in zip(batch, axes, strict=True)):
        return None

    def terms(builder: relax.BlockBuilder) -> relax.Expr:
        operands = [
            apart(builder, value, axes.at(batch[name]))
            for name, value in zip(entry.direction.operands, call.args, strict=True)
        ]
        names = ("kernel_size", "strides", "padding", "dilation", "groups", "grad_layout", "data_layout")
        given = {name: getattr(attributes, name) for name in (*names, "kernel_layout", "out_dtype")}
        return vmap_call(builder, entry, [batch], operands, **given)

    by_gram = axes.each == 1 and _gram_pays(call)
    return Summed(terms, (lambda builder: _squared_norms(builder, call)) if by_gram else None)


def _gram_pays(call: relax.Call) -> bool:
    attributes = attributes_of(call)
    assert attributes.kernel_size is not None
    grad = dict(zip(attributes.grad_layout, known_extents(call.args[0]), strict=True))
    data = dict(zip(attributes.data_layout, known_extents(call.args[1]), strict=True))
    pixels = [extent for letter, extent in grad.items() if letter not in "NC"]
    if not all(isinstance(extent, int) for extent in pixels):
        return False
    rows = int(data["C"]) // attributes.groups * math.prod(attributes.kernel_size)
    return pays(math.prod(pixels), rows, int(grad["C"]) // attributes.groups)


def _squared_norms(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The squared norm of each sample's dW without dW: the sum over pixels t, u of (x_t · x_u)(dy_t · dy_u).

    With x_t what the kernel reads for pixel t, dW is the sum over t of dy_t x_tᵀ. Source: I. Goodfellow, "Efficient
    per-example gradient computations", 2015; for convolutions: G. Rochette et al., 2019.
    """
    attributes, own = attributes_of(call), UnfoldingBuilder(builder)
    assert attributes.kernel_size is not None
    canonical = data_layout_of(attributes.rank)
    grad, data = (
        own.transpose(value, [attributes.layout(name).index(letter) for letter in canonical])
        for name, value in zip(("grad", "data"), call.args, strict=True)
    )
    n, channels, *pixels = own.shape(grad)
    groups, count = attributes.groups, math.prod(pixels)
    unfolded = patches(own, attributes, attributes.kernel_size, data)
    rows = own.shape(unfolded)[1] // groups * own.shape(unfolded)[2]
    left = own.reshape(unfolded, [n, groups, rows, count])
    return sum_of_gram_products(own, left, own.reshape(grad, [n, groups, channels // groups, count]), [1, 2, 3])


def _legalization(_stock: Legalization) -> Legalization:
    return legalize


_WGRAD, _DGRAD = (
    tuple(PREFIX + entry.name for entry in NEW_OPS if (entry.direction is BACKWARD_DATA) is of_data)
    for of_data in (False, True)
)

RULES = (
    OperatorRules(
        _WGRAD,
        gradient=family_gradient,
        layout=family_layout,
        sums=_terms_of_wgrad,
        legalize=_legalization,
        declare=register_ops,
    ),
    OperatorRules(
        _DGRAD,
        gradient=family_gradient,
        layout=family_layout,
        mapped_axis=backward_data_axis,
        legalize=_legalization,
        declare=register_ops,
    ),
)
