# SPDX-License-Identifier: Apache-2.0
"""README's program for Relay runs."""

from __future__ import annotations

from tests.readme import execute, sections
from tests.relay_ops.harness import calls


def test_the_program_of_readme() -> None:
    names: dict[str, object] = {}
    (program,) = sections()["In Relay"].python
    execute(program, names)
    assert names["library"] is not None
    (weight,) = calls(names["step"], "nn.conv2d_backward_weight")
    assert weight.attrs.data_layout == "NHWC"
