# SPDX-License-Identifier: Apache-2.0
"""The planted faults fit the code as it is; the two that need fewest cases are found."""

from __future__ import annotations

import pytest

from tests.fuzzing.plants import PLANTS, ROOT, cases_until_found


@pytest.mark.parametrize("fault", PLANTS, ids=lambda fault: fault.name)
def test_the_code_has_what_is_replaced(fault):
    text = (ROOT / "tvm_convgrad" / fault.file).read_text()
    assert text.count(fault.right) == 1
    assert fault.wrong != fault.right


def test_a_planted_fault_is_found():
    fault = next(fault for fault in PLANTS if "stale accumulator" in fault.name)
    assert cases_until_found(fault, 400, 20261122) is not None
