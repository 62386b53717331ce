# SPDX-License-Identifier: Apache-2.0
"""Time a face of a problem against another implementation: interleaved pairs, medians, so that noise hits both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from tvm_convgrad.catalogue import FACES
from tvm_convgrad.errors import SetupError
from tvm_convgrad.evaluation import forced
from tvm_convgrad.problem import ConvProblem

MIN_PAIRS = 5
TOLERANCE = 1e-3
"""Largest difference to the rival's result, relative to its largest element: float32 sums in another order."""


@dataclass(frozen=True)
class Measurement:
    """One face of one problem.

    Attributes:
        face, descriptor: what was computed; `--problem DESCRIPTOR --face FACE` repeats it.
        suite, count: the network, and how often the layer occurs in it.
        kernel: what the plan chose.
        ours, theirs: seconds, medians; rival: whose, with its layout.
        gflops: ours; compile_seconds: of our module.
    """

    face: str
    descriptor: str
    suite: str
    count: int
    kernel: str
    ours: float
    theirs: float
    rival: str
    gflops: float
    compile_seconds: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.theirs / self.ours

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


def measure(
    face: str, problem: ConvProblem, *, target: Any, against: str, seconds: float, suite: str = "", count: int = 1
) -> Measurement:
    """Time `face` of a static float32 problem.

    Args:
        against: "torch" (the better of its two layouts) or "stock" (the composition of stock TVM operators).
        seconds: to spend on pairs, beyond compiling.

    Raises:
        SetupError: PyTorch is missing, or the two results differ, so that times would mean nothing.
    """
    rng = np.random.default_rng(0)
    names = FACES[face].operands
    arrays = {n: rng.standard_normal([int(e) for e in problem.tensors[n][0]], dtype=np.float32) for n in names}
    begin = time.perf_counter()
    ours, kernel = _compiled(face, problem, target, "kernel", arrays)
    compile_seconds = time.perf_counter() - begin
    if against == "torch":
        rivals = _torch_calls(face, problem, arrays)
    else:
        rivals = {"stock": _compiled(face, problem, target, "composition", arrays)[0]}
    found = ours()
    for name, rival in rivals.items():
        wanted = rival()
        error = float(np.abs(found - wanted).max()) / max(float(np.abs(wanted).max()), 1e-30)
        if not error <= TOLERANCE:
            raise SetupError(
                f"{face} of {problem.descriptor}: ours and {name} differ by {error:.1e} of the largest value"
            )
    times: dict[str, list[float]] = {name: [] for name in ("ours", *rivals)}
    begin = time.perf_counter()
    while len(times["ours"]) < MIN_PAIRS or time.perf_counter() - begin < seconds:
        for name, call in (("ours", ours), *rivals.items()):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    best = min(rivals, key=lambda name: median(times[name]))
    own = median(times["ours"])
    return Measurement(
        face=face,
        descriptor=problem.descriptor,
        suite=suite,
        count=count,
        kernel=kernel,
        ours=own,
        theirs=median(times[best]),
        rival=best,
        gflops=2e-9 * problem.macs / own,
        compile_seconds=compile_seconds,
    )


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean of logarithms."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def _compiled(
    face: str, problem: ConvProblem, target: Any, impl: str, arrays: dict[str, Any]
) -> tuple[Callable[[], Any], str]:
    """A call of the compiled program, and the kind of what the plan chose."""
    import tvm
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.lowering import recorded_choices
    from relax_ops.program import faces_module

    with forced(face, impl), recorded_choices() as record:
        executable = tvm.compile(faces_module([("main", FACES[face], problem)]), target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    operands = [tvm.runtime.tensor(arrays[name]) for name in FACES[face].operands]
    function = machine["main"]
    kind = record[0][2].kind if record else "stock"
    return lambda: _View(function(*operands)), kind


class _View:
    """A result that is turned into numpy only when it is compared."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __sub__(self, other: Any) -> Any:
        return np.asarray(self._tensor.numpy()) - np.asarray(other)

    def __array__(self, *_arguments: Any, **_keywords: Any) -> Any:
        return np.asarray(self._tensor.numpy())


def _torch_calls(face: str, problem: ConvProblem, arrays: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """PyTorch's call in both of its layouts, on all its threads; results come in the problem's layout."""
    try:
        import torch
    except ImportError as error:
        raise SetupError("bench --against torch needs PyTorch; pip install 'tvm-convgrad[torch]'") from error
    rank = problem.rank
    layouts = {
        "data": (problem.data_layout, problem.data_shape),
        "weight": (problem.kernel_layout.replace("O", "N").replace("I", "C"), problem.weight_shape),
        "grad": (problem.grad_layout, problem.grad_shape),
    }
    canonical = "NC" + "DHW"[3 - rank :]
    result = FACES[face].result
    calls: dict[str, Callable[[], Any]] = {}
    formats = [("contiguous", torch.contiguous_format)]
    if rank > 1:
        formats.append(("channels_last", torch.channels_last if rank == 2 else torch.channels_last_3d))
    arguments: Sequence[Any] = (
        None,
        list(problem.strides),
        [low for low, _ in problem.padding],
        list(problem.dilation),
        False,
        [0] * rank,
        problem.groups,
    )
    if any(low != high for low, high in problem.padding):
        raise SetupError(f"{problem.descriptor}: PyTorch has no asymmetric padding; use --against stock")
    for name, memory_format in formats:
        tensors = {}
        for key, (layout, shape) in layouts.items():
            order = [layout.index(letter) for letter in canonical]
            if key in arrays:
                tensor = torch.from_numpy(arrays[key]).permute(*order)
            else:
                tensor = torch.empty([int(shape[i]) for i in order])
            tensors[key] = tensor.contiguous(memory_format=memory_format)
        back = [canonical.index(letter) for letter in layouts[result][0]]
        mask = [face == "backward_data", face == "backward_weight", False]

        def forward(t: dict[str, Any] = tensors, order: list[int] = back) -> Any:
            with torch.no_grad():
                bias, stride, padding, dilation, transposed, extra, groups = arguments
                y = torch.ops.aten.convolution(
                    t["data"], t["weight"], bias, stride, padding, dilation, transposed, extra, groups
                )
            return y.permute(*order)

        def backward(t: dict[str, Any] = tensors, order: list[int] = back, mask: list[bool] = mask) -> Any:
            gradients = torch.ops.aten.convolution_backward(t["grad"], t["data"], t["weight"], *arguments, mask)
            return gradients[0 if mask[0] else 1].permute(*order)

        calls[f"torch {name}"] = forward if face == "forward" else backward
    return calls
