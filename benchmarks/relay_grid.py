# SPDX-License-Identifier: Apache-2.0
"""68 convolutions through Relay, with its own rules and with ours, against float64. Runs in the .venv-relay of make.

    python benchmarks/relay_grid.py            # the tables
    python benchmarks/relay_grid.py --json     # every configuration and path, with Relay's message

The stock rules run in a process of their own, in which this package registers nothing (TVM_DEVICE_BACKEND_AUTOLOAD=0).
Data are small integers, so that "right" means equal to float64 in every element of every result.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT, FORWARD
from tvm_convgrad.core.problem import ConvProblem

CONFIGURATIONS = {
    "plain": (
        "mb1ic4ih9iw10oc6oh9ow10kh3kw3ph1pw1",
        "mb2ic1ih9iw10oc6oh9ow10kh3kw3ph1pw1",
        "mb2ic3ih9iw10oc8oh9ow10kh3kw3ph1pw1",
        "mb2ic4ih2oc6oh2kh3ph1",
        "mb2ic4ih3oc6oh1kh3",
        "mb2ic4ih5oc6oh1kh5",
        "mb2ic4ih9iw10oc1oh9ow10kh3kw3ph1pw1",
        "mb2ic4ih9iw10oc6oh11ow12kh3kw3ph2pw2",
        "mb2ic4ih9iw10oc6oh13ow14kh3kw3ph3pw3",
        "mb2ic4ih9iw10oc6oh7ow8kh3kw3",
        "mb2ic4ih9iw10oc6oh8ow9kh2kw2",
        "mb2ic4ih9iw10oc6oh9ow10kh1kw1",
        "mb2ic4ih9iw10oc6oh9ow10kh1kw5ph0pw2",
        "mb2ic4ih9iw10oc6oh9ow10kh3kw1ph1pw0",
        "mb2ic4ih9iw10oc6oh9ow10kh3kw3ph1pw1",
        "mb2ic4ih9iw10oc6oh9ow10kh5kw5ph2pw2",
        "mb5ic4ih9iw10oc6oh9ow10kh3kw3ph1pw1",
    ),
    "strided": (
        "mb2ic3ih16oc6oh8kh7sh2ph3",
        "mb2ic4ih10iw11oc6oh4ow4kh1kw1sh3sw3",
        "mb2ic4ih11iw12oc6oh4ow4kh5kw5sh3sw3ph2pw2",
        "mb2ic4ih12iw13oc6oh3ow4kh3kw3sh4sw4ph1pw1",
        "mb2ic4ih12oc6oh2kh3sh5",
        "mb2ic4ih4oc6oh1kh3sh2",
        "mb2ic4ih8oc6oh4kh1sh2",
        "mb2ic4ih8oc6oh4kh2sh2",
        "mb2ic4ih8oc6oh4kh3sh2ph1",
        "mb2ic4ih8oc6oh4kh4sh2ph1",
        "mb2ic4ih9iw10oc6oh3ow4kh3kw3sh3sw3ph1pw1",
        "mb2ic4ih9iw10oc6oh5ow10kh3kw3sh2sw1ph1pw1",
        "mb2ic4ih9iw10oc6oh9ow4kh3kw3sh1sw3ph1pw1",
        "mb2ic4ih9oc6oh4kh2sh2",
        "mb2ic4ih9oc6oh5kh1sh2",
        "mb2ic4ih9oc6oh5kh3sh2ph1",
    ),
    "asymmetric": (
        "mb2ic4ih8oc6oh4kh3sh2rh1",
        "mb2ic4ih9iw10oc6oh5ow5kh3kw3sh2sw2ph0pw1rh2rw0",
        "mb2ic4ih9iw10oc6oh8ow9kh3kw3ph1pw1rh0rw0",
        "mb2ic4ih9iw10oc6oh8ow9kh3kw3rh1rw1",
        "mb2ic4ih9iw10oc6oh9ow10kh3kw3ph2pw1rh0rw1",
        "mb2ic4ih9oc6oh4kh3sh2rh1",
    ),
    "dilated": (
        "mb2ic4ih10oc6oh5kh3sh2dh1ph2",
        "mb2ic4ih9iw10oc6oh5ow6kh3kw3dh1dw1",
        "mb2ic4ih9iw10oc6oh8ow9kh3kw3dh1dw1ph2pw1rh1rw2",
        "mb2ic4ih9iw10oc6oh9ow10kh3kw3dh0dw1ph1pw2",
        "mb2ic4ih9iw10oc6oh9ow10kh3kw3dh1dw1ph2pw2",
        "mb2ic4ih9iw10oc6oh9ow10kh3kw3dh2dw2ph3pw3",
        "mb2ic4ih9oc6oh5kh3sh2dh1ph2",
    ),
    "grouped": (
        "g2mb1ic4ih9iw10oc6oh9ow10kh3kw3ph1pw1",
        "g2mb2ic4ih8oc6oh4kh3sh2ph1",
        "g2mb2ic4ih9iw10oc4oh9ow10kh3kw3ph1pw1",
        "g2mb2ic4ih9iw10oc6oh8ow9kh3kw3ph0pw1rh1rw0",
        "g2mb2ic4ih9iw10oc6oh9ow10kh1kw1",
        "g2mb2ic4ih9iw10oc6oh9ow10kh3kw3dh1dw1ph2pw2",
        "g2mb2ic4ih9iw10oc6oh9ow10kh3kw3ph1pw1",
        "g2mb2ic8ih9iw10oc2oh9ow10kh3kw3ph1pw1",
        "g3mb2ic6ih9iw10oc3oh9ow10kh3kw3ph1pw1",
        "g4mb2ic8ih9iw10oc8oh9ow10kh3kw3ph1pw1",
    ),
    "depthwise": (
        "g4mb1ic4ih9iw10oc4oh9ow10kh3kw3ph1pw1",
        "g4mb2ic4ih8oc12oh4kh3sh2ph1",
        "g4mb2ic4ih8oc4oh4kh3sh2ph1",
        "g4mb2ic4ih8oc4oh4kh3sh2rh1",
        "g4mb2ic4ih9iw10oc4oh9ow10kh3kw3dh1dw1ph2pw2",
        "g4mb2ic4ih9iw10oc4oh9ow10kh3kw3ph1pw1",
        "g4mb2ic4ih9iw10oc4oh9ow10kh5kw5ph2pw2",
        "g4mb2ic4ih9iw10oc8oh9ow10kh3kw3ph1pw1",
        "g4mb2ic4ih9oc4oh5kh3sh2ph1",
    ),
    "coinciding": ("mb3ic3ih3oc3kh3ph1", "mb4ic4ih4oc4kh1", "mb4ic4ih4oc4kh4ph2rh1"),
}
"""Families of configurations: problems in NCHW, float32. Where extents coincide, no shape gives a wrong axis away."""

TARGET = "llvm"
LAYOUTS = {"NHWC/OHWI": ("NHWC", "OHWI"), "NHWC/HWIO": ("NHWC", "HWIO")}
Arrays = dict[str, Any]


def problems() -> Iterator[tuple[str, ConvProblem]]:
    """Family and problem of each configuration."""
    for family, descriptors in CONFIGURATIONS.items():
        for descriptor in descriptors:
            yield family, ConvProblem.from_descriptor(descriptor)


# ---------------------------------------------------------------------------------------------- programs


def gradient_program(problem: ConvProblem) -> Any:
    """x, w, upstream -> (convolution * upstream, dX, dW, convolution), by relay.transform.gradient."""
    from tvm import relay

    from relay_ops.differentiate import value_and_gradients
    from relay_ops.ir import call_of

    names = ("data", "weight", "grad")
    x, w, upstream = (relay.var(name, shape=problem.tensors[name][0]) for name in names)
    convolution = call_of(FORWARD, problem, x, w)
    return value_and_gradients(relay.Function([x, w, upstream], relay.multiply(convolution, upstream)))


def weight_program(problem: ConvProblem) -> Any:
    """upstream, x -> dW, by nn.conv2d_backward_weight itself."""
    import tvm
    from tvm import relay

    from relay_ops.ir import call_of

    grad, x = (relay.var(name, shape=problem.tensors[name][0]) for name in BACKWARD_WEIGHT.operands)
    call = call_of(BACKWARD_WEIGHT, problem, grad, x)
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([grad, x], call)))


def round_trip(module: Any) -> Any:
    """Through text, then through JSON."""
    import tvm
    from tvm import relay

    parsed = relay.parse(module.astext())
    return tvm.ir.load_json(tvm.ir.save_json(parsed))


def converted(module: Any, layouts: tuple[str, str]) -> Any:
    """Both gradients in other layouts, without the convolution itself, which is stock Relay's business."""
    import tvm
    from tvm import relay

    function = module["main"]
    partials = relay.Tuple(function.body.fields[1:3])
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(function.params, partials)))
    wanted = {f"nn.conv2d_backward_{direction}": list(layouts) for direction in ("weight", "data")}
    with tvm.transform.PassContext(opt_level=3):
        return relay.transform.ConvertLayout(wanted)(module)


