# SPDX-License-Identifier: Apache-2.0
"""Models from ONNX files; initializers are the parameters.

BatchNormalization is trained whatever its `training_mode` (most files are exported for inference), and Dropout
likewise. ONNX writes running = running * momentum + batch * (1 - momentum); TVM's importer hands that momentum
to Relax, which means 1 - momentum by it, so it is turned round here. The running variance takes the unbiased variance
of the batch, as PyTorch's does.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.errors import ModelError, SetupError, first_line
from tvm_convgrad.training.graph import Environment, builder_with_tir, function_scope, replay
from tvm_convgrad.training.model import BATCH_NORM, Model, from_module

_DOMAINS = ("", "ai.onnx")


def load_onnx(path: Path, batch: int | str | None) -> Model:
    """Read an ONNX file.

    Raises:
        ModelError: it is no ONNX file, is truncated or invalid, uses operators that TVM's importer lacks (all of
            them are named), or has a batch that cannot be changed.
        SetupError: the onnx package is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise SetupError(
            "Reading an .onnx model needs the onnx package, which is not installed; pip install 'tvm-convgrad[onnx]'."
        ) from error
    source = str(path)
    try:
        proto = onnx.load(path)
        onnx.checker.check_model(proto)
    except Exception as error:  # protobuf's DecodeError, onnx's ValidationError and OS errors share no base
        raise ModelError(f"{source} is no valid ONNX file or is truncated ({first_line(error)}).") from error
    return from_onnx(proto, batch=batch, source=source)


def from_onnx(proto: Any, *, batch: int | str | None = None, source: str = "ONNX model") -> Model:
    """The model of an ONNX ModelProto; the first graph output is the predictions.

    Raises:
        ModelError: as `load_onnx`.
    """
    from tvm.relax.frontend.onnx import onnx_frontend

    _refuse_unsupported(proto, onnx_frontend, source)
    proto, public = _with_safe_names(proto)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    shapes = _input_shapes(proto, initializers, batch, source)
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            module = onnx_frontend.from_onnx(
                proto, shape_dict=shapes, dtype_dict=None, keep_params_in_input=True, sanitize_input_names=False
            )
    except Exception as error:  # TVM's importer raises every kind; the last line names the operator
        printed_line = printed.getvalue().strip().splitlines()
        where = f" ({printed_line[-1].split(', with inputs')[0]})" if printed_line else ""
        raise ModelError(f"{source}: TVM's ONNX importer fails: {first_line(error)}{where}.") from error
    function = module["main"]
    values = [value.numpy() for value in function.attrs["params"]] if "params" in function.attrs else []
    count = len(function.params) - len(values)
    names = [public.get(str(param.name), str(param.name)) for param in function.params]
    parameters = dict(zip(names[count:], values, strict=True))
    return from_module(_as_pytorch(module, names), num_inputs=count, parameters=parameters, source=source)


def _refuse_unsupported(proto: Any, frontend: Any, source: str) -> None:
    known = set(frontend._get_convert_map()) | {"Constant"}
    unsupported: Counter[str] = Counter()
    for node in proto.graph.node:
        if node.domain not in _DOMAINS:
            unsupported[f"{node.domain}.{node.op_type}"] += 1
        elif node.op_type not in known:
            unsupported[node.op_type] += 1
    if unsupported:
        listed = ", ".join(f"{name} ({count}x)" for name, count in sorted(unsupported.items()))
        raise ModelError(
            f"{source} uses unsupported operators: {listed}; replace them in the model and export it again."
        )


def _input_shapes(proto: Any, initializers: set[str], batch: int | str | None, source: str) -> dict[str, list[Any]]:
    """Extents of each graph input; the batch is what was asked for, other named extents are refused."""
    shapes: dict[str, list[Any]] = {}
    symbolic = tvm.tirx.Var("n", "int64")
    for value in proto.graph.input:
        if value.name in initializers:
            continue
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or not tensor.shape.dim:
            raise ModelError(
                f"{source}: input {value.name!r} has no shape; export the model with shapes of its inputs."
            )
        extents: list[Any] = []
        for axis, extent in enumerate(tensor.shape.dim):
            fixed = int(extent.dim_value) if extent.HasField("dim_value") and extent.dim_value > 0 else None
            if axis == 0 and batch is not None:
                extents.append(batch if isinstance(batch, int) else symbolic)
            elif axis == 0 and fixed is None:
                extents.append(symbolic)
            elif fixed is None:
                raise ModelError(
                    f"{source}: axis {axis} of input {value.name!r} is {extent.dim_param or 'unknown'}; only the "
                    "batch (axis 0) may be free, so export the model with the other extents fixed."
                )
            else:
                extents.append(fixed)
        shapes[value.name] = extents
    return shapes


def _with_safe_names(proto: Any) -> tuple[Any, dict[str, str]]:
    """The model with initializers renamed that TVM's importer would misname, and their public names by the new ones.

    TVM 0.26 strips the letters o, n, x and colons from both ends of a name (`bn_mean` becomes `bn_mea`), 0.27 the
    prefix onnx::, and both lose one of two initializers that then have one name. Public names lack the prefix, unless
    another initializer is called so.
    """
    given = [tensor.name for tensor in proto.graph.initializer]
    taken = {*given, *(name for node in proto.graph.node for name in (*node.input, *node.output))}
    fresh = (name for name in (f"initializer{i}_" for i in itertools.count()) if name not in taken)
    renamed = {name: next(fresh) for name in given if name != name.strip("onx:")}
    if not renamed:
        return proto, {}
    copy = type(proto)()
    copy.CopyFrom(proto)
    for tensor in (*copy.graph.initializer, *copy.graph.input):
        tensor.name = renamed.get(tensor.name, tensor.name)
    _rename_uses(copy.graph, renamed)
    short = {name: name.removeprefix("onnx::") for name in renamed}
    uses = Counter([*short.values(), *(name for name in given if name not in renamed)])
    return copy, {new: short[name] if uses[short[name]] == 1 else name for name, new in renamed.items()}


def _rename_uses(graph: Any, renamed: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                _rename_uses(inner, renamed)
    for output in graph.output:
        output.name = renamed.get(output.name, output.name)


def _as_pytorch(module: Any, names: Sequence[str]) -> Any:
    """The module with 1 - momentum in each batch norm, parameters called `names`, and with the first output only."""

    def rewrite(_builder: Any, call: Any, _environment: Environment) -> Any:
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
    builder = builder_with_tir(module)
    with function_scope(builder, "main", fresh):
        with builder.dataflow():
            result = replay(builder, function, environment, {BATCH_NORM: rewrite})
            if isinstance(result.ty, relax.TupleType):
                result = result.fields[0] if isinstance(result, relax.Tuple) else relax.TupleGetItem(result, 0)
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()
