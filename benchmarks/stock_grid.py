# SPDX-License-Identifier: Apache-2.0
"""136 convolutions differentiated by relax.transform.Gradient, with TVM's own rules and with ours, against float64.

    python benchmarks/stock_grid.py            # the table: right, silently wrong, raises
    python benchmarks/stock_grid.py --json     # every configuration, with TVM's message
    python benchmarks/stock_grid.py --wrong    # also list what is silently wrong

TVM's own rules run in a process with TVM_DEVICE_BACKEND_AUTOLOAD=0, in which TVM does not load this package's rules.
Data are small integers, so that "right" means equal to float64 in every element. bfloat16 is refused by the Gradient
pass itself; "ours" then is the operators used directly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer

from relax_ops.single_run import quick_machine
from tvm_convgrad.core import reference
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, flat_padding, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.bulk import numpy_dtype


@dataclass(frozen=True)
class Config:
    """One configuration; `problem` is the convolution, or the one whose dgrad a transposed convolution is."""

    family: str
    problem: ConvProblem
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    symbolic: str = ""  # letters of the data layout whose extents are symbolic

    def __str__(self) -> str:
        kind = "conv_transpose" if self.transposed else "conv"
        extra = f" symbolic {self.symbolic}" if self.symbolic else ""
        return f"{kind} {self.problem.descriptor}{extra}"


def grid() -> list[Config]:
    """The 136 configurations."""
    configs = [*_plain(), *_dilated(), *_layouts(), *_symbolic(), *_ranks(), *_transposed(), *_dtypes()]
    assert len(configs) == 136, len(configs)
    return configs


def _conv2d(groups: tuple[int, int, int], extents: tuple[int, int], kernel: Any = 3, **rest: Any) -> ConvProblem:
    """A 2-D problem; `groups` is (groups, in channels, out channels)."""
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    return ConvProblem(2, groups[1], groups[2], extents, kernel, groups=groups[0], **rest)


GROUPS = ((1, 3, 4), (2, 4, 6), (4, 4, 4), (4, 4, 8))  # dense, grouped, depthwise, depthwise with multiplier 2


def _plain() -> Iterator[Config]:
    """NCHW, float32, no dilation: 4 groups x 4 strides x 4 paddings, a pointwise and an oblong kernel."""
    strides = ((1, 1), (2, 2), (3, 3), (1, 2))
    paddings = (0, 1, (1, 2), ((0, 1), (2, 0)))
    for groups, stride, padding in product(GROUPS, strides, paddings):
        yield Config("conv2d NCHW", _conv2d(groups, (9, 8), strides=stride, padding=padding))
    for kernel in ((1, 1), (5, 2)):
        yield Config("conv2d NCHW", _conv2d((1, 3, 4), (9, 8), kernel, strides=(2, 2), padding=1))


def _dilated() -> Iterator[Config]:
    """Dilation 2: 3 groups x 3 kernels x 3 strides. With a stride beyond the dilated kernel, stock raises nothing."""
    for groups, kernel, stride in product(GROUPS[:3], ((3, 3), (3, 2), (2, 2)), (1, 3, 4)):
        problem = _conv2d(groups, (11, 10), kernel, strides=(stride, stride), padding=1, dilation=(2, 2))
        yield Config("conv2d dilated", problem)


def _layouts() -> Iterator[Config]:
    for (data, kernel), groups in product(
        (("NHWC", "HWIO"), ("NHWC", "OHWI"), ("NCHW", "HWIO"), ("NHWC", "OIHW")), GROUPS[:2]
    ):
        problem = _conv2d(groups, (9, 8), strides=(2, 1), padding=1)
        yield Config("conv2d other layouts", problem.with_layouts(data, kernel, data))


def _symbolic() -> Iterator[Config]:
    problem = _conv2d((1, 3, 4), (9, 8), padding=1)
    for letters in ("N", "HW", "NHW"):
        yield Config("conv2d symbolic extents", problem, symbolic=letters)
    yield Config("conv2d symbolic extents", replace(problem, strides=(2, 2)), symbolic="NHW")


def _ranks() -> Iterator[Config]:
    for groups, stride, dilation in ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (4, 3, 1)):
        for rank, extent in ((1, 13), (3, 6)):
            problem = ConvProblem(
                2, 4, 4, (extent,) * rank, (3,) * rank, (stride,) * rank, ((1, 1),) * rank, (dilation,) * rank, groups
            )
            yield Config(f"conv{rank}d", problem)


def _transposed() -> Iterator[Config]:
    """Transposed convolutions; the extents are those of the result, output padding what the floor division hides."""
    for rank, extent in ((1, 12), (2, 10), (3, 6)):
        for groups, stride, dilation in ((1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)):
            problem = ConvProblem(
                2, 4, 4, (extent,) * rank, (3,) * rank, (stride,) * rank, ((1, 1),) * rank, (dilation,) * rank, groups
            )
            yield _transposed_config(problem)


def _transposed_config(problem: ConvProblem) -> Config:
    hidden = tuple(
        (int(x) + sum(pair) - d * (k - 1) - 1) % s
        for x, pair, d, k, s in zip(
            problem.data_extents, problem.padding, problem.dilation, problem.kernel, problem.strides, strict=True
        )
    )
    return Config(f"conv{problem.rank}d_transpose", problem, transposed=True, output_padding=hidden)


def _dtypes() -> Iterator[Config]:
    for dtype, groups in product(("float64", "float16", "bfloat16"), GROUPS[:2]):
        problem = _conv2d(groups, (6, 5), padding=1).with_dtypes(dtype, dtype, dtype)
        yield Config(f"conv2d {dtype}", problem)
    for dtype in ("float64", "float16", "bfloat16"):
        problem = _conv2d(GROUPS[0], (6, 5), strides=(2, 2), padding=1).with_dtypes(dtype, dtype, dtype)
        yield Config(f"conv2d {dtype}", problem)


# ------------------------------------------------------------------------------------------------- running


def outcome(config: Config) -> tuple[str, str]:
    """("right" | "wrong" | "raises", what was seen) for one configuration with the rules that TVM has loaded."""
    rng = np.random.default_rng(len(str(config)))
    tensors = config.problem.tensors
    # At most 2 * 6 * 5 products of magnitude 4 are summed in 16-bit types: exact in float16, rounded once in bfloat16.
    bound = 2 if tensors["data"][1] in ("float16", "bfloat16") else 4
    arrays = {
        name: rng.integers(-bound, bound + 1, [int(e) for e in shape]).astype(numpy_dtype(dtype))
        for name, (shape, dtype) in tensors.items()
    }
    try:
        found = _gradients(config, arrays)
    except Exception as error:  # whatever stock TVM raises: that it raises is the result
        return "raises", f"{type(error).__name__}: {_last_line(error)}"
    for (name, have), want in zip(found.items(), expected(config, arrays), strict=True):
        if have.shape != want.shape:
            return "wrong", f"gradient of {name} has shape {list(have.shape)} instead of {list(want.shape)}"
        rounded = want.astype(have.dtype)
        if not np.array_equal(have, rounded):
            return "wrong", f"{int((have != rounded).sum())} of {want.size} elements of the gradient of {name} differ"
    return "right", ""


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")


def expected(config: Config, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """Gradients of the first operand and of the weight in float64, from the upstream gradient that `arrays` holds."""
    problem, data, weight, grad = config.problem, arrays["data"], arrays["weight"], arrays["grad"]
    if config.transposed:  # its input is `grad`, its upstream gradient is `data`
        return reference.forward(problem, data, weight), reference.backward_weight(problem, grad, data)
    return reference.backward_data(problem, grad, weight), reference.backward_weight(problem, grad, data)


def _gradients(config: Config, arrays: dict[str, Any]) -> dict[str, Any]:
    import tvm

    if config.problem.data_dtype == "bfloat16" and _ours_loaded():
        from tvm_convgrad.evaluation import evaluate_problem

        return {
            "data": evaluate_problem("backward_data", config.problem, arrays["grad"], arrays["weight"]),
            "weight": evaluate_problem("backward_weight", config.problem, arrays["grad"], arrays["data"]),
        }
    operand, upstream = ("grad", "data") if config.transposed else ("data", "grad")
    machine = quick_machine(adjoint(config))
    arguments = [tvm.runtime.tensor(arrays[name]) for name in (operand, "weight", upstream)]
    gradients = machine["main_adjoint"](*arguments)[1]
    return {operand: gradients[0].numpy(), "weight": gradients[1].numpy()}


def adjoint(config: Config) -> Any:
    """The module with `main` (the loss <convolution, upstream>) and its gradient in the operand and the weight."""
    import tvm
    from tvm import relax

    problem = config.problem
    operand = "grad" if config.transposed else "data"
    shape, dtype = problem.tensors[operand]
    layout = problem.grad_layout if config.transposed else problem.data_layout
    extents = [
        tvm.tirx.Var(letter.lower(), "int64") if letter in config.symbolic else extent
        for letter, extent in zip(layout, shape, strict=True)
    ]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(extents, dtype))
    w = relax.Var("w", relax.TensorType(*problem.tensors["weight"]))
    with builder.function("main"):
        with builder.dataflow():
            y = builder.emit(_stock_call(config, x, w))
            upstream = relax.Var("upstream", relax.TensorType(y.ty.shape, dtype))
            loss = builder.emit_output(relax.op.sum(relax.op.multiply(y, upstream)))
        builder.emit_func_output(loss, [x, w, upstream])
    return relax.transform.Gradient("main", require_grads=[x, w])(builder.get())


def _stock_call(config: Config, x: Any, w: Any) -> Any:
    from tvm import relax

    problem, rank = config.problem, config.problem.rank
    attributes = {
        "strides": list(problem.strides),
        "padding": list(flat_padding(problem.padding)),
        "dilation": list(problem.dilation),
        "groups": problem.groups,
    }
    if config.transposed:
        assert (problem.grad_layout, problem.kernel_layout) == (data_layout_of(rank), kernel_layout_of(rank))
        function = (relax.op.nn.conv1d_transpose, relax.op.nn.conv2d_transpose, relax.op.nn.conv3d_transpose)[rank - 1]
        layouts = {"data_layout": data_layout_of(rank), "kernel_layout": "IO" + SPATIAL[rank]}
        return function(x, w, output_padding=list(config.output_padding), **attributes, **layouts)
    function = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[rank - 1]
    return function(x, w, data_layout=problem.data_layout, kernel_layout=problem.kernel_layout, **attributes)


def _ours_loaded() -> bool:
    register = sys.modules.get("relax_ops.register")
    return register is not None and register._done


# ---------------------------------------------------------------------------------------------- the table

app = typer.Typer(add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Every configuration as JSON.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="List what is silently wrong.")] = False,
    here: Annotated[bool, typer.Option("--here", hidden=True, help="Run in this process, a JSON line each.")] = False,
) -> None:
    """Compare stock TVM's gradient rules and ours with float64 on 136 convolutions."""
    if here:
        import tvm  # noqa: F401 - loads the rules, unless the environment forbids it

        for config in grid():
            status, detail = outcome(config)
            print(json.dumps({"name": str(config), "status": status, "detail": detail}), flush=True)
        return
    configs = grid()
    stock, ours = _rules(stock=True), _rules(stock=False)
    rows = [{"family": c.family, "name": str(c), "stock": stock[str(c)], "ours": ours[str(c)]} for c in configs]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    _table(rows)
    if wrong:
        for row in rows:
            if row["stock"]["status"] == "wrong":
                print(f"{row['name']}: {row['stock']['detail']}")


def _rules(*, stock: bool) -> dict[str, dict[str, str]]:
    """Outcome by configuration, from a process of its own; what ends that process counts as raising."""
    environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "0" if stock else "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--here"], env=environment, capture_output=True, text=True, check=False
    )
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"name"'):
            row = json.loads(line)
            found[row.pop("name")] = row
    crashed = {"status": "raises", "detail": f"the process ended with {done.returncode}"}
    return {str(config): found.get(str(config), crashed) for config in grid()}


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("configurations", title="relax.transform.Gradient, stock rules and ours")
    for column in ("all", "stock right", "wrong", "raises", "ours right"):
        table.add_column(column, justify="right")
    families = list(dict.fromkeys(row["family"] for row in rows))
    for family in [*families, "all"]:
        members = [row for row in rows if family in ("all", row["family"])]
        stock = Counter(row["stock"]["status"] for row in members)
        ours = Counter(row["ours"]["status"] for row in members)
        if family == "all":
            table.add_section()
        counts = (len(members), stock["right"], stock["wrong"], stock["raises"], ours["right"])
        table.add_row(family, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    app()
