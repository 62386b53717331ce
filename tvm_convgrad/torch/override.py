# SPDX-License-Identifier: Apache-2.0
"""`enable`: PyTorch's convolution operators on CPUs go through plans; autograd, vmap and compile are above them.

What is replaced is the CPU's entry of `aten::convolution` and `aten::convolution_backward`. Tensors that are sparse,
quantized, on other devices, of subclasses with their own dispatch, or fake ones have entries of their own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import torch
from torch import Tensor

from tvm_convgrad.bridge.choice import warn_once
from tvm_convgrad.bridge.given import byte_count, flag, store_folder
from tvm_convgrad.bridge.store import Kernels, kernels
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.torch.native import Native, native, request_native
from tvm_convgrad.torch.plan import Plan, Policy, Results, form_of
from tvm_convgrad.torch.report import Explanation, Stats, explanation
from tvm_convgrad.torch.signature import BACKWARD, FORWARD, Signature

MOST_PLANS = 4096
"""Number of signatures for which there are plans; later signatures are computed by PyTorch."""

WORTH_COMPILING = 500
"""Calls of a choice that is made, after which the entries in C++ are compiled for the next `enable`."""

KEPT_MEMORY = 2 << 30
"""Bytes of freed results that are kept for the next ones, if `enable` is not told another number."""

_OWN_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
_convolution = torch.ops.aten.convolution.default
_convolution_backward = torch.ops.aten.convolution_backward.default

Ints = Sequence[int]


class Bridge:
    """The plans of this process, and PyTorch's entries while it is installed."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._library: torch.library.Library | None = None
        self._native: Native | None = None
        self._table = 0
        self._asked: Future[Native] | None = None
        self._calls = 0
        self._lock = threading.RLock()
        self._kernels: Kernels | None = None
        self._policy, self._kept_memory = Policy(), KEPT_MEMORY
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := forked()) is not None and method())

    @property
    def installed(self) -> bool:
        """Whether PyTorch's operators go through plans."""
        return self._library is not None or self.native

    @property
    def native(self) -> bool:
        """Whether they do so in C++, where their choice is made."""
        return self._native is not None and self._native.bridge is self

    def install(self, policy: Policy, folder: Path | None, kept_memory: int = KEPT_MEMORY) -> None:
        """Put this in the place of PyTorch's entries; `kept_memory` as in `enable`."""
        with self._lock:
            self.remove()
            chosen = kernels(folder)
            chosen.compile_here()
            if policy != self._policy or chosen is not self._kernels:
                self._plans, self._table = {}, 0
            self._policy, self._kernels, self._kept_memory = policy, chosen, kept_memory
            before, self._native = self._native, native(chosen)
            if before is not None and before is not self._native:
                before.release()
            if self._native is not None:
                self._table = self._table or self._native.new_table()
                self._native.install(self, self._table, policy.forward, kept_memory)
                return
            library = torch.library.Library("aten", "IMPL")
            library.impl(BACKWARD, self.backward, "CPU")
            if policy.forward:
                library.impl(FORWARD, self.forward, "CPU")
            self._library = library

    def _forked(self) -> None:
        """In a forked child no thread gives a lock back, and none compiles."""
        self._lock, self._asked = threading.RLock(), None
        for plan in list(self._plans.values()):
            plan.forked()

    def prepare(self) -> None:
        """Make plans possible without installing anything, for who calls `backward` itself."""
        if self._kernels is None:
            self._kernels = kernels()

    def remove(self) -> None:
        """Give PyTorch its own entries back."""
        with self._lock:
            if self._library is not None:
                self._library._destroy()
            if self._native is not None and self.native:
                self._native.remove()
            self._library = None

    def release(self) -> None:
        """Free the memory that is kept for results."""
        if self._native is not None:
            self._native.release()

    def explain(self) -> list[Explanation]:
        """Who computes what, in the order of first calls."""
        return [explanation(plan) for plan in self.plans]

    def stats(self) -> Stats:
        """Sums over all plans."""
        plans = self.plans
        return Stats(
            sum(plan.by_kernels.calls for plan in plans),
            sum(plan.by_kernels.seconds for plan in plans),
            sum(plan.by_pytorch.calls for plan in plans),
            sum(plan.by_pytorch.seconds for plan in plans),
            len(plans),
            0 if self._kernels is None else self._kernels.compiled,
            0 if self._native is None else self._native.kept_bytes,
        )

    @property
    def plans(self) -> list[Plan]:
        """Those of all signatures, in the order of first calls."""
        plans = list(self._plans.values())
        if self._native is not None:
            for plan in plans:
                self._native.count(plan)
        return plans

    @property
    def policy(self) -> Policy:
        """How plans choose, as it was enabled last."""
        return self._policy

    @property
    def kept_memory(self) -> int:
        """As it was enabled last."""
        return self._kept_memory

    @property
    def folder(self) -> Path | None:
        """Of the kernels."""
        return None if self._kernels is None else self._kernels.kept.folder

    def backward(
        self,
        grad: Tensor,
        data: Tensor,
        weight: Tensor,
        bias_sizes: Ints | None,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        transposed: bool,
        output_padding: Ints,
        groups: int,
        wanted: Sequence[bool],
        entry: int = 0,
    ) -> Results:
        """aten::convolution_backward on CPUs; `entry` is that of native.py, from which the call comes, or 0."""

        def own(mask: Sequence[bool]) -> Results:
            return _convolution_backward.redispatch(
                _OWN_KEYS, grad, data, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
                groups, mask,
            )  # fmt: skip

        if torch._C._get_tracing_state():  # torch.jit.trace, in which extents are tensors
            return own([bool(each) for each in wanted])
        fixed = (tuple(stride), tuple(padding), tuple(dilation), tuple(output_padding), transposed, groups)
        key = (
            grad.shape,
            grad.stride(),
            grad.dtype,
            data.shape,
            data.stride(),
            data.dtype,
            weight.shape,
            weight.stride(),
            weight.dtype,
            fixed,
            tuple(wanted),
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new(key, BACKWARD, data, weight, grad, fixed, wanted)
        if plan.decided:
            self._settled(plan, entry)
        if plan.direct is not None:
            return plan.direct(grad, data, weight)
        return plan.run({"grad": grad, "data": data, "weight": weight}, own)

    def forward(
        self,
        data: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        transposed: bool,
        output_padding: Ints,
        groups: int,
        entry: int = 0,
    ) -> Tensor | None:
        """aten::convolution on CPUs; `entry` as in `backward`."""

        def own(_mask: Sequence[bool]) -> Results:
            result = _convolution.redispatch(
                _OWN_KEYS, data, weight, bias, stride, padding, dilation, transposed, output_padding, groups
            )
            return (result,)

        if torch._C._get_tracing_state():  # torch.jit.trace, in which extents are tensors
            return own(())[0]
        fixed = (tuple(stride), tuple(padding), tuple(dilation), tuple(output_padding), transposed, groups)
        key = (
            data.shape,
            data.stride(),
            data.dtype,
            weight.shape,
            weight.stride(),
            weight.dtype,
            None if bias is None else (bias.dtype, bias.shape, bias.stride()),
            fixed,
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new(key, FORWARD, data, weight, None, fixed, (False, False, bias is not None), bias)
        if plan.decided:
            self._settled(plan, entry)
        if plan.direct is not None:
            return plan.direct(data, weight, bias)[0]
        return plan.run({"data": data, "weight": weight, "bias": bias}, own)[0]

    def _settled(self, plan: Plan, entry: int) -> None:
        """A call whose choice is made has come to Python: the next ones of an entry need not."""
        if entry:
            settler = self._native
            if settler is not None:  # None: another `enable` has come in between
                settler.settle(entry, plan)
            return
        self._calls = calls = self._calls + 1
        asked = self._asked  # which another thread may set to None
        if calls == WORTH_COMPILING:
            assert self._kernels is not None
            self._asked = request_native(self._kernels)
        elif asked is not None and asked.done():
            self._asked = None
            if asked.exception() is not None:
                warn_once("tvm_convgrad.torch", f"calls go through Python, in some microseconds: {asked.exception()}")

    def _new(
        self,
        key: tuple[object, ...],
        operator: str,
        data: Tensor,
        weight: Tensor,
        grad: Tensor | None,
        fixed: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, int],
        wanted: Sequence[bool],
        bias: Tensor | None = None,
    ) -> Plan:
        """The plan of calls that have not been seen before."""
        forms = [None if each is None else form_of(each) for each in (data, weight, grad)]
        assert forms[0] is not None
        assert forms[1] is not None
        stride, padding, dilation, output_padding, transposed, groups = fixed
        signature = Signature(
            operator=operator,
            data=forms[0],
            weight=forms[1],
            grad=forms[2],
            stride=stride,
            padding=padding,
            dilation=dilation,
            output_padding=output_padding,
            transposed=transposed,
            groups=groups,
            wanted=(wanted[0], wanted[1], wanted[2]),
            threads=torch.get_num_threads(),
            onednn=torch._C._get_mkldnn_enabled(),
        )
        assert self._kernels is not None
        channels = [groups * each for each in weight.shape[1:2]] if transposed else list(weight.shape[:1])
        plan = Plan(signature, self._kernels, self._policy, self._unable(bias, data, channels))
        # Without the lock, which a process that forks while another thread has it would keep for ever.
        return self._plans.setdefault(key, plan) if len(self._plans) < MOST_PLANS else plan

    def _unable(self, bias: Tensor | None, data: Tensor, channels: list[int]) -> str:
        """Why PyTorch is to compute calls, for what is not part of a signature; or nothing.

        Args:
            bias, data: of the call.
            channels: the shape that a bias must have.
        """
        if len(self._plans) >= MOST_PLANS:
            return f"there were calls of {MOST_PLANS} other signatures before"
        if torch.are_deterministic_algorithms_enabled() and not (self._policy.always and self._policy.wait):
            return (
                "deterministic algorithms are asked for, and who is faster differs from run to run; "
                "enable(always=True, wait=True) takes kernels in every run"
            )
        if bias is not None and (bias.dtype != data.dtype or not bias.is_contiguous()):
            return "the bias is of another element type than the data, or not contiguous"
        if bias is not None and list(bias.shape) != channels:
            return f"the bias has shape {list(bias.shape)}, not {channels}"
        return ""


BRIDGE = Bridge()
"""The one of this process."""


class Enabled:
    """The result of `enable`: a context manager that restores the previous setting on exit.

    A context that is left before one that was entered later leaves the setting of that in force, which then restores
    what it would have restored itself.
    """

    _entered: ClassVar[list[Enabled]] = []

    def __init__(self, before: tuple[bool, Policy, Path | None, int]) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        self._entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in self._entered:  # not if an ExitStack was given the exit alone
            place = self._entered.index(self)
            later = self._entered[place + 1 :]
            del self._entered[place]
            if later:
                later[0]._before = self._before
                return
        installed, policy, folder, kept_memory = self._before
        if installed:
            BRIDGE.install(policy, folder, kept_memory)
        else:
            BRIDGE.remove()


def enable(
    *,
    wait: bool = False,
    always: bool = False,
    forward: bool = True,
    folder: str | os.PathLike[str] | None = None,
    kept_memory: int = KEPT_MEMORY,
) -> Enabled:
    """Compute PyTorch's CPU convolutions and their gradients by this package's kernels where these are faster.

    Kernels are compiled in the background; until then PyTorch computes. The first calls after that alternate between
    both and are timed, and the faster one is chosen. Kernels and choices are stored on disk (folder: CONVGRAD_CACHE).
    PyTorch computes what the kernels do not support; `explain` gives the reason. Kernels run on PyTorch's threads.

    Args:
        wait: compile during the first call of each signature instead of in the background.
        always: use every available kernel without measuring. Together with `wait`, results are the same in every run,
            as `torch.use_deterministic_algorithms` requires.
        forward: whether to replace the convolution itself as well as its gradients.
        folder: where compiled kernels are stored; None means the default folder.
        kept_memory: bytes of freed results that may be kept for later results, which then need no new pages of the
            operating system; 0 keeps none.

    Returns:
        A context manager: `with enable(): ...` restores the previous setting on exit.

    Raises:
        DTypeError: an argument has a wrong type.
        ProblemError: `kept_memory` is negative or exceeds the address space; or `folder` is empty.
        SetupError: the operators of the installed PyTorch version cannot be replaced.

    Example:
        with tvm_convgrad.torch.enable():
            loss = model(images).square().sum()
            loss.backward()
    """
    policy = Policy(flag("enable: wait", wait), flag("enable: always", always), flag("enable: forward", forward))
    chosen, count = store_folder("enable: folder", folder), byte_count("enable: kept_memory", kept_memory)
    before = (BRIDGE.installed, BRIDGE.policy, BRIDGE.folder, BRIDGE.kept_memory)
    try:
        BRIDGE.install(policy, chosen, count)
    except (AttributeError, RuntimeError) as error:
        with suppress(RuntimeError):
            BRIDGE.remove()
        raise SetupError(f"PyTorch {torch.__version__} does not let its operators be replaced: {error}") from error
    return Enabled(before)


def disable() -> None:
    """Restore PyTorch's own convolutions. Compiled kernels and choices are kept for a later `enable`."""
    BRIDGE.remove()
    BRIDGE.release()


def explain() -> list[Explanation]:
    """For each signature: whether kernels or PyTorch compute its calls, and why; in the order of first calls."""
    return BRIDGE.explain()


def stats() -> Stats:
    """Number and total time of the calls that kernels and that PyTorch computed since `enable`."""
    return BRIDGE.stats()


__all__ = ["BRIDGE", "Enabled", "Explanation", "Stats", "disable", "enable", "explain", "stats"]
