# SPDX-License-Identifier: Apache-2.0
"""`Plan`: who computes the calls of one signature, PyTorch or a kernel, result by result.

The first call is PyTorch's, whose answer also says which strides the results have. The second one has the kernels
compiled. When they are there, calls are by turns PyTorch's and the kernels' (turns.py), and then whoever was faster
keeps a result. The choice is kept on disk, so that the next process makes no measurement.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from tvm_convgrad.bridge.choice import warn_once
from tvm_convgrad.bridge.job import digest
from tvm_convgrad.bridge.library import Kernel
from tvm_convgrad.bridge.store import Kernels
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.torch.signature import Form, Part, Signature, parts_of, refusal
from tvm_convgrad.torch.turns import APART, KERNEL, Best, Turns

Results = tuple[Tensor | None, ...]
Own = Callable[[Sequence[bool]], Results]
"""PyTorch's own results, of which the wanted ones are given."""

Direct = Callable[..., Results]
"""Of the tensors in the order of BACKWARD_NAMES or FORWARD_NAMES, the results."""

BACKWARD_NAMES, FORWARD_NAMES = ("grad", "data", "weight"), ("data", "weight", "bias")

_FORMAT = 3


@dataclass(frozen=True)
class Policy:
    """How plans choose.

    Attributes:
        wait: compile at the first call, which waits, and not in the background.
        always: take every kernel there is, without measuring; results are then the same in every run.
        forward: serve the forward convolution, too.
    """

    wait: bool = False
    always: bool = False
    forward: bool = True


@dataclass
class Tally:
    """Calls of a plan, and their seconds."""

    calls: int = 0
    seconds: float = 0.0


