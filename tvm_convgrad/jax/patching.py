# SPDX-License-Identifier: Apache-2.0
"""`conv_general_dilated` by kernels, and `patch`, which puts it under JAX's own of that name.

What is replaced is `bind` of JAX's primitive: libraries that hold JAX's function, as a default argument does, are
served like those that look it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tvm_convgrad.jax.choice import CHOICES, Choice
from tvm_convgrad.jax.lowering import is_aside
from tvm_convgrad.jax.primitive import Policy, bind
from tvm_convgrad.jax.signature import Parameters, describe, served

_convolution_p = jax.lax.conv_general_dilated_p
_policy = jax.make_user_context(None)
"""The policy of `patch`, None where JAX is as it was. Functions that were traced under another one are traced anew."""

_own_bind = _convolution_p.bind
"""JAX's: a method of the primitive's class, which an attribute of the primitive itself hides."""


@dataclass(frozen=True)
class Explanation:
    """Who computes one convolution, or a gradient of one.

    Attributes:
        call: the direction and the problem's descriptor; where it has none, JAX's arguments.
        where: "kernel", or "XLA".
        why: in a sentence.
        programs: in how many compiled programs it is, or how often it was traced if it has no descriptor.
        calls, seconds: of the kernel; XLA's are not known.
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
    """What programs of this process compute.

    Attributes:
        kernel_calls, kernel_seconds: of all kernels, by all programs.
        kernels: different calls that kernels compute.
        xla: different calls that XLA computes.
        compiled: kernels that this process has had compiled; those that were kept on disk are none.
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
    """`jax.lax.conv_general_dilated` by kernels where these are faster, with gradients of any order and vmap.

    It may be called inside of `jax.jit`, `grad`, `jvp`, `vmap`, `checkpoint` and `scan`, and outside of them. What
    kernels do not compute goes to JAX; `explain` tells what, and why.

    Args:
        lhs, rhs: data and weight, as of JAX's function, and so are all others.
        window_strides, padding, lhs_dilation, rhs_dilation: of the axes.
        dimension_numbers, feature_group_count, batch_group_count: layouts and groups.
        precision, preferred_element_type, out_sharding: of the result.

    Returns:
        The convolution, in the layout that `dimension_numbers` says.

    Raises:
        TypeError, ValueError: JAX's own, of what is no convolution.

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
    """What `patch` returns: leaving it as a context restores what was before."""

    def __init__(self, before: Policy | None) -> None:
        self._before = before

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _policy.set_global(self._before)


def patch(*, always: bool = False, folder: Path | None = None) -> Patched:
    """Compute JAX's convolutions and their gradients on CPUs by kernels where these are faster than XLA's own.

    `jax.lax.conv_general_dilated`, and so Flax, Equinox and all else that calls it, is served in functions that are
    traced from now on; what was jitted before is traced anew. Kernels are compiled, and timed beside XLA, when a
    program is; both are kept on disk (CONVGRAD_CACHE names the folder). They run on XLA's own threads.

    Args:
        always: take every kernel there is, without measuring; results are then the same in every run.
        folder: of compiled kernels; None is the default one.

    Returns:
        A context: `with patch(): ...` restores what was before.

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
    before = _policy.get_global()
    _install()
    _policy.set_global(Policy(always, folder))
    return Patched(before)


def unpatch() -> None:
    """Let JAX compute its convolutions itself again. What was compiled and measured stays for a later `patch`."""
    _policy.set_global(None)


def explain() -> list[Explanation]:
    """Who computes each convolution of the programs that were compiled, and why, in the order of their compilation."""
    with CHOICES.lock:
        made = [*CHOICES.made.values(), *CHOICES.left_over.values()]
    return [_explanation(choice) for choice in made]


def _explanation(choice: Choice) -> Explanation:
    return Explanation(choice.call, choice.where, choice.why, choice.programs, *choice.tally)


def stats() -> Stats:
    """How many calls kernels have computed, how long they took, and how many different calls XLA computes."""
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
