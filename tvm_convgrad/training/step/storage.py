# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a float32 step are kept in 16 bits: activations, and the gradients with respect to them.

An *activation* is what a convolution or matrix product makes of the samples, and what elementwise operations, pools,
norms and the like make of that; the gradient with respect to one is made by the same kinds of operators. Gradients
with respect to weights (wgrad, X^T dY) are none, nor are sums, such as the statistics of a norm. Of the activations are
kept in 16 bits

- results of convolutions and products, and their operands,
- what more than one kernel reads, unless its readers compute it again (`training.passes.recompute`).

What is between is computed in float32 inside of one kernel. What follows the last product on the way to the loss and
to the predictions (scores, the loss and its own terms) stays float32, as does what any other operator reads. So does
what is made with numbers beyond the range of the 16-bit type, such as a mask of -1e9 on the scores of attention: as
-inf, a row that is masked altogether would be NaN behind the softmax.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relax_ops.compat import Constant, array_of
from relax_ops.ir import constant_extents
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.training.ir.cheap import CHEAP, READERS, SOURCES, is_large, variables_of
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name

_RANKS = (1, 2, 3)
MATMUL = "relax.matmul"
WEIGHT_GRADIENTS = tuple(f"relax.nn.conv{rank}d_backward_weight" for rank in _RANKS)
CONVOLUTIONS = (
    *(f"relax.nn.conv{rank}d" for rank in _RANKS),
    *(f"relax.nn.conv{rank}d_transpose" for rank in _RANKS),
    *(f"relax.nn.conv{rank}d_backward_data" for rank in _RANKS),
)
CONTRACTIONS = (MATMUL, *CONVOLUTIONS, *WEIGHT_GRADIENTS)


def _names(*names: str) -> frozenset[str]:
    return frozenset(f"relax.{name}" for name in names)


VIEWS = _names("reshape", "expand_dims", "permute_dims")
"""Operators that show the elements of their operand as another shape."""


def is_narrowed(call: relax.Call, value_of: Callable[[relax.Var], relax.Expr | None]) -> bool:
    """Whether a call is a contraction whose operands are cast to 16 bits.

    A product with a constant is not: it is with a table of the importer's, such as the cosines of a Fourier transform,
    which PyTorch's autocast leaves in float32 as well. `value_of` gives what a variable is bound to, if it is bound.
    """
    name = operator_name(call)
    if name not in CONTRACTIONS or element_type(call.args[0]) != "float32":
        return False
    return name != MATMUL or not any(_is_constant(operand, value_of) for operand in call.args)


def _is_constant(operand: relax.Expr | None, value_of: Callable[[relax.Var], relax.Expr | None]) -> bool:
    while isinstance(operand, relax.Var):
        operand = value_of(operand)
    if isinstance(operand, tvm.ir.Call) and operator_name(operand) in VIEWS:
        return _is_constant(operand.args[0], value_of)
    return isinstance(operand, Constant)


MOVES = _names(
    "reshape",
    "permute_dims",
    "expand_dims",
    "squeeze",
    "flatten",
    "concat",
    "strided_slice",
    *(f"nn.max_pool{rank}d" for rank in _RANKS),
)
"""Operators whose results are elements of their operands, and so are computed in 16 bits without rounding."""

MAX_POOL_GRADIENTS = _names("grad.max_pool2d_backward", "nn.max_pool_backward")
"""Computed from 16-bit operands, as their kernels sum in float32."""

_AVERAGES = _names(
    *(f"nn.avg_pool{rank}d" for rank in _RANKS),
    *(f"nn.adaptive_avg_pool{rank}d" for rank in _RANKS),
    "grad.avg_pool2d_backward",
    "nn.avg_pool_backward",
)
_ELEMENTWISE = CHEAP | _names(
    "divide",
    "abs",
    "square",
    "nn.leakyrelu",
    "nn.prelu",
    "nn.gelu",
    "nn.gelu_tanh",
    "nn.silu",
    "nn.selu",
    "nn.softplus",
    "sigmoid",
    "special.erfc",
    "special.expm1",
    "special.gelu_derivative",
    "special.log1p",
    "tanh",
)
_PASSED_ON = (
    _ELEMENTWISE - _names("sigmoid", "tanh", "clip") | MOVES | _names("broadcast_to", "nn.pad", "full", "triu", "tril")
)
"""Operators whose results may be as large as their operands."""
_SOFTMAXES = _names("nn.softmax", "nn.log_softmax")
_NORMS = _names("nn.layer_norm", "nn.rms_norm", "nn.group_norm", "nn.instance_norm", "nn.softmax")
_MAKERS = (
    _ELEMENTWISE | MOVES | MAX_POOL_GRADIENTS | _AVERAGES | _NORMS | _names("broadcast_to", "nn.pad", "image.resize2d")
)
"""Operators that make activations of activations."""
_TAKERS = (
    _MAKERS | frozenset(CONTRACTIONS) | _names("sum", "mean", "max", "min", "collapse_sum_to", "exp", "erf", "sqrt")
)
"""Operators that may read a tensor kept in 16 bits; all but contractions, MOVES and max pools compute in float32."""

