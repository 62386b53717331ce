# SPDX-License-Identifier: Apache-2.0
"""Models from torch.export: a .pt2 file, or an ExportedProgram in memory.

TVM's translator bakes buffers into constants, drops what the forward pass writes into them, and makes dropout the
identity. Here every buffer is an input, every mutated one (running statistics, num_batches_tracked, …) an output as
well, and dropout becomes `relax.nn.dropout`, whatever mode the model was exported in.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax

from tvm_convgrad.core.errors import ModelError, UnsupportedError, first_line
from tvm_convgrad.core.extent_limits import MOST_EXTENT, Limits, shown_limits
from tvm_convgrad.core.quiet import release
from tvm_convgrad.training.frontends.batch import bind_batch
from tvm_convgrad.training.frontends.torch_export.aliases import other_names, with_one_name
from tvm_convgrad.training.frontends.torch_export.arrays import array_of
from tvm_convgrad.training.frontends.torch_export.complex_tensors import with_real_parts
from tvm_convgrad.training.frontends.torch_export.converters import converters
from tvm_convgrad.training.frontends.torch_export.decompositions import decompositions
from tvm_convgrad.training.frontends.torch_export.dropout import with_plain_dropout
from tvm_convgrad.training.frontends.torch_export.free_extents import (
    extents_of_program,
    fixed_extents,
    refuse_formulas,
)
from tvm_convgrad.training.frontends.torch_export.known_types import known_types, leaf_names
from tvm_convgrad.training.frontends.torch_export.names import with_free_names
from tvm_convgrad.training.frontends.torch_export.no_grad import trained_parameters
from tvm_convgrad.training.frontends.torch_export.operators.bags import with_equal_bags
from tvm_convgrad.training.frontends.torch_export.operators.deformable import declare_deformable
from tvm_convgrad.training.frontends.torch_export.operators.extents import with_extents_as_tensors
from tvm_convgrad.training.frontends.torch_export.operators.fake_quantize import with_sized_observers
from tvm_convgrad.training.frontends.torch_export.operators.pool_places import with_used_places
from tvm_convgrad.training.frontends.torch_export.operators.repeats import with_constant_repeats
from tvm_convgrad.training.frontends.torch_export.operators.scalars import with_scalars_as_vectors
from tvm_convgrad.training.frontends.torch_export.own_backward import own_backwards
from tvm_convgrad.training.frontends.torch_export.places import listed, name_of, place_in, place_of, type_name
from tvm_convgrad.training.frontends.torch_export.promotion import as_declared, promoted, with_operands_apart
from tvm_convgrad.training.frontends.torch_export.view_copies import with_reshapes
from tvm_convgrad.training.ir.graph import static_shape
from tvm_convgrad.training.model.model import Array, Model, TensorSchema, from_module
from tvm_convgrad.training.model.outputs import Outputs
from tvm_convgrad.training.model.own_loss import OwnLoss

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import torch
    from torch.export.graph_signature import InputSpec, OutputSpec

_REMEDY = "export the model with torch.export.export(..., dynamic_shapes=({0: torch.export.Dim('n')},))"
# The translator takes these for the identity or for constants, which would be wrong without a word.
_RANDOM = (
    "bernoulli",
    "rand",
    "normal",
    "multinomial",
    "uniform",
    "exponential",
    "rrelu_with_noise",
    "poisson",
    "binomial",
)
_FAILURES = (AssertionError, KeyError, TypeError, ValueError, NotImplementedError, RuntimeError)
_REPLACE = "replace them in the model and export it again."
_CONTROL_FLOW = ("cond", "while_loop", "scan", "map_impl", "associative_scan")
_REPLACE_FLOW = "a step is straight-line code: compute both branches and choose with torch.where, or write loops out."
_REPLACE_RANDOM = (
    "a step draws uniform, normal, exponential, Bernoulli and integer numbers, permutations and one sample of a "
    "multinomial, and no others; export the model in eval mode (model.eval()) if it draws them in training only, or "
    "give them to it as an input."
)


def load_pt2(path: Path, batch: int | str | None, outputs: Outputs | OwnLoss | None = None) -> Model:
    """Read a file written by torch.export.save.

    Raises:
        ModelError: it is not one, or cannot be imported (see `from_exported_program`).
    """
    import torch  # optional

    if not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is not a .pt2 file (an archive), or is truncated; write it with torch.export.save.")
    declare_deformable(path)
    try:
        with known_types(path):
            program = torch.export.load(path)
    except Exception as error:  # torch raises many kinds here: RuntimeError, KeyError, pickle and JSON errors
        if re.search(r"wrap_with_set_grad_enabled\w* is missing val field", str(error)):
            raise ModelError(
                f"{path}: PyTorch saves a torch.no_grad() block that gives no result, such as one that only writes to "
                "a buffer, or a part of one around torch.enable_grad(), but cannot load it; write x.detach() in the "
                "place of the block, and export the model again."
            ) from error
        raise ModelError(
            f"{path} cannot be read as a torch.export program ({first_line(error)}); write it with "
            f"torch.export.save of torch {torch.__version__}."
        ) from error
    return from_exported_program(program, batch=batch, outputs=outputs, source=str(path))


def from_exported_program(
    program: torch.export.ExportedProgram,
    *,
    batch: int | str | None = None,
    outputs: Outputs | OwnLoss | None = None,
    source: str = "ExportedProgram",
) -> Model:
    """The model of a torch.export.ExportedProgram, exported in train or eval mode.

    Raises:
        ModelError: operators that cannot be imported (all of them are named), several outputs without a choice (see
            `load_model`), or a fixed batch that `batch` would change.
    """
    import torch  # optional
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    if not isinstance(program, torch.export.ExportedProgram):
        raise ModelError(f"{source}: expected a torch.export.ExportedProgram, but got a {type(program).__name__}.")
    _refuse_types(torch, program, source)
    _refuse_what_export_loses(torch, program, source)
    refuse_formulas(program, source)
    lost = own_backwards(program)
    tied = other_names(program)
    program, public = with_free_names(with_one_name(program, tied))
    program = with_used_places(with_plain_dropout(program, source))
    with_reshapes(program)
    with_equal_bags(program)
    with_sized_observers(program)
    with_constant_repeats(program)
    with_scalars_as_vectors(program)
    program = _decomposed(program, source, "its graph")
    program = _with_real_parts(program, source)
    with_operands_apart(program)
    _refuse_symbolic_numbers(torch, program, source)
    with_extents_as_tensors(program, source)
    _refuse_unsupported(program, source)
    _refuse_overwritten(torch, program, source)
    inputs, results = _tensors_only(torch, program, source)
    adapted, mutated = _buffers_as_inputs(torch, program, inputs, results)
    importer, own = ExportedProgramImporter(), converters()
    try:
        with extents_of_program(program) as extents:
            module = importer.from_exported_program(
                adapted,
                keep_params_as_input=True,
                unwrap_unit_return_tuple=False,
                no_bind_return_tuple=False,
                custom_convert_map={
                    name: _with_place(convert, name in own) for name, convert in {**importer.convert_map, **own}.items()
                },
            )
    except _Failure as error:
        release(error)
        raise ModelError(f"{source}: {error}.") from error
    except _FAILURES as error:
        release(error)
        raise ModelError(f"{source}: TVM's importer of torch.export programs fails: {first_line(error)}.") from error
    values, frozen, constants = _weights(program)
    count = sum(spec.kind is torch.export.graph_signature.InputKind.USER_INPUT for spec in inputs)
    _refuse_batch(batch, module["main"].params[:count], extents.limits, source)
    module = bind_batch(module, "main", count, batch, _REMEDY, source)
    targets = {
        spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target is not None
    }
    names = {variable: public.get(target, target) for variable, target in targets.items()}
    model = from_module(
        module,
        num_inputs=count,
        parameters=values,
        state_outputs=mutated,
        frozen=frozen,
        constants=constants,
        train_scalars=True,
        names=names,
        output_names=_output_names(torch, program, {spec.arg.name for spec in results}),
        outputs=outputs,
        source=source,
    )
    limited = tuple(replace(schema, limits=_limits_of(schema, extents.limits)) for schema in model.inputs)
    return replace(model, inputs=limited, warnings=(*lost, *_warnings(program)), tied=tied)


def _limits_of(schema: TensorSchema, limits: Mapping[str, Limits]) -> dict[str, Limits]:
    """The limits of the free extents of a tensor."""
    return {name: found for name, found in limits.items() if name in schema.shape}


def _refuse_batch(
    batch: int | str | None, inputs: Sequence[relax.Var], limits: Mapping[str, Limits], source: str
) -> None:
    """Refuse a batch that is not one that the model takes."""
    for variable in inputs:
        shape = static_shape(variable)
        stated = limits.get(str(shape[0]), (1, MOST_EXTENT)) if shape else (1, MOST_EXTENT)
        if isinstance(batch, int) and not stated[0] <= batch <= stated[1]:
            raise ModelError(
                f"{source}: the model was exported for batches of {shown_limits(stated)}, and relies on it; {batch} is "
                "none."
            )


def _warnings(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """What the user should know of a program that can be imported."""
    at = {"batch_norm.default": 6, "_native_batch_norm_legit_no_training.default": 5}  # where the momentum stands
    still = [node for node in program.graph.nodes if name_of(node) in at and node.args[at[name_of(node)]] == 0]
    if not still:
        return ()
    found = "a batch norm has" if len(still) == 1 else f"{len(still)} batch norms have"
    return (
        f"{found} momentum 0 (aten.{name_of(still[0])}{place_of(still[0])}): training does not change the running "
        "statistics, which predictions read. PyTorch exports momentum=None so in eval mode; set a number.",
    )


class _Failure(ModelError):
    """An operator that cannot be translated, with its place in the user's files."""


