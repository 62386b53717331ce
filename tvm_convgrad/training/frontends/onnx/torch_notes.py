# SPDX-License-Identifier: Apache-2.0
"""What the notes of torch.onnx.export (dynamo=True) say of a node: the call of PyTorch, its arguments, its modules."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

Tensor: TypeAlias = npt.NDArray[np.generic]

CALL, _SCOPES = "pkg.torch.onnx.fx_node", "pkg.torch.onnx.name_scopes"
_TARGET = re.compile(r"target=(?:torch\.ops\.)?([\w.]+)")
INTERMEDIATE = re.compile(r"val_\d+")
RESHAPED = re.compile(r"(view|reshape|unsqueeze)(_\d+)?")
"""Names of initializers that the exporter has computed: of an operator's, and of a call that only changes a shape."""
RULE = "pkg.onnxscript.rewriter.rule_name"
_WEIGHT_AND_BIAS = {1: "weight", 2: "bias"}
_ROLES: dict[str, tuple[str, dict[int, str]]] = {
    "Conv": ("conv", _WEIGHT_AND_BIAS),
    "ConvTranspose": ("conv", _WEIGHT_AND_BIAS),
    "Gemm": ("linear", _WEIGHT_AND_BIAS),
    "LayerNormalization": ("layer_norm", _WEIGHT_AND_BIAS),
    "InstanceNormalization": ("instance_norm", _WEIGHT_AND_BIAS),
    "BatchNormalization": ("batch_norm", {**_WEIGHT_AND_BIAS, 3: "running_mean", 4: "running_var"}),
    "MatMul": ("linear", {1: "weight"}),
    "Mul": ("group_norm", {0: "weight", 1: "weight"}),
    "Add": ("linear group_norm", {0: "bias", 1: "bias"}),
    "PRelu": ("prelu", {1: "weight"}),
}
"""By operator of ONNX: words of which PyTorch's operator has one, and the name of an operand in PyTorch's modules."""


@dataclass(frozen=True)
class Call:
    """The call of PyTorch that a node stands for: its operator, the names of its arguments, the modules it is in."""

    target: str
    arguments: tuple[str, ...]
    scopes: tuple[str, ...]
    selects_first: bool = False  # whether the places of an indexing call begin with those of the first axis

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Call | None:
        """From the notes of a node; None where there are none (onnx before 1.16 has no place for them)."""
        notes = {entry.key: entry.value for entry in getattr(node, "metadata_props", ())}
        operator, found, arguments = notes.get(CALL, "").partition("](args = ")
        target = _TARGET.search(operator)
        if not found or target is None:
            return None
        scopes = ast.literal_eval(notes[_SCOPES]) if _SCOPES in notes else []
        return cls(target.group(1), tuple(re.findall(r"%(\w+)", arguments)), tuple(scopes[:-1]), ", [%" in arguments)

    @property
    def module(self) -> str:
        """The innermost module that the call is in."""
        return next((scope for scope in reversed(self.scopes) if scope), "")

    @property
    def stored(self) -> list[str]:
        """The arguments that are parameters, buffers or constants of the model."""
        return [name for name in self.arguments if name.startswith(("p_", "b_", "c_"))]


@dataclass(frozen=True)
class Use:
    """An initializer as an operand of a node, and the name of what the model has there: "p_mlp_weight"."""

    node: onnx.NodeProto
    position: int
    call: Call
    stored: str

    @property
    def given(self) -> str:
        """The name of the initializer."""
        return str(self.node.input[self.position])


def stored_argument(node: onnx.NodeProto, position: int, call: Call, name: str) -> str:
    """Which argument of a call the operand of its node is; "" if it is none, or the notes do not tell."""
    # A value of PyTorch's graph, computed in advance; or a node that is not that of the call any more.
    is_own = name not in call.arguments and all(entry.key != RULE for entry in node.metadata_props)
    words, roles = _ROLES.get(node.op_type, ("", {}))
    role = roles.get(position, "") if is_own and any(word in call.target for word in words.split()) else ""
    ending = re.compile(rf"_{role}(_[ih]h_l\d+(_reverse)?)?$")  # recurrent layers have weight_ih_l0 and so on
    alike = [stored for stored in call.stored if role and ending.search(f"_{stored[2:]}")]
    if len(alike) == 1:
        return alike[0]
    tables = [stored for stored in call.stored if stored.startswith("p_")]
    is_table = node.op_type in ("Gather", "GatherND") and position == 0 and call.target.startswith("aten.index")
    if is_own and is_table and call.selects_first and len(tables) == 1:
        return tables[0]  # a table of relative positions
    mangled = {named(stored[2:]): stored for stored in call.stored}
    if named(name) in mangled:
        return mangled[named(name)]
    return call.stored[0] if is_own and len(call.stored) == 1 and not INTERMEDIATE.fullmatch(name) else ""


def as_stored(use: Use, value: Tensor) -> tuple[Tensor, str | None]:
    """The value of the model's tensor, and the operator that makes the operand of it, "Transpose" or "Reshape"."""
    node = use.node
    if not INTERMEDIATE.fullmatch(use.given) and not RESHAPED.fullmatch(use.given):
        return value, None
    is_linear = "linear" in use.call.target and value.ndim == 2
    if is_linear and (node.op_type == "MatMul" or (node.op_type == "Gemm" and not _transposes(node))):
        return np.ascontiguousarray(value.T), "Transpose"
    if value.ndim > 1 and node.op_type in ("Mul", "Add", "PRelu") and value.size == max(value.shape):
        return value.reshape(-1), "Reshape"
    return value, None


def _transposes(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


def named(name: str) -> str:
    """A name as PyTorch writes it in notes."""
    return re.sub(r"\W", "_", name).lower()
