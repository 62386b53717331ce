# SPDX-License-Identifier: Apache-2.0
"""How long cuDNN's engines take for depthwise convolutions: those that it compiles itself beside those it has compiled.

    python -m benchmarks.cudnn_depthwise --dtype bfloat16 --layout NHWC:OHWI:NHWC

Milliseconds of the fastest engine of each kind, by the GPU's clock, and the seconds that a plan of the compiled one
takes, in which cuDNN compiles it.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.engines import COMPILED, Listed
from tvm_convgrad.offload.cudnn.gpu import Gpu
from tvm_convgrad.offload.cudnn.guarded import Guarded
from tvm_convgrad.offload.cudnn.tuning_device import EngineError

SHAPES = (
    "g96mb32ic96ih56oc96oh56kh7ph3",
    "g768mb32ic768ih7oc768oh7kh7ph3",
    "g96mb32ic96ih112oc96oh56kh3ph1sh2",
    "g144mb32ic144ih56oc144oh56kh3ph1",
    "g384mb32ic384ih14oc384oh14kh3ph1",
    "g960mb32ic960ih7oc960oh7kh3ph1",
)
MOST = 24
"""Engines of a call that are timed."""

REPEATS = 3
SECONDS = 0.003


class Timed(NamedTuple):
    """Seconds of a call, and of making its plan."""

    call: float
    plan: float


def timed(gpu: Gpu, call: Call, engine: Listed, operands: list[np.ndarray]) -> Timed:
    """Those of an engine; EngineError where it cannot run."""
    begin = time.perf_counter()
    plan = gpu.plan(call, engine)
    made = time.perf_counter() - begin
    memory = Guarded(gpu, call, operands, plan.workspace)
    memory.blank(plan)
    memory.run(plan, 1)
    calls = max(3, min(50, int(SECONDS / max(memory.run(plan, 3) / 3, 1e-6))))
    return Timed(min(memory.run(plan, calls) / calls for _ in range(REPEATS)), made)


def main() -> int:
    """Print a line for each direction of each shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", help="type of all tensors")
    parser.add_argument("--layout", default="NHWC:OHWI:NHWC", help="of data, weight and result")
    options = parser.parse_args()
    gpu, rng = Gpu(local_target()), np.random.default_rng(0)
    print(f"{gpu.device}, cuDNN {gpu.version}: ms of the fastest engine")
    print(f"{'call':90} compiled before  by cuDNN  times  plan, s")
    for shape in SHAPES:
        problem = ConvProblem.from_descriptor(shape).with_layouts(*options.layout.split(":"))
        for direction in DIRECTIONS:
            call = Call(direction, problem.with_dtypes(*[options.dtype] * 3))
            operands = [rng.integers(-2, 3, each.shape).astype(numpy_dtype(each.dtype)) for each in call.operands]
            listed = gpu.candidates(call, MOST)
            found: dict[bool, list[Timed]] = {False: [], True: []}
            for engine in () if isinstance(listed, str) else [each for each in listed if not each.refusal]:
                try:
                    found[COMPILED in engine.notes].append(timed(gpu, call, engine, operands))
                except EngineError as error:
                    print(f"{call}: {engine}: {error}")
            before, own = (min(found[kind], default=None) for kind in (False, True))
            if before is None or own is None:
                print(f"{call!s:90} engines of one kind only")
                continue
            ratio = before.call / own.call
            print(f"{call!s:90} {before.call * 1e3:15.4f} {own.call * 1e3:9.4f} {ratio:6.1f} {own.plan:8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
