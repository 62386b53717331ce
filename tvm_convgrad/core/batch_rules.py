# SPDX-License-Identifier: Apache-2.0
"""The batching table: vmap of each direction of the convolution as one unbatched call of the same.

A convolution is bilinear, so a batch axis b that only one operand has goes where that operand's own axis survives (N,
or the channels that are not summed over), and one that both have becomes groups, which never mix. Patterns are
those of legalize.rearrange, in canonical layouts: g is `groups`, c all channels of a tensor, o and i a group's output
and input channels, `...` the spatial axes; so one table serves all ranks, and layouts are permutations of its patterns.
torch's functorch has the same rules in C++ (BatchRulesConvolution.cpp). A transposed convolution is dgrad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Direction


@dataclass(frozen=True)
class BatchRule:
    """How one direction takes one combination of batched operands.

    Attributes:
        folds: for each batched operand, the pattern that folds b into its own axes; the others stay as they are.
        result: the pattern that takes b out of the result again.
        into: what b becomes part of: "N", "channels", or "groups" (the call then has b times as many).
    """

    folds: Mapping[str, str]
    result: str
    into: str


def _rule(into: str, result: str, **folds: str) -> BatchRule:
    return BatchRule(MappingProxyType(folds), result, into)


RULES: Mapping[tuple[str, tuple[str, ...]], BatchRule] = MappingProxyType(
    {
        # Y = conv(X, W)
        (FORWARD.name, ("data",)): _rule(
            "N",
            data="b n c ... -> (b n) c ...",
            result="(b n) c ... -> b n c ...",
        ),
        (FORWARD.name, ("weight",)): _rule(
            "channels",
            weight="b (g o) i ... -> (g b o) i ...",
            result="n (g b o) ... -> b n (g o) ...",
        ),
        (FORWARD.name, ("data", "weight")): _rule(
            "groups",
            data="b n c ... -> n (b c) ...",
            weight="b c i ... -> (b c) i ...",
            result="n (b c) ... -> b n c ...",
        ),
        # dW = wgrad(dY, X)
        (BACKWARD_WEIGHT.name, ("grad",)): _rule(
            "channels",
            grad="b n (g o) ... -> n (g b o) ...",
            result="(g b o) i ... -> b (g o) i ...",
        ),
        (BACKWARD_WEIGHT.name, ("data",)): _rule(
            "channels",
            data="b n (g i) ... -> n (g b i) ...",
            result="c (b i) ... -> b c i ...",
        ),
        (BACKWARD_WEIGHT.name, ("grad", "data")): _rule(
            "groups",
            grad="b n c ... -> n (b c) ...",
            data="b n c ... -> n (b c) ...",
            result="(b c) i ... -> b c i ...",
        ),
        # dX = dgrad(dY, W)
        (BACKWARD_DATA.name, ("grad",)): _rule(
            "N",
            grad="b n c ... -> (b n) c ...",
            result="(b n) c ... -> b n c ...",
        ),
        (BACKWARD_DATA.name, ("weight",)): _rule(
            "channels",
            weight="b c i ... -> c (b i) ...",
            result="n (g b i) ... -> b n (g i) ...",
        ),
        (BACKWARD_DATA.name, ("grad", "weight")): _rule(
            "groups",
            grad="b n c ... -> n (b c) ...",
            weight="b c i ... -> (b c) i ...",
            result="n (b c) ... -> b n c ...",
        ),
    }
)
"""Rules by direction and batched operands, these in the direction's order."""


def rule_of(direction: Direction, batched: frozenset[str]) -> BatchRule:
    """The rule for a direction whose operands `batched` (at least one) have the batch axis."""
    return RULES[direction.name, tuple(operand for operand in direction.operands if operand in batched)]
