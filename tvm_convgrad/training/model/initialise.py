# SPDX-License-Identifier: Apache-2.0
"""Initial values for parameters that come without: He for weights, ones and zeros for the affine parts."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import bindings_of, operator_name

_ARGUMENT_ROLES = {
    "relax.nn.batch_norm": {1: "one", 2: "zero", 3: "zero", 4: "one"},
    "relax.nn.layer_norm": {1: "one", 2: "zero"},
    "relax.nn.group_norm": {1: "one", 2: "zero"},
    "relax.nn.instance_norm": {1: "one", 2: "zero"},
    "relax.add": {0: "zero", 1: "zero"},
}
_PASS_THROUGH = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.permute_dims", "relax.broadcast_to")


def roles_of(function: relax.Function) -> dict[relax.Var, str]:
    """What each parameter of a function is for: "weight", "weight <fan_in>", "one" or "zero".

    Scale, shift and running statistics of normalisations are recognised by their place, a parameter that is only added
    is a bias, the fan-in of convolutions and matrix products comes from their layouts.
    """
    roles: dict[Any, str] = {}
    origin: dict[Any, Any] = {parameter: parameter for parameter in function.params}
    for binding in bindings_of(function):
        value = getattr(binding, "value", None)
        if not isinstance(value, tvm.ir.Call):
            continue
        name = operator_name(value)
        if name in _PASS_THROUGH and value.args[0] in origin:
            origin[binding.var] = origin[value.args[0]]
            continue
        for position, argument in enumerate(value.args):
            if not isinstance(argument, relax.Var) or argument not in origin:
                continue
            role = _ARGUMENT_ROLES.get(name, {}).get(position) or f"weight{_fan_in(name, position, value)}"
            roles.setdefault(origin[argument], role)
    return roles


def _fan_in(name: str, position: int, call: relax.Call) -> str:
    """The number of terms in each sum that reads the weight, as a suffix, or nothing where unknown."""
    shape = call.args[position].ty.shape
    if name.startswith("relax.nn.conv") and position == 1:
        letters = zip(shape.values, str(call.attrs.kernel_layout), strict=True)
        extents = [int(extent) for extent, letter in letters if letter != "O"]
        return f" {math.prod(extents)}"
    if name == "relax.matmul" and position == 1:
        return f" {int(shape.values[-2] if len(shape.values) > 1 else shape.values[0])}"
    return ""


def initial_value(name: str, shape: tuple[int, ...], dtype: str, role: str, seed: int) -> np.ndarray[Any, Any]:
    """He-normal values for weights (variance 2 / fan-in), constants for "one" and "zero".

    The stream depends on `seed` and on the parameter's name only, so that adding a layer changes no other.
    A weight whose fan-in is unknown takes the product of all extents but the first.

    Raises:
        ModelError: an integer parameter without a value.
    """
    if role == "one":
        return np.ones(shape, dtype)
    if role == "zero":
        return np.zeros(shape, dtype)
    if np.dtype(dtype).kind != "f":
        raise ModelError(f"Parameter {name!r} is {dtype} and has no value; give values for integer parameters.")
    fan_in = int(role.split()[1]) if " " in role else math.prod(shape[1:])
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return (generator.standard_normal(shape) * math.sqrt(2.0 / max(fan_in, 1))).astype(dtype)
