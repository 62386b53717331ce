# SPDX-License-Identifier: Apache-2.0
"""The examples in the documentation of the public functions run."""

from __future__ import annotations

import doctest

import pytest

pytest.importorskip("jax")
patching = pytest.importorskip("tvm_convgrad.jax.patching")


@pytest.mark.parametrize("name", ["conv_general_dilated", "patch"])
def test_examples_of_functions(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(patching, name), name, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
