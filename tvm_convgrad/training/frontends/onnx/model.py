# SPDX-License-Identifier: Apache-2.0
"""Models from ONNX files; initializers are the parameters.

BatchNormalization is trained whatever its `training_mode` (most files are exported for inference), and Dropout
likewise. ONNX writes running = running * momentum + batch * (1 - momentum); TVM's importer hands that momentum
to Relax, which means 1 - momentum by it, so it is converted here. The running variance takes the unbiased variance
of the batch, as PyTorch's does.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from relax_ops.active import rules
from tvm_convgrad.core.errors import ModelError, UnsupportedError, first_line
from tvm_convgrad.core.quiet import release
from tvm_convgrad.training.frontends.onnx.batch import fixed_shapes, stored_batch, with_free_batch
from tvm_convgrad.training.frontends.onnx.converters import ONNX_DOMAINS, imported_module, supported
from tvm_convgrad.training.frontends.onnx.fold import with_folded_shapes
from tvm_convgrad.training.frontends.onnx.free_numbers import FreeNumbers
from tvm_convgrad.training.frontends.onnx.input_shapes import input_shapes
from tvm_convgrad.training.frontends.onnx.padding import with_written_pads
from tvm_convgrad.training.frontends.onnx.places import listed
from tvm_convgrad.training.frontends.onnx.prepared import Prepared, prepared
from tvm_convgrad.training.frontends.onnx.random_masks import HeldMasks
from tvm_convgrad.training.frontends.onnx.rewrites import rewritten_layers
from tvm_convgrad.training.ir.graph import Environment, Extent, builder_with_tir, function_scope, replay
from tvm_convgrad.training.model.batch_axis import BatchError
from tvm_convgrad.training.model.model import BATCH_NORM, Array, Model, from_module
from tvm_convgrad.training.model.outputs import Outputs
from tvm_convgrad.training.model.own_loss import OwnLoss

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_SHOWN = 3
_TRIED = 2
"""The batch that is tried for a file without one, to find out whether its symbolic batch is at fault."""


def load_onnx(path: Path, batch: int | str | None, outputs: Outputs | OwnLoss | None = None) -> Model:
    """Read an ONNX file.

    Raises:
        ModelError: it is not an ONNX file, is truncated or invalid, uses operators that TVM's importer lacks (all of
            them are named), or has a batch that cannot be changed.
    """
    import onnx  # optional

    source = str(path)
    try:
        proto = onnx.load(path)
        _refuse_tracked_instance_norms(proto, source)
        onnx.checker.check_model(proto)
        _refuse_opset(onnx, proto, source)
    except ModelError:
        raise
    except Exception as error:  # protobuf's DecodeError, onnx's ValidationError and OS errors share no base
        raise ModelError(f"{source} is not a valid ONNX file, or is truncated ({first_line(error)}).") from error
    return from_onnx(proto, batch=batch, outputs=outputs, source=source)


def from_onnx(
    proto: onnx.ModelProto,
    *,
    batch: int | str | None = None,
    outputs: Outputs | OwnLoss | None = None,
    source: str = "ONNX model",
) -> Model:
    """The model of an ONNX ModelProto.

    Raises:
        ModelError: as `load_onnx`.
    """
    from tvm.relax.frontend.onnx import onnx_frontend

    stages = prepared(proto, source)
    _refuse_unsupported(stages.written, onnx_frontend, source, folded=False)
    exported, proto = stages.exported, stages.proto
    notes = rewritten_layers(exported, source)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    shapes = input_shapes(proto, initializers, batch, source)
    try:
        model, origins = _built(stages, shapes.extents, batch, outputs, source)
    except ImportFailure as error:
        if not shapes.remedy:
            raise
        raise ImportFailure(f"{error}{shapes.remedy}") from error
    return replace(model, warnings=tuple(notes), origins=origins)


def _built(
    stages: Prepared,
    shapes: dict[str, list[Extent]],
    batch: int | str | None,
    outputs: Outputs | OwnLoss | None,
    source: str,
) -> tuple[Model, Mapping[str, str]]:
    """The model of a prepared graph whose inputs have these extents, and where its calls are from."""
    from tvm.relax.frontend.onnx import onnx_frontend

    exported, proto, public = stages.exported, stages.proto, stages.public
    stored = stored_batch(proto)
    fixed = stored is not None and batch in (None, stored)
    given = proto
    if not fixed:
        proto = with_free_batch(given)
    try:
        module, parameters, origins = _imported(proto, onnx_frontend, shapes, public, source, exported.constants)
        model = from_module(
            module,
            num_inputs=len(shapes),
            parameters=parameters,
            train_scalars=exported.scalars,
            output_names=[output.name for output in proto.graph.output],
            outputs=outputs,
            source=source,
        )
    except (ImportFailure, BatchError) as error:
        failed = isinstance(error, ImportFailure)
        if fixed or (failed and stored and not _imports(proto, onnx_frontend, stored, source)):
            raise
        nodes = fixed_shapes(proto) or fixed_shapes(given)
        if not nodes:
            if failed and not isinstance(batch, int) and _imports(proto, onnx_frontend, stored or _TRIED, source):
                raise ModelError(f"{error} With a static batch it is supported, so give --batch N.") from error
            raise
        shown = "any batch" if batch == "dynamic" or batch is None else f"batch {batch}"
        raise ModelError(
            f"{source} cannot be built for {shown}, since its graph fixes the batch: {'; '.join(nodes[:_SHOWN])}"
            f"{f' (and {len(nodes) - _SHOWN} more)' if len(nodes) > _SHOWN else ''}. Export the model with a dynamic "
            f"batch (torch.onnx.export: dynamic_axes={{{next(iter(shapes))!r}: {{0: 'n'}}}}) and write -1 for it in "
            "shapes, or leave --batch out."
        ) from error
    return model, origins


def _imports(proto: onnx.ModelProto, frontend: ModuleType, batch: int, source: str) -> bool:
    """Whether TVM's importer takes a graph with this batch."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    try:
        _imported(proto, frontend, input_shapes(proto, initializers, batch, source).extents, {}, source)
    except ImportFailure:
        return False
    return True


