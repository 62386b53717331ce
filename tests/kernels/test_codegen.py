# SPDX-License-Identifier: Apache-2.0
"""The TIR builder: the example of its docstring runs."""

import textwrap

import numpy as np
import pytest
import tvm
from tvm import tirx

from tvm_convgrad import codegen
from tvm_convgrad.codegen import loops as builder


@pytest.mark.parametrize("n", [5, 32, 37])
def test_the_example_of_the_docstring(n):
    _, _, example = codegen.__doc__.partition("on all cores:\n")
    names = {**vars(builder), "tirx": tirx, "n": n}
    exec(textwrap.dedent(example), names)
    module = tvm.compile(tvm.IRModule({"add_one": names["function"]}), "llvm")
    x = tvm.runtime.tensor(np.arange(n, dtype="float32"))
    y = tvm.runtime.tensor(np.full(n, np.nan, "float32"))
    module["add_one"](x, y)
    np.testing.assert_array_equal(y.numpy(), x.numpy() + 1)