def _with_place(convert: Callable[..., Any], is_own: bool) -> Callable[[torch.fx.Node, Any], Any]:
    """A translation whose failures name the operator and the line of the user's module."""

    def translated(node: torch.fx.Node, importer: Any) -> Any:
        try:
            with promoted(node, importer):
                result = convert(node, importer) if is_own else convert(node)
            if isinstance(result, relax.Call):  # TVM leaves the last operator of a pool without batch unbound
                result = importer.block_builder.emit(result)
            return as_declared(node, result, importer)
        except _FAILURES as error:
            release(error)
            name, place = f"aten.{name_of(node)}", place_of(node).removeprefix(", ")
            reason = first_line(error)
            if isinstance(error, TypeError) and _is_symbolic(node):  # a symbol where TVM's translation takes a number
                reason = "it needs fixed extents; export without dynamic shapes"
            reason = reason.removeprefix(name) if reason.startswith(name) else f": {reason}"
            has_remedy = isinstance(error, UnsupportedError) or "export without" in reason
            remedy = "" if has_remedy else "; replace it in the model and export it again"
            raise _Failure(f"{name}{f' ({place})' if place else ''}{reason}{remedy}") from error

    return translated


def _with_real_parts(program: torch.export.ExportedProgram, source: str) -> torch.export.ExportedProgram:
    """The program without complex tensors, decomposed again."""
    import torch

    real = with_real_parts(program, source)
    if real is program:
        return program
    for node in real.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # real parts may have other strides than the complex tensor
            node.target = torch.ops.aten.reshape.default
    return _decomposed(real, source, "what is made of complex numbers")


