# SPDX-License-Identifier: Apache-2.0
"""The stages of an ONNX graph before TVM's importer reads it: initializers become the parameters that are trained.

What writes trained parameters back into a file compares the stages (see `training.export.onnx_operands`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.onnx.functions import with_written_functions
from tvm_convgrad.training.frontends.onnx.names import names_read, with_own_parameters, with_safe_names
from tvm_convgrad.training.frontends.onnx.random_masks import with_dropout
from tvm_convgrad.training.frontends.onnx.torch_parameters import Exported, class_weights, with_exported_parameters
from tvm_convgrad.training.frontends.onnx.torchscript import with_module_names
from tvm_convgrad.training.frontends.onnx.views import with_reshapes

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx


@dataclass(frozen=True)
class Prepared:
    """The stages of a graph. Nodes keep the names of their results from one to the next.

    Attributes:
        file: the model as it is in the file.
        inlined: without functions.
        masked: with Dropout in the place of random masks, too.
        written: with views as reshapes, too; its initializers are still those of the file.
        exported: with the parameters that PyTorch's exporter has merged or computed, and what is known of the others.
        own: with parameters that it has written as Identity or computed of those of modules, too.
        proto: with names that TVM's importer keeps, and batch norms of as many results.
        public: by names of initializers of `proto` that are not the parameter's, the parameter's.
    """

    file: onnx.ModelProto
    inlined: onnx.ModelProto
    masked: onnx.ModelProto
    written: onnx.ModelProto
    exported: Exported
    own: onnx.ModelProto
    proto: onnx.ModelProto
    public: dict[str, str]

    @property
    def writable(self) -> onnx.ModelProto:
        """The stage that parameters are written back into: the file itself, unless it draws random masks."""
        return self.file if self.masked is self.inlined else self.masked

    @property
    def parameters(self) -> dict[str, str]:
        """By name of each initializer of `own`, the name of the parameter that it is."""
        pairs = zip(self.own.graph.initializer, self.proto.graph.initializer, strict=True)
        return {own.name: self.public.get(safe.name, safe.name) for own, safe in pairs}


def prepared(proto: onnx.ModelProto, source: str) -> Prepared:
    """All stages of a model.

    Raises:
        ModelError: a function that cannot be written out, or random numbers that are not masks.
    """
    inlined = with_written_functions(proto, source)
    masked = with_dropout(inlined, source)
    written = with_reshapes(masked)
    exported = with_exported_parameters(written, class_weights(proto))
    own = with_module_names(with_own_parameters(exported.proto))
    safe, public = with_safe_names(own)
    return Prepared(proto, inlined, masked, written, exported, own, _with_short_batch_norms(safe), public)


def _with_short_batch_norms(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model whose batch norms have the three results that TVM's importer gives.

    Before opset 14 those of a training graph had five; nothing reads the last two, a mean and a variance of the batch.
    """
    read = names_read(proto.graph) - {""}
    long = [
        number
        for number, node in enumerate(proto.graph.node)
        if node.op_type == "BatchNormalization" and len(node.output) > 3 and read.isdisjoint(node.output[3:])
    ]
    if not long:
        return proto
    copy = type(proto)()
    copy.CopyFrom(proto)
    for number in long:
        del copy.graph.node[number].output[3:]
    return copy


__all__ = ["Prepared", "prepared"]