# --------------------------------------------------------------------------------------------- running


def run(module: Any, arrays: Arrays, *, library: bool = False) -> list[Any]:
    """Build for the CPU and run; with `library` by way of an exported shared library."""
    import tvm
    from tvm import relay
    from tvm.contrib import graph_executor

    with tvm.transform.PassContext(opt_level=3):
        factory = relay.build(module, TARGET)
    if library:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "program.so")
            factory.export_library(path)
            factory = tvm.runtime.load_module(path)
    executor = graph_executor.GraphModule(factory["default"](tvm.cpu()))
    for name, array in arrays.items():
        executor.set_input(name, array)
    executor.run()
    return [executor.get_output(i).numpy() for i in range(executor.get_num_outputs())]


def _gradients(problem: ConvProblem, arrays: Arrays) -> Arrays:
    return _named(run(round_trip(gradient_program(problem)), arrays))


def _gradients_nhwc(problem: ConvProblem, arrays: Arrays) -> Arrays:
    return _gradients(problem.with_layouts("NHWC", "HWIO", "NHWC"), arrays)


def _library(problem: ConvProblem, arrays: Arrays) -> Arrays:
    from relay_ops.partition import NAME, partition

    module = partition(gradient_program(problem), ["c"], forward=True)
    regions = [f for f in module.functions.values() if f.attrs and str(f.attrs.get("Compiler", "")) == NAME]
    assert regions, "nothing was partitioned"
    assert "nn.conv2d" not in str(module["main"]), "a convolution was left out"
    return _named(run(module, arrays, library=True))