_SPACING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance of a type's numbers at 1."""
_APART = 0.8

STATE = "state"
"""The parameter of a step's functions with what lasts from step to step."""


def may_be_mask(values: np.ndarray[Any, Any], dtype: str) -> bool:
    """Whether weights that no step changes may be a mask: numbers as large lie more than 0.8 apart in the 16-bit type.

    Scores to which such a number is added would lose their digits, which count where it is added to a whole row. It is
    so from 1,000 in float16 and from 110 in bfloat16: not for the -100 of shifted windows, which mask no whole row.
    """
    if values.dtype.kind != "f":
        return False
    finite = np.abs(values[np.isfinite(values)])
    return finite.size > 0 and float(finite.max()) * _SPACING[dtype] > _APART


class Storage:
    """The variables of a straight-line function that are to be kept in 16 bits."""

    def __init__(self, function: relax.Function, dtype: str, masks: Collection[int] = ()) -> None:
        """Analyse `function`, of a finished float32 step (or `predict`), for the 16-bit type `dtype`.

        Args:
            masks: numbers of the fields of its state that may be masks, see `may_be_mask`.
        """
        self._dtype = dtype
        self._values: dict[Any, Any] = {binding.var: binding.value for binding in bindings_of(function)}
        self._readers: dict[Any, list[Any]] = defaultdict(list)
        for variable, value in self._values.items():
            for operand in dict.fromkeys(variables_of(value)):
                self._readers[operand].append(variable)
        for operand in variables_of(function.body.body):
            self._readers[operand].append(None)
        state = next((p for p in function.params if p.name == STATE), None)
        self._weights = [p for p in function.params if not p.same_as(state)] + [
            variable
            for variable, value in self._values.items()
            if isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(state) and value.index not in masks
        ]
        self._of_samples = self._dependents(
            [p for p in function.params if isinstance(p.ty, relax.TensorType) and p.ty.ndim > 0]
        )
        self._last = self._after_the_last_product(function)
        self._activations = self._find_activations()
        self._beyond = self._beyond_the_range()
        self.moved: set[Any] = set()
        self.stored: set[Any] = set()
        self._choose()

    def keeps(self, variable: relax.Var) -> bool:
        """Whether a variable is to be rounded, and kept in 16 bits."""
        return variable in self.stored

    def _dependents(self, of: Collection[relax.Var]) -> set[Any]:
        found = set(of)
        for variable, value in self._values.items():
            if any(operand in found for operand in variables_of(value)):
                found.add(variable)
        return found

    def _after_the_last_product(self, function: relax.Function) -> set[Any]:
        """What the loss and the predictions are made of, from the last product on."""
        body = function.body.body
        result = self._values.get(body, body)
        outputs = result.fields[:2] if isinstance(result, relax.Tuple) else [result]
        before = self._ancestors([v for output in outputs for v in variables_of(output)])
        leads: set[Any] = set()  # to a product that is itself on the way to the outputs
        for variable in reversed(self._values):
            value = self._values[variable]
            if variable in before and (variable in leads or _is_call(value, CONTRACTIONS)):
                leads.update(variables_of(value))
        return {variable for variable in before if variable not in leads}

    def _ancestors(self, variables: list[Any]) -> set[Any]:
        found = set(variables)
        for variable in reversed(self._values):
            if variable in found:
                found.update(variables_of(self._values[variable]))
        return found

    def _find_activations(self) -> set[Any]:
        found: set[Any] = set()
        for variable, value in self._values.items():
            if not isinstance(value, tvm.ir.Call) or not _is_float32(variable):
                continue
            name = operator_name(value)
            if name in CONTRACTIONS and not is_narrowed(value, self._values.get):
                continue
            if name == MATMUL:
                mixes = all(operand in self._of_samples for operand in value.args)
                is_one = len(getattr(variable.ty.shape, "values", ())) > 2 and not self._is_summed(variable)
                if any(operand in self._of_samples for operand in value.args) and (is_one or not mixes):
                    found.add(variable)
            elif name in CONVOLUTIONS or (name in _MAKERS and any(each in found for each in variables_of(value))):
                found.add(variable)
        return found

    def _beyond_the_range(self) -> set[Any]:
        """What elementwise operators make with numbers that the 16-bit type has not, and what is made of that.

        These are constants, and, on the way to a softmax, what comes of samples, of constants or of buffers with large
        numbers without a product: a mask. There `where` may fill in a tensor of any origin.
        """
        scores: set[Any] = set()
        for variable in reversed(self._values):
            value = self._values[variable]
            if _is_call(value, _SOFTMAXES) or (variable in scores and _is_call(value, _PASSED_ON)):
                scores.update(variables_of(value))
        products = self._dependents([v for v, value in self._values.items() if _is_call(value, CONTRACTIONS)])
        of_weights = self._dependents(self._weights) - self._of_samples
        found: set[Any] = set()
        for variable, value in self._values.items():
            if not _is_float32(variable):
                continue
            if not _is_call(value, _PASSED_ON):
                if self._overflows(value):
                    found.add(variable)
                continue
            operands = variables_of(value)
            masks: list[Any] = []
            if variable in scores and operator_name(value) in _ELEMENTWISE:
                fills = operator_name(value) == "relax.where"
                masks = [v for v in operands if v not in products and (fills or v not in of_weights)]
            masked = any(map(_is_float32, masks))
            if masked or any(each in found for each in operands) or any(map(self._overflows, value.args)):
                found.add(variable)
        return found

    def _overflows(self, argument: relax.Expr) -> bool:
        """Whether a constant has finite numbers that are infinite in the 16-bit type."""
        if not isinstance(argument, Constant) or element_type(argument) != "float32":
            return False
        numbers = array_of(argument)
        with np.errstate(over="ignore"):
            return bool((np.isfinite(numbers) & ~np.isfinite(numbers.astype(numpy_dtype(self._dtype)))).any())

    def _is_summed(self, variable: relax.Var) -> bool:
        """Whether a batch of matrices is added up, as the gradient of a weight that all of them are multiplied with."""
        sums = _names("sum", "collapse_sum_to", "reshape", "squeeze")
        return all(reader is not None and _is_call(self._values[reader], sums) for reader in self._readers[variable])

    def _choose(self) -> None:
        sources: dict[Any, set[Any]] = {}  # of what readers compute again, as the pass finds them
        for variable, value in self._values.items():
            if not isinstance(value, tvm.ir.Call) or not isinstance(variable.ty, relax.TensorType):
                continue
            name, readers = operator_name(value), self._readers[variable]
            known = [reader for reader in readers if reader is not None]
            if self._may_be_kept(variable):
                if name in CONTRACTIONS:
                    self.stored.add(variable)
                    continue
                if self._moves(name, value):
                    self.moved.add(variable)
                    continue
                if any(_is_call(self._values[reader], CONTRACTIONS) for reader in known):
                    self.stored.add(variable)
                    continue
            if constant_extents(variable) is not None and not is_large(variable):
                continue
            large = [v for v in variables_of(value) if constant_extents(v) is None or is_large(v)]
            found = {each for v in large for each in sources.get(v, {v})}
            if is_large(variable) and name in CHEAP and len(found) <= SOURCES and self._all(readers, READERS):
                sources[variable] = found
            elif self._may_be_kept(variable) and (len(readers) > 1 or not self._all(readers, READERS | _ELEMENTWISE)):
                self.stored.add(variable)

    def _all(self, readers: list[Any], names: Collection[str]) -> bool:
        """Whether all readers are calls of these operators."""
        return all(reader is not None and _is_call(self._values[reader], names) for reader in readers)

    def _may_be_kept(self, variable: relax.Var) -> bool:
        is_inner = variable in self._activations and variable not in self._last and variable not in self._beyond
        return is_inner and self._all(self._readers[variable], _TAKERS)

    def _moves(self, name: str, value: relax.Call) -> bool:
        """Whether a call on kept operands is done in 16 bits: without rounding, or in the epilogue of a kernel."""
        operands = variables_of(value)
        if name in MAX_POOL_GRADIENTS:
            return self._is_kept(value.args[1])
        if name == "relax.add":
            return self._biased(value) is not None
        if name == "relax.clip":
            numbers = [float(getattr(bound, "value", "nan")) for bound in value.args[1:]]
            exact = all(float(numpy_dtype(self._dtype).type(number)) == number for number in numbers)
            return exact and self._is_kept(operands[0])
        return name in MOVES | {"relax.nn.relu"} and all(map(self._is_kept, operands))

    def _biased(self, call: relax.Call) -> Any:
        """The result of a contraction to which nothing but this call adds a small tensor of the state, or None."""
        for product, bias in (call.args, reversed(call.args)):
            made = self._values.get(product) if product in self.stored else None
            if made is None or operator_name(made) not in CONTRACTIONS or len(self._readers[product]) > 1:
                continue
            if isinstance(bias, relax.Var) and bias not in self._of_samples and not is_large(bias):
                return product
        return None

    def _is_kept(self, operand: relax.Expr) -> bool:
        return operand in self.stored or operand in self.moved


def _is_call(value: relax.Expr, names: Collection[str]) -> bool:
    return isinstance(value, tvm.ir.Call) and operator_name(value) in names


def _is_float32(variable: relax.Var) -> bool:
    return isinstance(variable.ty, relax.TensorType) and element_type(variable) == "float32"


__all__ = ["CONTRACTIONS", "MAX_POOL_GRADIENTS", "VIEWS", "Storage", "is_narrowed"]
