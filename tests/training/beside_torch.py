# SPDX-License-Identifier: Apache-2.0
"""A step trained beside the PyTorch module that it was made of."""

from __future__ import annotations

import torch

from tests.training.harness import relative_error


def train_beside(runner, reference, batches, rate):
    """A step of SGD for each (samples, classes), by the runner and by a module in float64: equal losses and scores."""
    optimizer = torch.optim.SGD(reference.parameters(), lr=rate)
    for samples, classes in batches:
        found, scores = runner.step(samples.numpy(), classes.numpy(), lr=rate)
        optimizer.zero_grad()
        expected = reference(samples.double())
        loss = torch.nn.functional.cross_entropy(expected, classes)
        loss.backward()
        optimizer.step()
        assert abs(found - loss.item()) < 1e-5
        assert relative_error(scores, expected.detach().numpy()) < 1e-5