class Plan:
    """Who computes the calls of a signature.

    Attributes:
        signature: of the calls.
        reasons: why PyTorch or a kernel computes each part; of "" for all parts.
        taken: the parts that kernels compute, once that is decided.
        decided: whether it is.
        direct: computes all results from the tensors of BACKWARD_NAMES or FORWARD_NAMES, if kernels compute them all.
        by_kernels, by_pytorch: calls that a kernel had a part in, and all others.
        entries: where native.py counts calls of a choice that is made.
    """

    def __init__(self, signature: Signature, kernels: Kernels, policy: Policy, unable: str = "") -> None:
        """The plan of calls that have not been seen before; `unable` says why PyTorch is to compute them all."""
        self.signature, self._kernels, self._policy = signature, kernels, policy
        self.by_kernels, self.by_pytorch = Tally(), Tally()
        self.reasons: dict[str, str] = {}
        self.taken: tuple[tuple[Part, Kernel], ...] = ()
        self.decided = False
        self.direct: Direct | None = None
        self.entries: list[int] = []
        self._parts: tuple[Part, ...] = ()
        self._futures: tuple[Future[Kernel], ...] = ()
        self._ready: tuple[tuple[Part, Kernel], ...] = ()
        self._turns: Turns | None = None
        self._kept: Best | None = None
        self._seen = 0
        self._measuring = threading.Lock()
        reason = unable or refusal(signature)
        if reason:
            self._decide({"": reason}, ())
        else:
            self._recall()

    def run(self, tensors: dict[str, Tensor | None], own: Own) -> Results:
        """The results of a call, of which only wanted ones are no None."""
        begin = time.perf_counter()
        if self.decided:
            results = self._mixed(tensors, own) if self.taken else own(self.signature.wanted)
            self._count(self.by_kernels if self.taken else self.by_pytorch, begin)
            return results
        if self._ready and self._measuring.acquire(blocking=False):
            try:
                if self._ready:  # another thread may have had the last turn
                    return self._turn(tensors, own)
            finally:
                self._measuring.release()
        results = own(self.signature.wanted)
        self._count(self.by_pytorch, begin)
        if not self._ready:
            self._advance(results)
        return results

    def forked(self) -> None:
        """In a forked child: another thread may have had a turn, and kernels that were asked for do not come."""
        self._measuring = threading.Lock()
        if not all(future.done() for future in self._futures):
            self._futures = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The results that kernels could compute, once PyTorch has answered; none where no kernel is tried."""
        return self._parts

    @property
    def rest(self) -> tuple[bool, ...]:
        """The results that PyTorch computes beside the kernels that are taken."""
        covered = {place for part, _ in self.taken for place in places_of(part)}
        return tuple(wanted and place not in covered for place, wanted in enumerate(self._wanted_places()))

    @property
    def requested(self) -> bool:
        """Whether kernels were asked for."""
        return bool(self._futures)

    @property
    def measuring(self) -> bool:
        """Whether kernels are there and the choice is not yet made."""
        return bool(self._ready)

    # -- what comes before a choice -----------------------------------------------------------------------------

    def _advance(self, results: Results) -> None:
        """After a call that PyTorch has computed: ask for kernels, or see whether they are there."""
        self._seen += 1
        if not self._parts:
            found = parts_of(self.signature, [None if each is None else form_of(each) for each in results])
            if isinstance(found, str) or not found:
                self._decide({"": found if isinstance(found, str) else "only the bias's gradient is asked for"}, ())
                return
            self._parts = found
        if not self._futures:
            if self._seen < 2 and not self._policy.wait:  # a shape that is seen once is not worth compiling
                return
            self._request(build=True)
        if self._policy.wait:
            for future in self._futures:
                future.exception()
        self._settle()

    def _request(self, build: bool) -> None:
        self._futures = tuple(self._kernels.request(part.job, build) for part in self._parts)

    def _settle(self) -> None:
        """See which kernels there are; decide where nothing is left to be measured."""
        if not all(future.done() for future in self._futures):
            return
        ready = []
        for part, future in zip(self._parts, self._futures, strict=True):
            error = future.exception()
            if error is None:
                ready.append((part, future.result()))
                continue
            self.reasons[part.name] = str(error)
            if isinstance(error, SetupError):
                warn_once("tvm_convgrad.torch", str(error))
        if self._kernels.kept.problem:
            warn_once("tvm_convgrad.torch", self._kernels.kept.problem)
        if not ready:
            self._decide(self.reasons, ())
        elif self._policy.always:
            self._decide(self.reasons | {part.name: "kernels are always taken" for part, _ in ready}, tuple(ready))
        elif self._kept is not None:
            self._take(tuple(ready), self._kept)
        else:
            names = [part.name for part in self._parts]
            self._turns = Turns(names, [part.name for part, _ in ready], self.signature.threads)
            self._ready = tuple(ready)

    def _turn(self, tensors: dict[str, Tensor | None], own: Own) -> Results:
        """A call in the turns of PyTorch and the kernels; after the last one the choice is made."""
        turns = self._turns
        assert turns is not None
        kind, seconds = turns.kind, 0.0
        results: list[Tensor | None] = [None, None, None]
        rest = list(self._wanted_places())

        def add(places: Sequence[int], found: Sequence[Tensor | None]) -> None:
            for place, each in zip(places, found, strict=True):
                results[place], rest[place] = each, False

        def by_pytorch(places: Sequence[int]) -> None:
            answer = own([number in places for number in range(3)])
            add(places, [answer[place] for place in places])

        def by_kernel(part: Part, kernel: Kernel) -> None:
            add(places_of(part), self._compute(part, kernel, tensors))

        if kind == KERNEL:
            for part, kernel in self._ready:
                seconds += turns.timed(kind, part.name, partial(by_kernel, part, kernel))
        elif kind == APART:
            for part in self._parts:
                seconds += turns.timed(kind, part.name, partial(by_pytorch, places_of(part)))
        else:
            seconds += turns.timed(kind, "", partial(by_pytorch, [place for place in range(3) if rest[place]]))
        if kind == APART:
            turns.timed(kind, "", lambda: _complete(results, rest, tensors, own))
        else:
            _complete(results, rest, tensors, own)
        tally = self.by_kernels if kind == KERNEL else self.by_pytorch
        tally.seconds += seconds
        tally.calls += 1
        if turns.finished:
            best = turns.best()
            self._take(self._ready, best)
            self._keep(best)
        return tuple(results)

    def _take(self, ready: tuple[tuple[Part, Kernel], ...], best: Best) -> None:
        """Choose by the seconds of kernels and PyTorch."""
        known = [(part, kernel) for part, kernel in ready if part.name in best.kernels]
        reasons = {part.name: best.why(part.name) for part, _ in known}
        taken = best.taken
        self._decide(self.reasons | reasons, tuple((part, kernel) for part, kernel in known if part.name in taken))

    def _decide(self, reasons: dict[str, str], taken: tuple[tuple[Part, Kernel], ...]) -> None:
        self.reasons, self.taken, self._ready = reasons, taken, ()
        if taken and not any(self.rest):
            self.direct = self._without_detours()
        self.decided = True

    def _without_detours(self) -> Direct:
        """The calls of all taken kernels in one function, as each of its steps counts in microseconds."""
        names = BACKWARD_NAMES if self.signature.grad is not None else FORWARD_NAMES
        dtype = getattr(torch, self.signature.data.dtype)
        threads, tally, empty, clock = self.signature.threads, self.by_kernels, torch.empty_strided, time.perf_counter
        steps = []
        for part, kernel in self.taken:
            places = [names.index(name) for name in part.operands]
            third = places[2] if len(places) > 2 else -1
            steps.append((kernel.run, places[0], places[1], third, PLACES[part.name], part))

        def compute(*tensors: Tensor) -> Results:
            begin = clock()
            results: list[Tensor | None] = [None, None, None]
            for run, first, second, third, place, part in steps:
                form = part.result
                results[place] = result = empty(form.shape, form.strides, dtype=dtype)
                one, other = tensors[first].data_ptr(), tensors[second].data_ptr()
                if part.with_bias:
                    results[2] = bias = empty(form.shape[:1], (1,), dtype=dtype)
                    run(threads, one, other, result.data_ptr(), bias.data_ptr())
                elif third >= 0:
                    run(threads, one, other, tensors[third].data_ptr(), result.data_ptr())
                else:
                    run(threads, one, other, result.data_ptr())
            tally.calls += 1
            tally.seconds += clock() - begin
            return tuple(results)

        return compute

    # -- the choice on disk -------------------------------------------------------------------------------------

    def _key(self) -> str:
        return digest(["choice", _FORMAT, asdict(self.signature), str(torch.__version__)])

    def _keep(self, best: Best) -> None:
        results = {part.name: [part.result.shape, part.result.strides] for part in self._parts}
        content = json.dumps({"results": results, "best": asdict(best)})
        self._kernels.kept.put(self._key(), content.encode())

    def _recall(self) -> None:
        """Take a choice that was kept; its kernels are loaded if they are kept, too."""
        content = self._kernels.kept.get(self._key())
        if content is None:
            return
        words = json.loads(content)
        forms: list[Form | None] = [None, None, None]
        for name, (shape, strides) in words["results"].items():
            forms[PLACES[name]] = Form(tuple(shape), tuple(strides), self.signature.data.dtype)
        found = parts_of(self.signature, forms)
        if isinstance(found, str):
            return
        self._parts, self._kept = found, Best(**words["best"])
        self._request(build=False)
        if any(future.exception() is not None for future in self._futures if future.done()):
            self._futures = ()  # they were removed from the store: the next calls have them compiled
            return
        self._settle()

    # -- computing ----------------------------------------------------------------------------------------------

    def _mixed(self, tensors: dict[str, Tensor | None], own: Own) -> Results:
        """The results, of kernels where they are taken."""
        results: list[Tensor | None] = [None, None, None]
        rest = list(self._wanted_places())
        for part, kernel in self.taken:
            for place, each in zip(places_of(part), self._compute(part, kernel, tensors), strict=True):
                results[place], rest[place] = each, False
        _complete(results, rest, tensors, own)
        return tuple(results)

    def _wanted_places(self) -> tuple[bool, ...]:
        return (True, False, False) if self.signature.grad is None else self.signature.wanted

    def _compute(self, part: Part, kernel: Kernel, tensors: dict[str, Tensor | None]) -> list[Tensor]:
        """What a kernel gives: the result, and the gradient of the bias."""
        operands = [tensors[name] for name in part.operands]
        first = operands[0]
        assert first is not None
        results = [torch.empty_strided(part.result.shape, part.result.strides, dtype=first.dtype)]
        if part.with_bias:
            results.append(torch.empty(part.result.shape[0], dtype=first.dtype))
        kernel.run(
            self.signature.threads,
            *(each.data_ptr() for each in operands if each is not None),
            *(each.data_ptr() for each in results),
        )
        return results

    def _count(self, tally: Tally, begin: float) -> None:
        tally.calls += 1
        tally.seconds += time.perf_counter() - begin


PLACES = {"result": 0, "data": 0, "weight": 1}
"""Where a result stands among those of the operator, by the name of its part."""


def places_of(part: Part) -> tuple[int, ...]:
    """Where a part's results stand among those of the operator."""
    return (1, 2) if part.with_bias else (PLACES[part.name],)


def _complete(results: list[Tensor | None], rest: list[bool], tensors: dict[str, Tensor | None], own: Own) -> None:
    """Add what kernels have not given. The bias's gradient alone is a sum: PyTorch's operator computes the weight's."""
    if rest[2] and not rest[1]:
        grad = tensors["grad"]
        assert grad is not None
        results[2], rest[2] = grad.sum((0, *range(2, grad.dim()))), False
    if any(rest):
        for place, each in enumerate(own(rest)):
            if rest[place]:
                results[place] = each


def form_of(tensor: Tensor) -> Form:
    """A tensor without its data."""
    return Form(tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """TVM's name of an element type."""
    return str(dtype).rpartition(".")[2]


__all__ = [
    "BACKWARD_NAMES",
    "FORWARD_NAMES",
    "PLACES",
    "Own",
    "Plan",
    "Policy",
    "Results",
    "Tally",
    "dtype_name",
    "form_of",
    "places_of",
]
