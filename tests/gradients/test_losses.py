# SPDX-License-Identifier: Apache-2.0
"""Gradients of losses and of what stands before them: softmax, log_softmax, matmul; symbolic batch throughout."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradients.harness import batch, check, gradients, integers, relax, sample

op = relax.op


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_nll_loss(reduction, ignored, weighted):
    """Weights get a gradient too; targets equal to ignore_index take no part, even where they are not classes."""
    functional = pytest.importorskip("torch").nn.functional
    targets = np.array([[1, 3, 0], [2, ignored, 1]], "int64")
    arrays = [sample(2, 4, 3), targets, *([sample(4, positive=True)] if weighted else [])]

    def build(_, p, t, w=None):
        return op.nn.nll_loss(p, t, w, reduction, ignored)

    def oracle(p, t, w=None):
        if w is None:
            return functional.nll_loss(p, t, None, reduction=reduction, ignore_index=ignored)
        # torch has no gradient in the weights: written out.
        picked = -p.gather(1, t.clamp(min=0)[:, None])[:, 0]
        counted = w[t.clamp(min=0)] * (t != ignored)
        loss = picked * counted
        return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counted.sum()}[reduction]

    check(build, oracle, arrays, symbolic={(0, 0): "n", (1, 0): "n"}, terms=32)


def test_nll_loss_without_a_batch():
    functional = pytest.importorskip("torch").nn.functional
    check(
        lambda _, p, t: op.nn.nll_loss(p, t),
        functional.nll_loss,
        [sample(5), np.array(3, "int64")],
    )


def test_cross_entropy_with_logits():
    arrays = [sample(4, 5), sample(4, 5, seed=1)]
    check(
        lambda _, x, y: op.nn.cross_entropy_with_logits(x, y),
        lambda x, y: -(x * y).sum() / x.shape[0],
        arrays,
        symbolic=batch(arrays),
        numeric=True,
        terms=20,
    )


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name):
    torch = pytest.importorskip("torch")
    arrays = [sample(3, 6, 4)]
    check(
        lambda _, x: getattr(op.nn, name)(x, 1),
        lambda x: getattr(torch, name)(x, 1),
        arrays,
        symbolic=batch(arrays, {0: "n", 2: "w"}),
        terms=12,
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (2, 4, 3)),
        ((2, 3, 4), (4,)),
        ((4,), (4,)),
    ],
    ids=str,
)
def test_matmul(a, b):
    torch = pytest.importorskip("torch")
    arrays = [integers(*a), integers(*b, seed=1)]
    symbolic = {(0, 0): "n"} if len(a) > 1 else {}
    check(lambda _, x, y: op.matmul(x, y), torch.matmul, arrays, symbolic=symbolic, exact=True)


def test_matmul_of_float16_into_float32():
    arrays = [integers(3, 4).astype("float16"), integers(4, 5, seed=1).astype("float16")]
    check(
        lambda _, x, y: op.matmul(x, y, out_dtype="float32"),
        lambda x, y: x @ y,
        arrays,
        numeric=True,
        dtype="float16",
    )
    found, _ = gradients(lambda _, x, y: op.matmul(x, y, out_dtype="float32"), arrays)
    assert [f.dtype for f in found] == [np.float16, np.float16]