def _decomposed(program: torch.export.ExportedProgram, source: str, what: str) -> torch.export.ExportedProgram:
    """The program in simpler operators.

    Args:
        what: is decomposed, for the message.

    Raises:
        UnsupportedError: a decomposition of ours refuses an operator; with the line of the user's module.
        ModelError: PyTorch fails, or something is written out for the extent that a free axis has in the export.
    """
    before = fixed_extents(program)
    from torch._export.verifier import SpecViolationError  # optional

    try:
        decomposed = program.run_decompositions(decompositions())
    except UnsupportedError as error:  # torch.fx has added the operator's stack
        raise UnsupportedError(f"{source}: {first_line(error)}{place_in(str(error))}.") from error
    except (*_FAILURES, SpecViolationError) as error:
        raise ModelError(f"{source}: PyTorch cannot decompose {what}: {first_line(error)}") from error
    found = fixed_extents(decomposed)
    fixed = next((axis for axis in found if axis not in before), None)
    if fixed is not None:
        raise ModelError(
            f"{source}: an operator is written out for the extent {found[fixed]} that {fixed} has in the export, but "
            "it is free; export with it fixed."
        )
    return decomposed


def _is_symbolic(node: torch.fx.Node) -> bool:
    """Whether an extent of an operator's operands or result is a symbol."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return any(not isinstance(extent, int) for value in values for extent in getattr(value, "shape", ()))


def _refuse_types(torch: ModuleType, program: torch.export.ExportedProgram, source: str) -> None:
    taken = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    for name, parameter in program.named_parameters():
        if parameter.requires_grad and parameter.dtype not in taken:
            dtype = type_name(parameter.dtype)
            raise ModelError(
                f"{source}: parameter {name!r} is {dtype}; weights are kept in float32, so export the model in float32 "
                "(model.float()) and choose a narrow type for the step (--dtype)."
            )


def _refuse_what_export_loses(torch: ModuleType, program: torch.export.ExportedProgram, source: str) -> None:
    """Refuse sparse tensors, and gradients inside of a model, which torch.export cuts off from the model."""
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            raise ModelError(f"{source}: tensor {name!r} is sparse ({tensor.layout}); give the model its to_dense().")
    for node in program.graph.nodes:
        if node.op == "call_function" and name_of(node).endswith("wrap_for_grad"):
            raise ModelError(
                f"{source} computes a gradient by torch.func{place_of(node)}, which torch.export does not connect with "
                "what it is taken of; write that gradient as operators."
            )


def _refuse_unsupported(program: torch.export.ExportedProgram, source: str) -> None:
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = set(ExportedProgramImporter().convert_map) | set(converters())
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    random = [node for node in calls if name_of(node).startswith(_RANDOM)]
    flow = [node for node in calls if name_of(node) in _CONTROL_FLOW]
    unknown = [node for node in calls if node not in random and node not in flow and name_of(node) not in known]
    unknown = [node for node in unknown if name_of(node) != "with_effects"] or unknown  # it wraps checks of others
    for kind, found, remedy in (
        ("unsupported", unknown, _REPLACE),
        ("random", random, _REPLACE_RANDOM),
        ("control-flow", flow, _REPLACE_FLOW),
    ):
        if found:
            raise ModelError(f"{source} uses {kind} operators: {listed(found)}; {remedy}")


def _refuse_overwritten(torch: ModuleType, program: torch.export.ExportedProgram, source: str) -> None:
    trained = trained_parameters(program)
    mutation = torch.export.graph_signature.OutputKind.PARAMETER_MUTATION
    for spec in program.graph_signature.output_specs:
        if spec.kind is mutation and spec.target in trained:
            raise ModelError(
                f"{source}: its forward pass writes to parameter {spec.target!r}, which the optimizer updates, too; "
                "write to a buffer, or set requires_grad=False."
            )


def _refuse_symbolic_numbers(torch: ModuleType, program: torch.export.ExportedProgram, source: str) -> None:
    signature, kinds = program.graph_signature, torch.export.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if not isinstance(spec.arg, kinds.ConstantArgument | kinds.TensorArgument | kinds.TokenArgument):
            raise ModelError(
                f"{source}: {spec.arg.name!r} is a symbolic number, which a step cannot take or return; export the "
                "model with a fixed number, or give it as a tensor with an entry for each sample."
            )


def _tensors_only(
    torch: ModuleType, program: torch.export.ExportedProgram, source: str
) -> tuple[list[InputSpec], list[OutputSpec]]:
    """The inputs and outputs that are tensors; the graph loses the others, which the export has fixed (None, a number).

    Raises:
        ModelError: an input or output is a number that varies.
    """
    signature = program.graph_signature
    constant = torch.export.graph_signature.ConstantArgument
    fixed = {spec.arg.name for spec in signature.input_specs if isinstance(spec.arg, constant)}
    for node in list(program.graph.nodes):
        if node.op == "placeholder" and node.name in fixed and not node.users:
            program.graph.erase_node(node)
        elif node.op == "output":
            node.args = (tuple(each for each in node.args[0] if isinstance(each, torch.fx.Node)),)
    inputs = [spec for spec in signature.input_specs if not isinstance(spec.arg, constant)]
    return inputs, [spec for spec in signature.output_specs if not isinstance(spec.arg, constant)]


def _buffers_as_inputs(
    torch: ModuleType,
    program: torch.export.ExportedProgram,
    input_specs: Sequence[InputSpec],
    output_specs: Sequence[OutputSpec],
) -> tuple[Any, list[str]]:
    """What the translator reads of a program, with buffers as inputs and mutations of them as first outputs.

    So are mutations of parameters that are not trained, such as those of a momentum encoder.
    """
    kinds, outputs = torch.export.graph_signature.InputKind, torch.export.graph_signature.OutputKind
    signature = program.graph_signature
    tensors = {**program.state_dict, **program.constants}
    variable = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    inputs = [
        replace(spec, kind=kinds.PARAMETER) if spec.kind in (kinds.BUFFER, kinds.CONSTANT_TENSOR) else spec
        for spec in input_specs
    ]
    is_state = (outputs.BUFFER_MUTATION, outputs.PARAMETER_MUTATION)
    mutated = [variable[spec.target] for spec in output_specs if spec.kind in is_state]
    results = [replace(spec, kind=outputs.USER_OUTPUT) if spec.kind in is_state else spec for spec in output_specs]
    adapted = SimpleNamespace(
        graph=program.graph,
        graph_module=program.graph_module,
        graph_signature=SimpleNamespace(input_specs=inputs, output_specs=results),
        state_dict=tensors,
        constants={},
        tensor_constants={},
        range_constraints=program.range_constraints,
        named_buffers=dict,  # called without arguments: empty
        named_parameters=dict,
    )
    return adapted, mutated


def _output_names(torch: ModuleType, program: torch.export.ExportedProgram, tensors: Container[str]) -> list[str]:
    """The names of the model's results: keys of a dict, fields of a named tuple or dataclass, otherwise positions."""
    kinds = torch.export.graph_signature.OutputKind
    kept = [spec.arg.name in tensors for spec in program.graph_signature.output_specs if spec.kind is kinds.USER_OUTPUT]
    names = leaf_names(program.call_spec.out_spec)
    return [name for name, is_kept in zip(names, kept, strict=True) if is_kept]


def _weights(program: torch.export.ExportedProgram) -> tuple[dict[str, Array], set[str], set[str]]:
    """Values of parameters, buffers and constants by variable name; the names of those that are frozen, or constants.

    Frozen is what `state_dict` has besides trained parameters; other buffers and tensors are constants.
    """
    signature = program.graph_signature
    tensors = {**program.state_dict, **program.constants}
    trained = trained_parameters(program)
    values: dict[str, np.ndarray[Any, Any]] = {}
    frozen: set[str] = set()
    constants: set[str] = set()
    for spec in signature.input_specs:
        if spec.target is None or spec.target not in tensors:
            continue
        values[spec.arg.name] = array_of(tensors[spec.target])
        if spec.target not in program.state_dict:
            constants.add(spec.arg.name)
        elif spec.target not in trained:
            frozen.add(spec.arg.name)
    return values, frozen, constants
