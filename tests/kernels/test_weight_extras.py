# SPDX-License-Identifier: Apache-2.0
"""wgrad with a bias gradient in the same pass, added to what dW holds, and for a batch known only at run time."""

from dataclasses import replace

import numpy as np
import pytest
import tvm

from tests.kernels.harness import NATIVE, ZONE, _zoned, compiled
from tests.threads import run_with_threads
from tvm_convgrad.codegen.hardware import CPUS, machine_of
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import kernel_named
from tvm_convgrad.kernels.wgrad.spec import WgradTiling
from tvm_convgrad.verify.interpreter import execute

SHAPES = [
    "mb5ic40ih11iw9oc37oh11ow9kh3kw3ph1pw1",
    "mb2ic40ih8iw8oc24oh8ow8kh1kw1",
    "mb3ic33ih9iw9oc24oh5ow5kh1kw1sh2sw2",
    "g2mb3ic36ih7iw7oc42oh7ow7kh3kw3ph1pw1",
    "mb2ic9id5ih6iw7oc17od5oh6ow7kd3kh3kw3pd1ph1pw1",
    "mb4ic3ih21iw19oc21oh11ow10kh7kw7sh2sw2ph3pw3",
    "mb2ic64ih24iw24oc48oh24ow24kh3kw3ph1pw1",
    "mb2ic18ih9iw11oc20kh3kw3ph17pw5dh16dw4",  # two rows of taps read only padding
    "mb2ic8ih6iw7oc300oh6ow7kh1kw1",  # bias gradients of several vectors of channels at once
]
LAYOUTS = {"NCHW": None, "NHWC": "O{}I", "HWIO": "{}IO"}


def problem_of(text: str, layout: str) -> ConvProblem:
    problem = ConvProblem.from_descriptor(text)
    axes = problem.data_layout[2:]
    kernel = LAYOUTS[layout]
    return problem.with_layouts(f"N{axes}C", kernel.format(axes), f"N{axes}C") if kernel else problem


def built(problem: ConvProblem, epilogue: Epilogue, name: str | None = None):
    """The compiled kernel; for any batch if it has a name."""
    target = tvm.target.Target(NATIVE)
    machine = machine_of(target)
    asked = replace(problem, batch=name) if name else problem
    choice = chooser.choose(asked, "backward_weight", machine)
    assert choice.name == "implicit GEMM wgrad"
    function = chooser.build(asked, "backward_weight", machine, choice, "main", epilogue)
    return compiled(function, target)


