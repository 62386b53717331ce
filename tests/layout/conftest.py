# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder are of this package's rules for all operators, which TVM's passes use inside `rules()`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tvm_convgrad


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    with tvm_convgrad.rules():
        yield