def _converter(name: str) -> Callable[[ConvProblem, Arrays], Arrays]:
    def path(problem: ConvProblem, arrays: Arrays) -> Arrays:
        data, weight = run(converted(gradient_program(problem), LAYOUTS[name]), arrays)
        return {"data": data, "weight": weight}

    return path


def _weight(problem: ConvProblem, arrays: Arrays) -> Arrays:
    return {"weight": run(weight_program(problem), {name: arrays[name] for name in BACKWARD_WEIGHT.operands})[0]}


def _weight_nhwc(problem: ConvProblem, arrays: Arrays) -> Arrays:
    return _weight(problem.with_layouts("NHWC", "HWIO", "NHWC"), arrays)


def _named(results: list[Any]) -> Arrays:
    _, data, weight, grad = results
    return {"data": data, "weight": weight, "grad": grad}


PATHS: dict[str, tuple[bool, Callable[[ConvProblem, Arrays], Arrays]]] = {
    "gradient": (False, _gradients),
    "gradient of NHWC": (True, _gradients_nhwc),
    "library": (False, _library),
    **{f"to {name}": (False, _converter(name)) for name in LAYOUTS},
    "wgrad": (False, _weight),
    "wgrad in NHWC": (True, _weight_nhwc),
}
"""Ways through Relay: whether operands are in NHWC/HWIO, and the function that gives results by name."""

STOCK_PATHS = ("gradient", "gradient of NHWC", "wgrad", "wgrad in NHWC")
"""The ways that Relay has without this package."""


def outcome(problem: ConvProblem, path: str) -> tuple[str, str]:
    """("right" | "wrong" | "raises", what was seen) with the rules that are registered."""
    in_nhwc, function = PATHS[path]
    told = problem.with_layouts("NHWC", "HWIO", "NHWC") if in_nhwc else problem
    rng = np.random.default_rng(len(problem.descriptor))
    arrays = {name: rng.integers(-3, 4, shape).astype(dtype) for name, (shape, dtype) in told.tensors.items()}
    wanted = {
        "data": reference.backward_data(told, arrays["grad"], arrays["weight"]),
        "weight": reference.backward_weight(told, arrays["grad"], arrays["data"]),
        "grad": reference.forward(told, arrays["data"], arrays["weight"]),
    }
    try:
        found = function(problem, arrays)
    except Exception as error:  # whatever Relay raises is the outcome
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return "raises", f"{type(error).__name__}: {lines[-1].strip()[:160]}"
    for name, array in found.items():
        if array.shape != wanted[name].shape:
            return "wrong", f"{name} has shape {array.shape} instead of {wanted[name].shape}"
        if not np.array_equal(array, wanted[name]):
            return "wrong", f"{name}: {int((array != wanted[name]).sum())} of {array.size} elements"
    return "right", ", ".join(found)


# ---------------------------------------------------------------------------------------------- the table

app = typer.Typer(add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Every configuration and path as JSON.")] = False,
    here: Annotated[bool, typer.Option("--here", hidden=True, help="Run in this process, a JSON line each.")] = False,
) -> None:
    """Compare stock Relay and ours with float64 on 68 convolutions."""
    if here:
        logging.disable(logging.WARNING)
        stock = os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD") == "0"
        for family, problem in problems():
            for path in STOCK_PATHS if stock else PATHS:
                status, detail = outcome(problem, path)
                row = {"family": family, "problem": str(problem), "path": path, "status": status, "detail": detail}
                print(json.dumps(row), flush=True)
        return
    rows = {"stock": _rows(stock=True), "ours": _rows(stock=False)}
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        _table(rows)


def _rows(*, stock: bool) -> list[dict[str, str]]:
    """What a process of its own prints; one that ends early is an error."""
    environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "0" if stock else "1"}
    done = subprocess.run([sys.executable, __file__, "--here"], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {'stock' if stock else 'own'} run ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _table(rows: dict[str, list[dict[str, str]]]) -> None:
    print("| way | configurations | all | stock right | wrong | raises | ours right |\n|---|---|---|---|---|---|---|")
    for path in PATHS:
        for family in (*CONFIGURATIONS, "all"):
            counts = {
                side: Counter(r["status"] for r in members if r["path"] == path and family in ("all", r["family"]))
                for side, members in rows.items()
            }
            total, stock = sum(counts["ours"].values()), counts["stock"]
            cells = [stock["right"], stock["wrong"], stock["raises"]] if path in STOCK_PATHS else ["-"] * 3
            print("|", " | ".join(map(str, (path, family, total, *cells, counts["ours"]["right"]))), "|")


if __name__ == "__main__":
    app()
