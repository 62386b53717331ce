# SPDX-License-Identifier: Apache-2.0
"""A `torch.autograd.Function` in a model: the import warns that torch.export does not keep its backward."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tvm_convgrad.training.frontends.torch_export.model import load_pt2  # noqa: E402


class Straight(torch.autograd.Function):
    """A sign, whose gradient is that of the identity."""

    @staticmethod
    def forward(_context, x):
        sign = x.sign()
        return sign * 1.0

    @staticmethod
    def backward(_context, gradient):
        return gradient


class Binary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.apply(lambda part: None)

    def forward(self, x):
        x = Straight.apply(self.first(x))
        return self.second(
            Straight.apply(
                x + 1,
            )
        )


class Repeated(Binary):
    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=True))


def warnings_of(model, path, strict):
    torch.export.save(torch.export.export(model, (torch.randn(2, 4),), strict=strict), path)
    return load_pt2(path, None).warnings


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_each_line_with_a_function_is_named(strict, tmp_path):
    found = warnings_of(Binary(), tmp_path / "model.pt2", strict)
    lines = Path(__file__).read_text().splitlines()
    first, second = (
        number
        for number, line in enumerate(lines, 1)
        if line.strip().startswith(("x = Straight.apply(", "Straight.apply("))
    )
    assert [warning.partition(" calls ")[0] for warning in found] == [
        f"{Path(__file__).name}:{first}: x = Straight.apply(self.first(x))",
        f"{Path(__file__).name}:{second}: Straight.apply(",
    ]
    assert all(("strict=False" if strict else "forward is differentiated") in warning for warning in found)


def test_checkpoints_are_no_such_functions(tmp_path):
    assert warnings_of(Repeated(), tmp_path / "model.pt2", strict=False) == ()
