# SPDX-License-Identifier: Apache-2.0
"""`Choices`: who computes a direction of a problem in compiled programs, a kernel or XLA.

A program is compiled once and run often: when one is lowered, its kernels are compiled, timed by turns with XLA's own
convolution, and the choice is kept on disk. Programs that were compiled do not change any more.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

from tvm_convgrad.bridge.choice import is_faster, is_open, measured, warn_once
from tvm_convgrad.bridge.job import XLA_HOST, Job, digest
from tvm_convgrad.bridge.library import Kernel, XlaHost
from tvm_convgrad.bridge.store import Kernels, kernels
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.errors import ConvGradError, SetupError
from tvm_convgrad.jax.primitive import Call

TARGET = "tvm_convgrad"
"""The name of the custom call."""

TURNS = 4
"""Timed calls of each, at the least."""

MOST_TURNS = 16
"""Timed calls of each where the two are close."""

ENOUGH_SECONDS = 0.5
"""XLA's time after which no more turns are taken: its depthwise gradients can take a second."""

_FORMAT = 1
_BRIDGE = "tvm_convgrad.jax"

Computation = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of arrays that JAX can trace."""


@dataclass
class Choice:
    """Who computes one direction of a problem.

    Attributes:
        call: the direction and the problem's descriptor.
        why: in a sentence.
        kernel: what computes it; None is XLA.
        programs: how often it was lowered.
        found: the kernel that there is, taken or not.
    """

    call: str
    why: str
    kernel: Kernel | None = None
    programs: int = 0
    found: Kernel | None = None

    @property
    def where(self) -> str:
        """Who computes it: "kernel" or "XLA"."""
        return "XLA" if self.kernel is None else "kernel"

    @property
    def tally(self) -> tuple[int, float]:
        """Calls of the kernel by programs, and their seconds."""
        if self.kernel is None:
            return 0, 0.0
        host = self.kernel.host
        assert isinstance(host, XlaHost)
        return host.tally(self.kernel.job.key)


@dataclass
class Choices:
    """The choices of this process, and what was left to JAX before there was a problem to choose for."""

    made: dict[tuple[Call, str], Choice] = field(default_factory=dict)
    left_over: dict[str, Choice] = field(default_factory=dict)
    stores: set[Path | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, call: Call, surroundings: str, own: Computation) -> Choice:
        """Who computes a call in a program that is being lowered.

        Args:
            call: what is to be computed.
            surroundings: why XLA has to compute it in this program, whatever is faster; or nothing.
            own: computes the call as JAX does.
        """
        choice = self.made.get((call, surroundings))
        if choice is None:  # without the lock, which is not to be held for seconds
            choice = self._choose(call, surroundings, own)
        with self.lock:
            choice = self.made.setdefault((call, surroundings), choice)
            choice.programs += 1
            return choice

    def left(self, words: str, why: str) -> None:
        """Note a convolution that is not one of the family's, and goes to JAX as it came."""
        with self.lock:
            self.left_over.setdefault(words, Choice(words, why)).programs += 1

    def _choose(self, call: Call, surroundings: str, own: Computation) -> Choice:
        choice = Choice(f"{WORDS[call.direction]} {call.problem.descriptor}", surroundings)
        if surroundings:
            return choice
        store = kernels(call.policy.folder, XLA_HOST)
        self.stores.add(call.policy.folder)
        try:
            found = store.request(Job(call.direction, call.problem.descriptor)).result()
        except ConvGradError as error:
            choice.why = str(error)
            if isinstance(error, SetupError):
                warn_once(_BRIDGE, str(error))
            return choice
        if store.kept.problem:
            warn_once(_BRIDGE, store.kept.problem)
        _register(found)
        choice.found = found
        if call.policy.always:
            choice.kernel, choice.why = found, "kernels are always taken"
            return choice
        ours, theirs = _recalled(call, store) or _measured(call, store, found, own)
        choice.why = measured(ours, theirs, "XLA")
        choice.kernel = found if is_faster(ours, theirs) else None
        return choice

    @property
    def compiled(self) -> int:
        """Kernels that this process has had compiled."""
        return sum(kernels(folder, XLA_HOST).compiled for folder in self.stores)


@lru_cache(maxsize=1)
def _target(host: XlaHost) -> None:
    """Make the custom call known to XLA, once."""
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(host.handler), platform="cpu")


def _register(kernel: Kernel) -> None:
    host = kernel.host
    assert isinstance(host, XlaHost)
    _target(host)
    host.register(kernel.job.key, kernel)
    _living.append(kernel)


_living: list[Kernel] = []
"""Compiled programs call kernels by their addresses."""


def _key(call: Call) -> str:
    return digest(
        ["jax choice", _FORMAT, call.direction, call.problem.descriptor, str(call.precision), jax.__version__]
    )


def _recalled(call: Call, store: Kernels) -> tuple[float, float] | None:
    content = store.kept.get(_key(call))
    if content is None:
        return None
    ours, theirs = json.loads(content)
    return float(ours), float(theirs)


def _measured(call: Call, store: Kernels, kernel: Kernel, own: Computation) -> tuple[float, float]:
    """Seconds of the kernel and of XLA, in turns. In a thread of its own, as this one is lowering a program."""
    with ThreadPoolExecutor(1, "convgrad-measure") as executor:
        found = executor.submit(_in_turns, call, kernel, own).result()
    store.kept.put(_key(call), json.dumps(found).encode())
    return found


def contenders(call: Call, kernel: Kernel, own: Computation) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call by the kernel and as JAX computes it, compiled, on operands of their own; each returns when it is done."""
    generator = np.random.default_rng(0)
    host = [generator.standard_normal(each.shape, np.float32).astype(each.dtype) for each in call.operands]
    arrays = [jax.device_put(each, jax.devices("cpu")[0]) for each in host]
    by_kernel = jax.ffi.ffi_call(TARGET, call.result)

    def ready(function: Computation) -> Callable[[], object]:
        program = jax.jit(function)
        program(*arrays).block_until_ready()
        return lambda: program(*arrays).block_until_ready()

    return ready(lambda *both: by_kernel(*both, kernel=kernel.job.key)), ready(own)


def _in_turns(call: Call, kernel: Kernel, own: Computation) -> tuple[float, float]:
    """Seconds of the kernel and of XLA, the best of each."""
    functions = contenders(call, kernel, own)
    seconds: tuple[list[float], list[float]] = ([], [])
    while is_open(*seconds, least=TURNS, most=MOST_TURNS) and sum(seconds[1]) < ENOUGH_SECONDS:
        for function, found in zip(functions, seconds, strict=True):
            begin = time.perf_counter()
            function()
            found.append(time.perf_counter() - begin)
    return min(seconds[0]), min(seconds[1])


CHOICES = Choices()
"""Those of this process."""

__all__ = ["CHOICES", "TARGET", "Choice", "Choices", "contenders"]
