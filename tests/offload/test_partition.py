# SPDX-License-Identifier: Apache-2.0
"""Which parts of a program become calls of oneDNN, and that the program computes the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import tvm_convgrad
from relax_ops.program import directions_module
from relax_ops.single_run import quick_machine
from tests.relax.net import Net, module_of
from tests.relax.programs import tensor
from tvm_convgrad import evaluate, partition
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.partition import offload
from tvm_convgrad.offload.registry import names_for
from tvm_convgrad.op import conv2d_backward_weight

TARGET = tvm.target.Target("llvm")
NAMES = names_for(TARGET)
PROBLEMS = {
    "plain": ConvProblem.from_descriptor("mb3ic24ih9iw7oc40kh3kw3ph1pw1"),
    "channels last": ConvProblem.from_descriptor("mb3ic24ih9iw7oc40kh3kw3ph1pw1_lay=NHWC:OHWI:NHWC"),
    "depthwise": ConvProblem.from_descriptor("g24mb3ic24ih9iw7oc24kh3kw3ph1pw1"),
}
PLAIN = PROBLEMS["plain"]


def relu(net: Net, value: Any) -> Any:
    return net.emit(relax.op.nn.relu(value))


def forward(net: Net) -> list[Any]:
    return [relu(net, net.biased(net.forward()))]


def residual(net: Net) -> list[Any]:
    return [relu(net, net.biased(net.emit(relax.op.add(net.more, net.forward()))))]


def summed_data_gradient(net: Net) -> list[Any]:
    return [net.emit(relax.op.add(net.dgrad(), net.other))]


def summed_data_gradients(net: Net) -> list[Any]:
    return [net.emit(relax.op.add(net.dgrad(), net.dgrad(relu(net, net.grad))))]


def summed_weight_gradients(net: Net) -> list[Any]:
    return [net.emit(relax.op.add(net.wgrad(), net.wgrad(data=net.emit(relax.op.add(net.data, net.data)))))]


def weight_and_bias_gradient(net: Net) -> list[Any]:
    return [net.wgrad(), net.bias_gradient(net.grad)]


def summed_weight_and_bias_gradients(net: Net) -> list[Any]:
    (dw, db), grad = weight_and_bias_gradient(net), net.emit(relax.op.add(net.grad, net.grad))
    more = net.wgrad(grad)
    db_more = net.bias_gradient(grad)
    return [net.emit(relax.op.add(dw, more)), net.emit(relax.op.add(db, db_more))]


def read_twice(net: Net) -> list[Any]:
    y = net.forward()
    return [relu(net, y), y]


def three_weight_gradients(net: Net) -> list[Any]:
    grads = [net.grad, relu(net, net.grad), net.emit(relax.op.negative(net.grad))]
    first, second, third = (net.wgrad(grad) for grad in grads)
    return [net.emit(relax.op.add(net.emit(relax.op.add(first, second)), third))]


def summed_and_read(net: Net) -> list[Any]:
    """The summand is a result, too, and stays what it is."""
    first = net.wgrad()
    return [first, net.emit(relax.op.add(first, net.wgrad(relu(net, net.grad))))]


ALL_SUMS = ("accumulate", "bias_grad", "bias_accumulate")
BODIES: dict[Callable[[Net], list[Any]], tuple[list[tuple[str, ...]], int, list[str]]] = {
    forward: ([("bias",)], 0, ["relu"]),
    residual: ([("bias", "accumulate")], 0, ["relu"]),
    summed_data_gradient: ([("accumulate",)], 0, []),
    summed_data_gradients: ([("accumulate",), ()], 1, ["relu"]),
    summed_weight_gradients: ([("accumulate",), ()], 1, ["add"]),
    three_weight_gradients: ([("accumulate",), ("accumulate",), ()], 2, ["relu", "negative"]),
    summed_and_read: ([("accumulate",), ()], 0, ["relu"]),
    weight_and_bias_gradient: ([("bias_grad",)], 0, []),
    summed_weight_and_bias_gradients: ([ALL_SUMS, ("bias_grad",)], 1, ["add"]),
    read_twice: ([()], 0, ["relu"]),
}
"""What is fused into each call, how many are in place, and which operators are left; a sum's vector is a view."""