class ImportFailure(ModelError):
    """A graph that TVM's importer does not take."""


def _imported(
    proto: onnx.ModelProto,
    frontend: ModuleType,
    shapes: dict[str, list[Any]],
    public: dict[str, str],
    source: str,
    constants: frozenset[str] = frozenset(),
) -> tuple[tvm.IRModule, dict[str, Array], Mapping[str, str]]:
    """The Relax module of a graph, its parameters by their public names, without `constants`, and where calls are from.

    The latter is the first node of the file that made each operator of Relax.
    """
    fixed = {tensor.name for tensor in proto.graph.initializer if public.get(tensor.name, tensor.name) in constants}
    proto = with_folded_shapes(proto, shapes, fixed)
    _refuse_unsupported(proto, frontend, source, folded=True)
    try:
        proto = with_written_pads(proto, shapes)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # TVM prints the node's operands
            warnings.simplefilter("ignore")
            module, origins = imported_module(frontend, proto, shapes)
        function = module["main"]
        names = [public.get(str(param.name), str(param.name)) for param in function.params]
        module = _as_pytorch(module, names)
    except UnsupportedError as error:
        release(error)
        raise ImportFailure(f"{source}: {error}.") from error
    values = [value.numpy() for value in function.attrs["params"]] if "params" in function.attrs else []
    count = len(function.params) - len(values)
    return module, dict(zip(names[count:], values, strict=True)), origins


def _refuse_tracked_instance_norms(proto: onnx.ModelProto, source: str) -> None:
    """Raise if there is a batch norm of five results in opset 14 or newer, which no operator of the standard is."""
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ONNX_DOMAINS), default=0)
    wrong = [node for node in proto.graph.node if node.op_type == "BatchNormalization" and len(node.output) > 3]
    if wrong and opset >= 14:
        raise ModelError(
            f"{source}: BatchNormalization {wrong[0].name!r} has {len(wrong[0].output)} results, but has at most 3 in "
            f"opset {opset}. PyTorch's older exporter writes an InstanceNorm with track_running_stats=True so in "
            "training mode; pass torch.export.export(model.train(), ...) as .pt2, or leave track_running_stats out."
        )


def _refuse_opset(onnx: ModuleType, proto: onnx.ModelProto, source: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in ONNX_DOMAINS and entry.version > newest:
            raise ModelError(
                f"{source} uses opset {entry.version}, but onnx {onnx.__version__} supports opsets up to {newest}; "
                "export the model with an older opset, or install a newer onnx."
            )


def _refuse_unsupported(proto: onnx.ModelProto, frontend: ModuleType, source: str, folded: bool) -> None:
    """Raise if there are operators that cannot be imported; before shapes are folded, if that cannot change it."""
    import onnx

    known = supported(frontend)
    own = [node for node in proto.graph.node if node.domain in ONNX_DOMAINS]
    unsupported = [node for node in proto.graph.node if node.domain not in ONNX_DOMAINS or node.op_type not in known]
    if unsupported and (folded or len(own) < len(proto.graph.node) or not all(onnx.defs.has(n.op_type) for n in own)):
        kind = ImportFailure if folded else ModelError  # with a number for the batch more may be computed in advance
        raise kind(
            f"{source} uses unsupported operators: {listed(unsupported)}; replace them in the model and export it "
            "again."
        )


def _as_pytorch(module: tvm.IRModule, names: Sequence[str]) -> tvm.IRModule:
    """The module with 1 - momentum in each batch norm, parameters called `names`, and extents as numbers."""

    def normalise(_builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
        attributes = call.attrs
        return relax.op.nn.batch_norm(
            *call.args,
            axis=int(attributes.axis),
            epsilon=float(attributes.epsilon),
            center=bool(attributes.center),
            scale=bool(attributes.scale),
            momentum=1.0 - float(attributes.momentum),
            training=bool(attributes.training),
        )

    function = module["main"]
    environment = Environment()
    fresh = [relax.Var(name, param.ty) for name, param in zip(names, function.params, strict=True)]
    for param, var in zip(function.params, fresh, strict=True):
        environment[param] = var
    masks = HeldMasks(function)
    builder = builder_with_tir(module)
    with function_scope(builder, "main", [*fresh, masks.one]):
        with builder.dataflow():
            rewrites = {BATCH_NORM: normalise, "relax.nn.dropout": masks.rewrite, **FreeNumbers(fresh).rewrites}
            result = replay(builder, function, environment, rewrites)
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    with rules():
        return masks.released(relax.transform.FoldConstant()(builder.get()))
