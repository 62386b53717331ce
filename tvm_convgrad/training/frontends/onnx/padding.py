# SPDX-License-Identifier: Apache-2.0
"""Windows in ONNX graphs whose padding is computed of extents, with the widths written: auto_pad and output_shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.onnx.fold import known_extents

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_WINDOWS = ("AveragePool", "Conv", "LpPool", "MaxPool")


def with_written_pads(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[object]]) -> onnx.ModelProto:
    """The model with `pads` in place of `auto_pad` and `output_shape`, wherever the extents are known.

    Args:
        proto: a model that the caller does not need any more: its nodes are changed.
        shapes: extents of the inputs by name.

    Raises:
        UnsupportedError: `auto_pad` follows from a free extent.
    """
    if not any(
        attribute.name in ("auto_pad", "output_shape") for node in proto.graph.node for attribute in node.attribute
    ):
        return proto
    extents = known_extents(proto, shapes)
    is_free = any(not isinstance(extent, int) for given in shapes.values() for extent in given[1:])
    for node in proto.graph.node:
        given = extents.get(node.input[0]) if node.input else None
        if given is None or node.op_type not in (*_WINDOWS, "ConvTranspose"):
            continue
        window = _Window(node, given[2:], extents)
        if node.op_type == "ConvTranspose":
            found = window.transposed()
            if found is not None:
                _replace(node, pads=found[0], output_padding=found[1])
        else:
            pads = window.pads()
            if pads is not None:
                _replace(node, pads=pads)
            elif window.mode.startswith("SAME") and is_free:
                raise UnsupportedError(
                    f"{node.op_type} {node.name or node.output[0]!r}: auto_pad={window.mode} follows from extents, and "
                    f"those of its operand are {', '.join(map(str, given[2:]))}, which are not all numbers"
                )
    return proto


def _replace(node: onnx.NodeProto, **stated: list[int]) -> None:
    from onnx import helper

    kept = [each for each in node.attribute if each.name not in ("auto_pad", "output_shape", *stated)]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in stated.items())])


class _Window:
    """The attributes of a node with windows."""

    def __init__(
        self, node: onnx.NodeProto, spatial: Sequence[int | str | None], extents: Mapping[str, list[int | str | None]]
    ) -> None:
        ints = {attribute.name: list(attribute.ints) for attribute in node.attribute}
        texts = {attribute.name: attribute.s.decode() for attribute in node.attribute}
        weight = extents.get(node.input[1], []) if len(node.input) > 1 else []
        ones = [1] * len(spatial)
        self.spatial, self.mode = spatial, texts.get("auto_pad", "NOTSET")
        self.kernel = ints.get("kernel_shape") or weight[2:]
        self.strides, self.dilations = ints.get("strides") or ones, ints.get("dilations") or ones
        self.extra = ints.get("output_padding") or [0] * len(spatial)
        self.wanted = ints.get("output_shape", [])[-len(spatial) :]

    def pads(self) -> list[int] | None:
        """Widths such that there are ceil(extent / stride) windows; None if that is not requested or not known."""
        if self.mode == "VALID":
            return [0] * (2 * len(self.spatial))
        totals = []
        for extent, size, stride, dilation in zip(self.spatial, self.kernel, self.strides, self.dilations, strict=True):
            if not isinstance(extent, int) or not isinstance(size, int):
                return None
            windows = -(-extent // stride)
            totals.append(max((windows - 1) * stride + dilation * (size - 1) + 1 - extent, 0))
        return self._split(totals, upper=self.mode == "SAME_UPPER") if self.mode.startswith("SAME") else None

    def transposed(self) -> tuple[list[int], list[int]] | None:
        """Pads and output padding such that the result has `output_shape`, or else stride times the extent."""
        if self.mode == "VALID" and not self.wanted:
            return [0] * (2 * len(self.spatial)), self.extra
        if not self.wanted and not self.mode.startswith("SAME"):
            return None
        totals, extra = [], []
        for axis, extent in enumerate(self.spatial):
            size, stride = self.kernel[axis], self.strides[axis]
            if not isinstance(extent, int) or not isinstance(size, int):
                return None
            wanted = self.wanted[axis] if self.wanted else extent * stride
            whole = stride * (extent - 1) + self.extra[axis] + self.dilations[axis] * (size - 1) + 1
            totals.append(max(whole - wanted, 0))
            extra.append(self.extra[axis] + max(wanted - whole, 0))
        return self._split(totals, upper=self.mode == "SAME_UPPER"), extra

    @staticmethod
    def _split(totals: list[int], upper: bool) -> list[int]:
        """Half before and half after, the odd one after if `upper`."""
        before = [total // 2 if upper else total - total // 2 for total in totals]
        return [*before, *(total - width for total, width in zip(totals, before, strict=True))]