def check(problem: ConvProblem, library, epilogue: Epilogue) -> None:
    """Equal to float64 on small integers, nothing around the results touched."""
    operands, wanted = numbers_of(problem, "backward_weight", 0)
    wanted = [wanted]
    if epilogue.bias_grad:
        axes = tuple(i for i, letter in enumerate(problem.grad_layout) if letter != "C")
        wanted.append(operands[0].astype("float64").sum(axes).astype(wanted[0].dtype))
    before = [np.full_like(w, np.nan) for w in wanted]
    if epilogue.accumulate:
        before[0][...] = 3
        wanted[0] = wanted[0] + 3
    if epilogue.bias_accumulate:
        before[1][...] = 2
        wanted[1] = wanted[1] + 2
    zones = [_zoned(array, 77.0) for array in before]
    library["main"](*(_zoned(array, np.nan)[1] for array in operands), *(result for _, result in zones))
    for (zone, _), right in zip(zones, wanted, strict=True):
        np.testing.assert_array_equal(zone[ZONE : ZONE + right.size].reshape(right.shape), right)
        assert (zone[:ZONE] == 77.0).all()
        assert (zone[ZONE + right.size :] == 77.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", SHAPES)
def test_bias_gradient_and_accumulation(text, layout):
    problem = problem_of(text, layout)
    epilogue = Epilogue(accumulate=True, bias_grad=True, bias_accumulate=True)
    check(problem, built(problem, epilogue), epilogue)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_types(dtype):
    for layout in LAYOUTS:
        problem = problem_of(SHAPES[0], layout).with_dtypes(dtype, dtype, dtype)
        epilogue = Epilogue(bias_grad=True, accumulate=True, bias_accumulate=dtype == "float16")
        check(problem, built(problem, epilogue), epilogue)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", SHAPES[1::2])
@pytest.mark.parametrize("changes", [{}, {"scalars_packed": True}, {"transposed": True}], ids=str)
def test_vectors_of_float16_are_converted_in_registers(text, layout, changes):
    """Panels of X and dY, im2col rows and vectors of dW; without a pass over dY if it is packed."""
    problem = problem_of(text, layout).with_dtypes("float16", "float16", "float16")
    machine = CPUS["AVX-512"]
    kernel = kernel_named("implicit GEMM", "backward_weight")
    plan = kernel.plan(problem, "backward_weight", machine)
    if changes:
        plan = replace(plan, tilings=(replace(WgradTiling(3, 1, 3, 1, 2, 1, parallel=False), **changes),))
    if kernel.invalid(problem, "backward_weight", plan, machine):
        pytest.skip("not for this problem")
    function = kernel.emit(problem, "backward_weight", plan, machine, "main", NO_EPILOGUE)
    code = str(function)
    assert "float16x16" in code
    assert "grad_sums" not in code or not plan.tilings[0].scalars_packed
    operands, wanted = numbers_of(problem, "backward_weight", 0)
    result = np.full_like(wanted, np.nan)
    assert execute(function, [*map(np.ascontiguousarray, operands), result]) == ""
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", SHAPES)
def test_one_kernel_for_every_batch(text, layout):
    problem = problem_of(text, layout)
    epilogue = Epilogue(bias_grad=True)
    library = built(problem, epilogue, "n")
    for batch in (1, 2, 3, 8, 11):
        check(replace(problem, batch=batch), library, epilogue)


def test_empty_batch_gives_zeros():
    problem = problem_of(SHAPES[1], "NCHW")
    library = built(problem, Epilogue(bias_grad=True), "n")
    operands = (problem.grad_shape, problem.data_shape)
    empty = [tvm.runtime.tensor(np.zeros((0, *shape[1:]), "float32")) for shape in operands]
    shapes = (problem.weight_shape, (problem.out_channels,))
    results = [tvm.runtime.tensor(np.full(shape, np.nan, "float32")) for shape in shapes]
    library["main"](*empty, *results)
    assert all((result.numpy() == 0).all() for result in results)


def test_what_is_not_covered_is_refused():
    machine = machine_of(tvm.target.Target(NATIVE))
    problem = problem_of(SHAPES[0], "NCHW")
    choice = chooser.choose(problem, "backward_weight", machine)
    with pytest.raises(UnsupportedError, match="relu"):
        chooser.build(problem, "backward_weight", machine, choice, "main", Epilogue(relu=True))
    inside = replace(problem.with_layouts("CNHW", "OIHW", "NCHW"), batch="n")
    choice = chooser.choose(inside, "backward_weight", machine)
    assert not choice.is_kernel
    assert "outermost" in choice.reason


PROGRAM = """
import numpy as np, tvm
from tests.kernels.test_weight_extras import SHAPES, built, problem_of
from tests.threads import check_same_bits
from tvm_convgrad.kernels.epilogue import Epilogue
for layout in ("NCHW", "NHWC"):
    for name in (None, "n"):
        problem = problem_of(SHAPES[-1], layout)
        adds = name is None
        library = built(problem, Epilogue(accumulate=adds, bias_grad=True, bias_accumulate=adds), name)
        rng = np.random.default_rng(0)
        numbers = (rng.standard_normal(s).astype("float32") for s in (problem.grad_shape, problem.data_shape))
        operands = [tvm.runtime.tensor(array) for array in numbers]
        start = 0.5 if adds else np.nan
        def run():
            blanks = (np.full(s, start, "float32") for s in (problem.weight_shape, (problem.out_channels,)))
            results = [tvm.runtime.tensor(array) for array in blanks]
            library["main"](*operands, *results)
            assert not any(np.isnan(r.numpy()).any() for r in results)
            return [r.numpy() for r in results]
        check_same_bits(run)
"""


def test_threads_do_not_change_bits():
    run_with_threads(PROGRAM, checks=4)
