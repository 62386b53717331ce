# SPDX-License-Identifier: Apache-2.0
"""What an exporter has changed in an ONNX graph for inference, so that another network would be trained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.onnx.torch_parameters import Exported

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_RULES = "pkg.onnxscript.rewriter.rule_name"
_FUSED_RULE = re.compile(r"FuseBatchNorm\w*")
_BIAS_RULE = "RemoveOptionalBias"
# Names of what exporters compute: those of PyTorch's TorchScript exporter (`onnx::Conv_12`, before 1.12 `12`), which
# keeps names such as `features.0.weight` otherwise, and those of tf2onnx and onnxoptimizer.
_COMPUTED = re.compile(r"(onnx::Conv(Transpose)?_)?\d+")
_FUSED_NAME = re.compile(r"(fused?_bn|bn_fused?)", re.IGNORECASE)
_SHOWN = 3
_NORMS = ("BatchNormalization", "InstanceNormalization", "GroupNormalization", "LayerNormalization")
_REMEDY = (
    "To train the model as it is in PyTorch, save torch.export.export(model.train(), ...) as .pt2, or export with "
    "torch.onnx.export(model, ..., dynamo=False, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)."
)


def rewritten_layers(exported: Exported, source: str) -> list[str]:
    """Sentences about layers that the file does not have any more.

    Batch norms of a model in eval mode are folded into the convolutions before them: PyTorch's TorchScript exporter
    does so by default, onnxscript's optimizer (torch.onnx.export with dynamo=True) in train mode too. The latter notes
    its rules in the nodes; the former is recognised by the names of the initializers that it computes. Convolutions
    that have a bias of their own, as those of VGG, have the model's names.
    """
    proto = exported.proto
    shared = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "Identity"}
    initializers = {tensor.name for tensor in proto.graph.initializer}
    kinds = Counter(node.op_type for node in proto.graph.node)
    convolutions = [node for node in proto.graph.node if node.op_type in _CONVOLUTIONS]
    folded = sum(_is_folded(node, shared, initializers) for node in convolutions)
    others = sum(_has_rule(node, _FUSED_RULE) for node in proto.graph.node if node.op_type not in _CONVOLUTIONS)
    notes = []
    if folded or others:
        where = [f"{folded} of {len(convolutions)} convolutions"] if folded else []
        where += [f"{others} linear layers"] if others else []
        left = "" if any(kinds[norm] for norm in _NORMS) else ", which leaves the model no normalisation"
        notes.append(
            f"{source}: the exporter has folded batch norms into {' and '.join(where)}{left}; the step trains a "
            f"network without these batch norms. {_REMEDY}"
        )
    removed = sum(_BIAS_RULE in _rules(node) and not _has_rule(node, _FUSED_RULE) for node in proto.graph.node)
    if removed:
        what = (
            "the bias of 1 layer, since it was" if removed == 1 else f"the biases of {removed} layers, since they were"
        )
        notes.append(f"{source}: the exporter has removed {what} zero; the step trains a network without it. {_REMEDY}")
    computed = exported.computed
    if computed:
        notes.append(
            f"{source}: {_results(computed)} of the exporter ({_shown(computed)}), which computes in advance what "
            f"follows from parameters and constants; each is trained as one parameter. {_REMEDY}"
        )
    if exported.kept:
        notes.append(
            f"{source}: {_results(exported.kept)} of the exporter ({_shown(exported.kept)}), which computes constants "
            "in advance; they follow from no parameter, by the file's list of them or by their names, so they are not "
            f"trained. {_REMEDY}"
        )
    if exported.untold:
        what = "1 number of the model is" if len(exported.untold) == 1 else f"{len(exported.untold)} numbers are"
        notes.append(
            f"{source}: {what} not trained ({_shown(exported.untold)}), since the file does not tell parameters "
            "without an axis from constants. To train them, give them the shape (1,), or pass "
            "torch.export.export(model.train(), ...) as .pt2."
        )
    return notes


def _results(names: Sequence[str]) -> str:
    return "1 tensor is a result" if len(names) == 1 else f"{len(names)} tensors are results"


def _shown(names: Sequence[str]) -> str:
    """The first names."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _is_folded(node: onnx.NodeProto, shared: dict[str, str], initializers: set[str]) -> bool:
    """Whether a batch norm has been folded into a convolution."""
    if _has_rule(node, _FUSED_RULE):
        return True
    names = [shared.get(name, name) for name in node.input[1:3]]
    if len(names) < 2 or not initializers.issuperset(names):
        return False
    weight, bias = names
    computed = all(_COMPUTED.fullmatch(name) for name in names)
    return computed or bias == f"{weight}_bias" or all(_FUSED_NAME.search(name) for name in names)


def _rules(node: onnx.NodeProto) -> str:
    """The rules of onnxscript's optimizer that made a node; onnx before 1.16 has no such notes."""
    return ", ".join(entry.value for entry in getattr(node, "metadata_props", ()) if entry.key == _RULES)


def _has_rule(node: onnx.NodeProto, pattern: re.Pattern[str]) -> bool:
    return pattern.search(_rules(node)) is not None
