# SPDX-License-Identifier: Apache-2.0
"""Whether every engine that cuDNN offers on this GPU computes what its notes promise.

    python -m benchmarks.cudnn_engines --seconds 60 --part 1/4

For each problem, type, layout and direction each engine that `build` may use runs once on small integers, whose sums
float32 has exactly. An engine whose result differs from float64's, rounded once, in any bit is printed, and then the
command ends with code 1. It finds engines that round, or read a layout as another one: cuDNN has notes for some only.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

import numpy as np

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.gpu import Gpu
from tvm_convgrad.offload.cudnn.guarded import Guarded
from tvm_convgrad.offload.cudnn.tuning_device import EngineError

SHAPES = (
    "mb4ic32ih28oc48kh3ph1",
    "mb2ic64ih56oc64kh3ph1",
    "mb2ic16ih15oc24kh5ph2",
    "mb4ic32ih28oc64kh1",
    "mb2ic3ih64oc32kh7sh2ph3",
    "mb4ic32ih28oc32kh3sh2ph1",
    "mb2ic16ih20oc16kh3dh1ph2",
    "g2mb2ic4ih9oc6kh3sh2ph1",
    "g4mb2ic32ih14oc64kh3ph1",
    "g32mb4ic32ih14oc32kh3ph1",
    "g32mb4ic32ih14oc32kh7ph3",
    "g32mb4ic32ih14oc64kh3ph1",
    "g16mb2ic16ih15oc16kh5ph2",
    "g24mb2ic24ih21oc24kh3sh2ph1",
    "g20mb2ic20ih20oc20kh3dh1ph2",
)
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NCHW:OIHW:NCHW", "NHWC:OHWI:NHWC", "NHWC:OIHW:NHWC", "NHWC:OHWI:NCHW", "NCHW:OIHW:NHWC")
MOST = 32
"""Engines of one call, the heuristics' best first."""


def calls() -> Iterator[Call]:
    """Every direction of each problem."""
    for shape, dtype, layouts, direction in itertools.product(SHAPES, DTYPES, LAYOUTS, DIRECTIONS):
        problem = ConvProblem.from_descriptor(shape).with_layouts(*layouts.split(":")).with_dtypes(dtype, dtype, dtype)
        yield Call(direction, problem)


def inexact(gpu: Gpu, call: Call) -> tuple[int, list[str]]:
    """How many engines of a call ran, and what is wrong with some."""
    listed = gpu.candidates(call, MOST)
    if isinstance(listed, str):
        return 0, [f"{call}: refused: {listed}"]
    operands, wanted = numbers_of(call.problem, call.direction)
    found, ran = [], 0
    for engine in (each for each in listed if not each.refusal):
        try:
            plan = gpu.plan(call, engine)
            memory = Guarded(gpu, call, operands, plan.workspace)
            memory.blank(plan)
            memory.run(plan, 1)
        except EngineError as error:
            found.append(f"{call}: {engine}: {error}")
            continue
        ran += 1
        result = memory.result()
        if not np.array_equal(result, wanted):
            largest = np.abs(wanted.astype("float64")).max()
            error = np.abs(result.astype("float64") - wanted.astype("float64")).max() / largest
            found.append(f"{call}: {engine} ({', '.join(engine.notes)}): off by {error:.1e} of the largest element")
    return ran, found


def main() -> int:
    """Run the calls of a part, as many as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="end after this time")
    parser.add_argument("--part", default="1/1", help="which of how many parts, such as 1/4, for several processes")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    gpu = Gpu(local_target())
    begin, ran, seen, wrong = time.perf_counter(), 0, 0, []
    for call in list(calls())[part - 1 :: parts]:
        if time.perf_counter() - begin > options.seconds:
            break
        plans, found = inexact(gpu, call)
        ran, seen, wrong = ran + plans, seen + 1, wrong + found
        for line in found:
            print(line, flush=True)
    print(f"{gpu.device}, cuDNN {gpu.version}: {seen} calls, {ran} engines ran, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
