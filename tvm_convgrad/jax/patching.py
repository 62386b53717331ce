# SPDX-License-Identifier: Apache-2.0
"""`conv_general_dilated` by kernels, and `patch`, which puts it under JAX's own of that name.

What is replaced is `bind` of JAX's primitive: libraries that hold JAX's function, as a default argument does, are
served like those that look it up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tvm_convgrad.bridge.given import flag, store_folder
from tvm_convgrad.jax.choice import CHOICES, Choice
from tvm_convgrad.jax.lowering import is_aside
from tvm_convgrad.jax.primitive import Policy, bind
from tvm_convgrad.jax.signature import Parameters, describe, served

_convolution_p = jax.lax.conv_general_dilated_p
_policy = jax.make_user_context(None)
"""The policy of `patch`, None where JAX is as it was. Functions that were traced under another one are traced again."""

_own_bind = _convolution_p.bind
"""JAX's: a method of the primitive's class, which an attribute of the primitive itself hides."""


@dataclass(frozen=True)
class Explanation:
    """What computes one convolution, or one gradient of it: a kernel of this package, or XLA.

    Attributes:
        call: the direction and the problem's descriptor; JAX's arguments if there is no descriptor.
        where: "kernel" or "XLA".
        why: the reason, as a sentence.
        programs: number of compiled programs with this call; without a descriptor, the number of times it was traced.
        calls, seconds: number and total time of the kernel's calls; 0 for XLA, whose calls are not counted.
    """

    call: str
    where: str
    why: str
    programs: int
    calls: int
    seconds: float

    def __str__(self) -> str:
        calls = f", {self.calls} calls in {self.seconds:.3f} s" if self.where == "kernel" else ""
        return f"{self.call}: {self.where} ({self.programs} programs{calls}): {self.why}"


@dataclass(frozen=True)
class Stats:
    """Counts of calls and times of this process.

    Attributes:
        kernel_calls, kernel_seconds: number and total time of the calls of all kernels.
        kernels: number of distinct calls that kernels compute.
        xla: number of distinct calls that XLA computes.
        compiled: number of kernels compiled for this process; kernels that were loaded from the store do not count.
    """

    kernel_calls: int
    kernel_seconds: float
    kernels: int
    xla: int
    compiled: int


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: tuple[str, str, str] | jax.lax.ConvDimensionNumbers | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: object = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` by this package's kernels where these are faster; all derivatives and vmap work.

    It can be called inside and outside of `jax.jit`, `grad`, `jvp`, `vmap`, `checkpoint` and `scan`. JAX computes what
    the kernels do not support; `explain` lists it with the reason.

    Args:
        lhs, rhs: data and weight. These and all other arguments are those of JAX's function.
        window_strides, padding, lhs_dilation, rhs_dilation: the geometry, per spatial axis.
        dimension_numbers, feature_group_count, batch_group_count: layouts and groups.
        precision, preferred_element_type, out_sharding: properties of the result.

    Returns:
        The convolution, in the layout given by `dimension_numbers`.

    Raises:
        TypeError, ValueError: JAX's own errors, if the arguments describe no convolution.

    Example:
        >>> import jax.numpy as jnp
        >>> import tvm_convgrad.jax
        >>> x, w = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))
        >>> tvm_convgrad.jax.conv_general_dilated(x, w, (1, 1), "VALID")[0, 0, 0].tolist()
        [9.0, 9.0]
    """
    _install()
    with _policy(_policy.value or Policy()):
        return jax.lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            precision,
            preferred_element_type,
            out_sharding,
        )


def _bind(lhs: ArrayLike, rhs: ArrayLike, **parameters: object) -> jax.Array:
    """JAX's `conv_general_dilated_p.bind`, of canonical parameters."""
    policy = _policy.value
    if policy is None or is_aside():
        return cast(jax.Array, _own_bind(lhs, rhs, **parameters))
    # An array of numpy has the type that JAX gives it, such as float32 for float64.
    lhs, rhs = (jax.numpy.asarray(each) if isinstance(each, np.ndarray) else each for each in (lhs, rhs))
    known, types = cast(Parameters, parameters), (jax.typeof(lhs), jax.typeof(rhs))
    found = served(*types, known)
    if isinstance(found, str):
        CHOICES.left(describe(*types, known), found)
        return cast(jax.Array, _own_bind(lhs, rhs, **parameters))
    return bind(found, lhs, rhs, known["precision"], policy)


def _install() -> None:
    _convolution_p.bind = _bind


class Patched:
    """The result of `patch`: a context manager that restores the previous setting on exit."""

    def __init__(self, before: Policy | None) -> None:
        self._before = before

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _policy.set_global(self._before)


def patch(*, always: bool = False, folder: str | os.PathLike[str] | None = None) -> Patched:
    """Compute JAX's CPU convolutions and their gradients by this package's kernels where these are faster.

    This affects `jax.lax.conv_general_dilated`, and so Flax, Equinox and all other callers, in functions that are
    traced from now on; functions that are jitted already are traced again. When a program is compiled, its kernels are
    compiled and timed beside XLA. Kernels and choices are stored on disk (folder: CONVGRAD_CACHE). Kernels run on XLA's
    threads.

    Args:
        always: use every available kernel without measuring; results are then the same in every run.
        folder: where compiled kernels are stored; None means the default folder.

    Returns:
        A context manager: `with patch(): ...` restores the previous setting on exit.

    Raises:
        DTypeError: an argument has a wrong type.
        ProblemError: `folder` is empty.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import tvm_convgrad.jax
        >>> def loss(w):
        ...     return jax.lax.conv_general_dilated(jnp.ones((1, 1, 4, 4)), w, (1, 1), "SAME").sum()
        >>> with tvm_convgrad.jax.patch():
        ...     jax.jit(jax.grad(loss))(jnp.ones((1, 1, 3, 3)))[0, 0].tolist()
        [[9.0, 12.0, 9.0], [12.0, 16.0, 12.0], [9.0, 12.0, 9.0]]
    """
    policy = Policy(flag("patch: always", always), store_folder("patch: folder", folder))
    before = _policy.get_global()
    _install()
    _policy.set_global(policy)
    return Patched(before)


def unpatch() -> None:
    """Restore JAX's own convolutions. Compiled kernels and choices are kept for a later `patch`."""
    _policy.set_global(None)


def explain() -> list[Explanation]:
    """For each convolution of the compiled programs: whether a kernel or XLA computes it, and why; in that order."""
    with CHOICES.lock:
        made = [*CHOICES.made.values(), *CHOICES.left_over.values()]
    return [_explanation(choice) for choice in made]


def _explanation(choice: Choice) -> Explanation:
    return Explanation(choice.call, choice.where, choice.why, choice.programs, *choice.tally)


def stats() -> Stats:
    """Number and total time of the kernels' calls, and the number of distinct calls that XLA computes."""
    with CHOICES.lock:
        made = [*CHOICES.made.values(), *CHOICES.left_over.values()]
    kernels = {choice.kernel.job.key: choice for choice in made if choice.kernel is not None}
    tallies = [choice.tally for choice in kernels.values()]
    return Stats(
        kernel_calls=sum(calls for calls, _ in tallies),
        kernel_seconds=sum(seconds for _, seconds in tallies),
        kernels=len(kernels),
        xla=sum(choice.kernel is None for choice in made),
        compiled=CHOICES.compiled,
    )


__all__ = ["Explanation", "Patched", "Stats", "conv_general_dilated", "explain", "patch", "stats", "unpatch"]
