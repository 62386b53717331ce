# SPDX-License-Identifier: Apache-2.0
"""ONNX's own tests of single operators: what is imported predicts what they state, all else is refused in a sentence.

One case in `EVERY` runs; with CONVGRAD_ALL_NODES=1 all of them, about 1,000 in four minutes. Of each the first tensor
of floats, plus a parameter that is 0, is the input, and the others are constants.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

onnx = pytest.importorskip("onnx")

from onnx import helper, numpy_helper  # noqa: E402
from onnx.backend.test.case.node import collect_testcases  # noqa: E402

from tests.linked import quick_module  # noqa: E402
from tvm_convgrad.core.errors import ConvGradError  # noqa: E402
from tvm_convgrad.training.frontends import load_model  # noqa: E402
from tvm_convgrad.training.step.options import StepOptions  # noqa: E402
from tvm_convgrad.training.step.predictor import build_predictor  # noqa: E402

EVERY = 1 if os.environ.get("CONVGRAD_ALL_NODES") else 16

OTHERWISE = {
    "test_batchnorm_epsilon_training_mode": "predictions are by running statistics",
    "test_batchnorm_example_training_mode": "predictions are by running statistics",
    "test_resize_downsample_scales_cubic_align_corners": "the result's extent is a whole number, as in ONNX Runtime",
    "test_resize_downsample_scales_linear_align_corners": "the result's extent is a whole number, as in ONNX Runtime",
}
"""Cases whose results are others by design, and why."""


def drawn_cases(drawn: Callable[[str], bool]) -> Iterator[tuple[Any, list[int]]]:
    """The cases of drawn names of arrays alone, whose first result is of floats, and the numbers of such operands."""
    for case in collect_testcases(None):
        if case.model is None or not case.data_sets or not drawn(case.name):
            continue
        operands, results = case.data_sets[0]
        plain = len(operands) == len(case.model.graph.input) and all(isinstance(each, np.ndarray) for each in operands)
        if not plain or not isinstance(results[0], np.ndarray) or results[0].dtype != np.float32 or not results[0].ndim:
            continue
        yield case, [n for n, each in enumerate(operands) if each.dtype == np.float32 and each.size * each.ndim]


def is_drawn(name: str, every: int) -> bool:
    """Whether a case is one of the `every`th part."""
    return zlib.crc32(name.encode()) % every == 0


def cases() -> list[tuple[Any, int]]:
    """Each case with a tensor of floats for its input, and that tensor's number."""
    found = drawn_cases(lambda name: is_drawn(name, EVERY) and name not in OTHERWISE)
    return [(case, numbers[0]) for case, numbers in found if numbers]


def with_one_input(case: Any, number: int, *, full: bool = False) -> Any:
    """The model of a case with its first result, as a function of one operand and a parameter, `full` of its shape."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph, operands = model.graph, case.data_sets[0][0]
    name, shape = graph.input[number].name, operands[number].shape
    values = {each.name: value for each, value in zip(graph.input, operands, strict=True) if each.name != name}
    graph.initializer.extend(numpy_helper.from_array(np.ascontiguousarray(v), key) for key, v in values.items())
    graph.initializer.append(
        numpy_helper.from_array(np.zeros(shape if full else [1] * len(shape), "float32"), "a parameter")
    )
    nodes, result = list(graph.node), graph.output[0]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.input.append(helper.make_tensor_value_info("the input", onnx.TensorProto.FLOAT, shape))
    graph.node.extend([helper.make_node("Add", ["the input", "a parameter"], [name]), *nodes])
    graph.output.append(result)
    return model


def predicted(model: Any, operand: np.ndarray, file: Path) -> np.ndarray | None:
    """The predictions; None where the model is refused."""
    onnx.save(model, file)
    try:
        loaded = load_model(str(file))
        module = build_predictor(loaded, {**loaded.parameters, **loaded.states}, StepOptions()).module
    except ConvGradError:
        return None
    return quick_module(module)["predict"](tvm.runtime.tensor(operand)).numpy()


def test_results_are_those_of_onnx(tmp_path: Path) -> None:
    taken, faults = 0, {}
    for case, number in (found := cases()):
        operands, (wanted, *_) = case.data_sets[0]
        try:
            result = predicted(with_one_input(case, number), operands[number], tmp_path / "case.onnx")
            if result is None:
                continue
            taken += 1
            finite = np.abs(wanted[np.isfinite(wanted)])
            scale = max(float(finite.max(initial=0.0)), 1.0)
            np.testing.assert_allclose(result / scale, wanted / scale, rtol=case.rtol / 10, atol=2.0**-15)
        except Exception as error:  # of every kind: all of them are reported
            faults[case.name] = f"{type(error).__name__}: {error}"
    assert faults == {}
    assert taken > 0.7 * len(found) > 30
