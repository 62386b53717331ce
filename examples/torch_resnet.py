# SPDX-License-Identifier: Apache-2.0
"""Trains a small ResNet in plain PyTorch on scikit-learn's handwritten digits, with this package's kernels under it.

    python examples/torch_resnet.py [--epochs N] [--without] [--require-accuracy 0.97]

The training loop is PyTorch's own; `tvm_convgrad.torch.enable()` is the only line of ours. `--without` leaves it out.
Needs the extras torch and demo: pip install 'tvm-convgrad[torch,demo]'.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

import tvm_convgrad.torch


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(into, out, 1, stride, bias=False) if (into, stride) != (out, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--without", action="store_true", help="let PyTorch compute all by itself")
    parser.add_argument("--require-accuracy", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
    split = train_test_split(images, torch.tensor(digits.target), test_size=0.2, random_state=0, stratify=digits.target)
    x_train, x_test, y_train, y_test = split
    model = resnet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    if not options.without:
        tvm_convgrad.torch.enable()

    for epoch in range(options.epochs):
        begin, total = time.perf_counter(), 0.0
        order = torch.randperm(len(x_train))
        batches = order.split(options.batch)[: len(order) // options.batch]
        model.train()
        for batch in batches:
            x = x_train[batch].contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(x), y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step()
        print(f"epoch {epoch}: loss {total / len(batches):.4f}, {time.perf_counter() - begin:.2f} s")

    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(f"test accuracy {accuracy:.4f}")
    print(tvm_convgrad.torch.stats())
    for told in tvm_convgrad.torch.explain():
        print(told)
    if accuracy < options.require_accuracy:
        sys.exit(f"the test accuracy is below {options.require_accuracy}")


if __name__ == "__main__":
    main()
