# SPDX-License-Identifier: Apache-2.0
"""Which rules for TVM's own operators are in force: those of TVM, or those of this package.

Importing this package leaves TVM's operators as they are, but for convolutions and for what TVM refuses or gets wrong
(`OperatorRules.stock_fails`). The other rules, of which a training step is made, are in force inside `rules()`, in
which all of this package's own functions run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_active: ContextVar[bool] = ContextVar("tvm_convgrad_rules", default=False)


@contextmanager
def rules() -> Iterator[None]:
    """A context manager in which TVM's passes use this package's rules for every operator that has one.

    The rules are the gradients (relax.transform.Gradient), layout rules (ConvertLayout) and legalizations (LegalizeOps)
    that training steps are built with. The gradient of relu is computed from its result and is 0 at 0, as in PyTorch
    (TVM's own is 1); sums of broadcast operands keep their layout; maxima and pools propagate NaN. The context applies
    to the thread or asyncio task that entered it, and may be nested.

    Returns:
        A context manager; it can also be used as a decorator.

    Example:
        >>> import tvm_convgrad
        >>> from relax_ops.active import rules_active
        >>> with tvm_convgrad.rules():
        ...     rules_active()
        True
        >>> rules_active()
        False
    """
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def rules_active() -> bool:
    """Whether the caller is inside `rules()`."""
    return _active.get()