def operators(module: Any) -> list[str]:
    found = []
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, tvm.ir.Call):
                found.append(str(binding.value.op.name).removeprefix("relax.").removeprefix("nn."))
    return found


@pytest.mark.onednn
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_patterns(body: Callable[[Net], list[Any]], name: str) -> None:
    module, params = module_of(PROBLEMS[name], body)
    done = offload(module, NAMES, TARGET)
    fused, in_place, left = BODIES[body]
    assert sorted(entry.fused for entry in done.lowered) == sorted(fused)
    calls = operators(done.module)
    assert calls.count("call_tir_inplace") == in_place
    assert calls.count("call_dps_packed") == len(fused) - in_place
    assert [call for call in calls if not call.startswith("call_")] == left
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, [int(e) for e in param.ty.shape]).astype("float32") for param in params]
    results = []
    for program in (done.module, module):
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        results.append([value.numpy() for value in quick_machine(program, "llvm")["main"](*tensors)])
        for given, used in zip(arrays, tensors, strict=True):
            assert np.array_equal(used.numpy(), given)
    for found, wanted in zip(*results, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.onednn
def test_relu_after_a_call_keeps_nan() -> None:
    module, params = module_of(PROBLEMS["NCHW"] if "NCHW" in PROBLEMS else next(iter(PROBLEMS.values())), forward)
    done = offload(module, NAMES, TARGET)
    assert done.lowered
    arrays = [np.ones([int(e) for e in param.ty.shape], "float32") for param in params]
    for array in arrays:
        array.flat[0] = np.nan
    with tvm_convgrad.rules():  # whose relu keeps NaN, as a training step's does
        found, wanted = (
            quick_machine(program, "llvm")["main"](*map(tvm.runtime.tensor, arrays))[0].numpy()
            for program in (done.module, module)
        )
    assert np.isnan(wanted).any()
    assert np.array_equal(np.isnan(found), np.isnan(wanted))


@pytest.mark.onednn
def test_any_batch_in_place() -> None:
    n = tvm.tirx.Var("n", "int64")
    shapes = [(n, 8, 6, 6), (n, 8, 6, 6), (n, 4, 6, 6)]
    first, second, data = params = [tensor(name, shape) for name, shape in zip("abx", shapes, strict=True)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            grads = [
                builder.emit(conv2d_backward_weight(grad, data, kernel_size=3, padding=1)) for grad in (first, second)
            ]
            result = builder.emit_output(relax.op.add(*grads))
        builder.emit_func_output(result)
    module = builder.get()
    offloaded = partition(module, ["onednn"])
    assert operators(offloaded) == ["call_dps_packed", "call_tir_inplace"]
    machines = [quick_machine(program, "llvm") for program in (offloaded, module)]
    rng = np.random.default_rng(0)
    for batch in (1, 3):
        arrays = [rng.integers(-3, 4, (batch, *shape[1:])).astype("float32") for shape in shapes]
        found, wanted = (machine["main"](*map(tvm.runtime.tensor, arrays)).numpy() for machine in machines)
        assert np.array_equal(found, wanted)


@pytest.mark.onednn
def test_equal_calls_share_a_function() -> None:
    done = offload(
        module_of(PLAIN, lambda net: [net.forward(), net.forward(net.emit(relax.op.add(net.data, net.data)))])[0],
        NAMES,
        TARGET,
    )
    symbols = {
        str(binding.value.args[0].global_symbol)
        for block in done.module["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, tvm.ir.Call) and str(binding.value.op.name) == "relax.call_dps_packed"
    }
    assert len(done.lowered) == 2
    assert len(symbols) == 1


@pytest.mark.onednn
def test_evaluate() -> None:
    operands, wanted = numbers_of(PLAIN, "backward_data")
    shape = PLAIN.data_shape
    found = evaluate("conv2d_backward_data", *operands, data_shape=shape, padding=1, impl="onednn")
    assert np.array_equal(found, wanted)
    with pytest.raises(UnsupportedError, match=r"refused by onednn: types float64"):
        evaluate("conv2d", *(np.ones((1, 1, 1, 1)) for _ in range(2)), impl="onednn")


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no backend 'rocdnn'; there is onednn, cudnn, cutlass"):
        partition(module_of(PLAIN, forward)[0], ["rocdnn"])


def test_no_backends_and_unknown_targets_are_refused() -> None:
    module = tvm.IRModule()
    with pytest.raises(UnsupportedError, match=r"partition: backends = \[\] names none; name some of"):
        partition(module, [], "llvm")
    with pytest.raises(UnsupportedError, match="partition: target = 'sm_90' is not one of TVM"):
        partition(module, ["cudnn"], "sm_90")
    with pytest.raises(SetupError, match="the target is for aarch64-linux-gnu; its packages are for x86-64"):
        partition(module, ["onednn"], "aarch64-linux")


def test_a_backend_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_convgrad.offload.contract.installed_file", lambda package, file: None)
    with pytest.raises(SetupError, match=r"pip install 'tvm-convgrad\[onednn\]'"):
        partition(module_of(PLAIN, forward)[0], ["onednn"])
    done = offload(module_of(PLAIN, forward)[0], ("auto",), TARGET)  # never is one there
    assert not done.lowered
    assert all("pip install" in reasons["onednn"] for reasons in done.refused.values())


def test_modules_without_convolutions_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_convgrad.offload.onednn.backend.OneDnn.unavailable", lambda self, target: "")
    module, _ = module_of(PLAIN, lambda net: [relu(net, net.data)])
    assert tvm_ffi.structural_equal(partition(module, ["onednn"]), module)


@pytest.mark.onednn
def test_a_module_of_which_nothing_can_be_offloaded_is_an_error() -> None:
    problem = PLAIN.with_dtypes("float64", "float64", "float64")
    module = directions_module([("main", DIRECTIONS["forward"], problem)])
    with pytest.raises(
        UnsupportedError, match=r"no convolution can be; forward of .* refused by onednn: types float64"
    ):
        partition(module, ["onednn"])


PROGRAM = """
import sys
import numpy as np, tvm
from tvm import relax
machine = relax.VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
arrays = np.load(sys.argv[2])
found = machine["main"](*(tvm.runtime.tensor(arrays[name]) for name in ("a", "b"))).numpy()
assert np.array_equal(found, arrays["wanted"])
assert "tvm_convgrad.offload.registry" not in sys.modules
"""


@pytest.mark.onednn
def test_an_exported_library_finds_the_runtime_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = libraries.cache_folder()
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path / "runtimes"))
    shutil.copytree(ours, tmp_path / "runtimes")
    module = partition(directions_module([("main", DIRECTIONS["forward"], PLAIN)]), ["onednn"])
    tvm.compile(module, "llvm").export_library(str(tmp_path / "program.so"))
    operands, wanted = numbers_of(PLAIN, "forward")
    np.savez(tmp_path / "arrays.npz", a=operands[0], b=operands[1], wanted=wanted)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "program.so"), str(tmp_path / "arrays.npz")]
    subprocess.run(command, check=True)
    shutil.rmtree(tmp_path / "runtimes")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "onednn: this program calls the library" in done.stderr
    assert "`convgrad build-runtime onednn` makes it" in done.stderr


@pytest.mark.onednn
def test_a_module_can_be_partitioned_twice() -> None:
    directions = [(name, DIRECTIONS[name], PLAIN) for name in ("forward", "backward_data")]
    once = partition(directions_module(directions[:1]), ["onednn"])
    once.update_func(tvm.ir.GlobalVar("backward_data"), directions_module(directions[1:])["backward_data"])
    machine = quick_machine(partition(once, ["onednn"]), "llvm")
    for name, _, problem in directions:
        operands, wanted = numbers_of(problem, name)
        assert np.array_equal(machine[name](*map(tvm.runtime.tensor, operands)).numpy(), wanted)
