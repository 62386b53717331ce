# SPDX-License-Identifier: Apache-2.0
"""The different convolution calls of a training step: each as it was chosen, beside the framework's own.

From these and the step follows what a bridge can give at most: a step without convolutions' time (Amdahl's law).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.bench.bridge_pairs import Pairs

SLOWER = 0.95
"""A call whose ratio is below this is slower than the framework's own by more than 5 %."""


@dataclass(frozen=True)
class CallMeasurement:
    """One convolution call, forward or a gradient, by itself.

    Attributes:
        call: its words, as in the bridge's `explain`.
        uses: how often a step has it.
        where: who computes it, as in `explain`.
        flop: of one call, padding counted as data.
        with_bridge, without: seconds of a call, medians; ratio: the median of the pairs' ratios; pairs: how many.
        processor_with, processor_without, processor_ratio: the same of processor time.
    """

    call: str
    uses: int
    where: str
    flop: int
    with_bridge: float
    without: float
    ratio: float
    pairs: int
    processor_with: float
    processor_without: float
    processor_ratio: float

    @staticmethod
    def of(call: str, uses: int, where: str, flop: int, pairs: Pairs) -> CallMeasurement:
        """The measurement of a call from its pairs."""
        (ours, own), (processor, processor_own) = pairs.seconds, pairs.processor
        return CallMeasurement(
            call=call,
            uses=uses,
            where=where,
            flop=flop,
            with_bridge=ours,
            without=own,
            ratio=pairs.ratio,
            pairs=len(pairs.without),
            processor_with=processor,
            processor_without=processor_own,
            processor_ratio=pairs.processor_ratio,
        )


@dataclass(frozen=True)
class Account:
    """Where the processor time of a step goes, by the sum of its calls.

    Attributes:
        share: the part of the framework's own step that is convolutions.
        speedup: processor time of its convolutions, the framework's / with the bridge.
        most: the ratio of processor times of a step if convolutions took no time at all.
        rate: FLOP/s of a core in convolutions with the bridge.
        own_rate: the same without.
        calls: different calls.
        slower, worst: those that are slower with the bridge by more than 5 %, and the lowest ratio, by time.
        processor_slower, processor_worst: the same by processor time.
    """

    share: float
    speedup: float
    most: float
    rate: float
    own_rate: float
    calls: int
    slower: int
    worst: float
    processor_slower: int
    processor_worst: float


def account(processor_without: float, calls: Sequence[CallMeasurement]) -> Account:
    """Where the processor time of a step goes.

    Args:
        processor_without: seconds of processor time of the framework's own step.
        calls: all of the step; at least one.
    """
    own = sum(each.uses * each.processor_without for each in calls)
    ours = sum(each.uses * each.processor_with for each in calls)
    flop = sum(each.uses * each.flop for each in calls)
    share = own / processor_without
    return Account(
        share=share,
        speedup=own / ours,
        most=1 / (1 - share) if share < 1 else float("inf"),
        rate=flop / ours,
        own_rate=flop / own,
        calls=len(calls),
        slower=sum(each.ratio < SLOWER for each in calls),
        worst=min(each.ratio for each in calls),
        processor_slower=sum(each.processor_ratio < SLOWER for each in calls),
        processor_worst=min(each.processor_ratio for each in calls),
    )


__all__ = ["SLOWER", "Account", "CallMeasurement", "account"]
