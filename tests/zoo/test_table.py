# SPDX-License-Identifier: Apache-2.0
"""The zoo's table is read again as it was written, so that a later run can be merged into it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.zoo


def test_a_table_is_read_as_it_was_written() -> None:
    from benchmarks.zoo.case import Outcome
    from benchmarks.zoo.table import document, read

    outcomes = [
        Outcome("own:a", "train", "right", "", 1_250_000, 3e-6, 1e-6, 1, 8, 12.0, 0.025, 0.05, 2.0, 60, 100),
        Outcome("own:a", "onnx", "refused", "Pad | 'x' has mode foo; use reflect.", 1_250_000),
        Outcome("own:b", "eval", "not exported", "no such operator"),
        Outcome("own:b", "train", "imported", "", 20_000, build_seconds=3.0),
    ]
    text = document(outcomes, "command", 6)
    assert "4 of 6 cases have been tried" in text
    found = read(text)
    assert [(each.name, each.form, each.result, each.reason) for each in found] == [
        (each.name, each.form, each.result, each.reason) for each in outcomes
    ]
    assert [each.parameters for each in found] == [1_250_000, 1_250_000, 0, 20_000]
    assert document(found, "command", 6) == text
