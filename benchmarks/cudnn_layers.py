# SPDX-License-Identifier: Apache-2.0
"""Layers of networks on a GPU: cuDNN as programs of tvm-convgrad call it, beside PyTorch where that is installed.

    python benchmarks/cudnn_layers.py [--suite resnet50] [--batch 32] [--layout NHWC] [--dtype float16] [--calls 50]

Milliseconds of one call, of many in a row on one stream. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tvm_convgrad.bench.suites import SUITES, suite
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE
from tvm_convgrad.offload.common import Engine, backend, load_runtime, verdict
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.problem import ConvProblem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="resnet50", choices=SUITES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layout", default="NHWC", choices=("NCHW", "NHWC"))
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--calls", type=int, default=50)
    arguments = parser.parse_args()
    target = local_target()
    load_runtime("cudnn", backend("cudnn").library())
    types = (arguments.dtype,) * 3
    for plain in suite(arguments.suite, arguments.batch, arguments.layout):
        problem = plain.with_dtypes(*types)
        for face in FACES:
            engine = verdict("cudnn", face, problem, NO_EPILOGUE, target)
            if not isinstance(engine, Engine):
                print(f"{face:16} {problem.descriptor}  refused: {engine}")
                continue
            ours = seconds(call(face, problem, target), tvm.cuda(0).sync, arguments.calls)
            print(
                f"{face:16} {problem.descriptor:60} {ours * 1e3:8.3f} ms  {2e-12 * problem.macs / ours:7.1f} TFLOP/s  "
                f"{engine.implementation}{beside_torch(face, problem, arguments.calls)}"
            )


def call(face: str, problem: ConvProblem, target: Any) -> Callable[[], None]:
    """One call of the runtime on tensors of its own."""
    numbers = backend("cudnn").numbers(face, problem, NO_EPILOGUE, target)
    block = (ctypes.c_int64 * len(numbers))(*numbers)
    run = tvm_ffi.get_global_func(backend("cudnn").entry)
    rng = np.random.default_rng(0)
    tensors = []
    for name in (*FACES[face].operands, FACES[face].result):
        shape, dtype = problem.tensors[name]
        array = rng.standard_normal([int(e) for e in shape], dtype=np.float32).astype(numpy_dtype(dtype))
        tensors.append(tvm.runtime.tensor(array, tvm.cuda(0)))
    return lambda: run(ctypes.c_void_p(ctypes.addressof(block)), *tensors)


def seconds(run: Callable[[], Any], wait: Callable[[], Any], calls: int) -> float:
    """Of one of many calls in a row, after some to warm up."""
    for _ in range(5):
        run()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def beside_torch(face: str, problem: ConvProblem, calls: int) -> str:
    """PyTorch's time for the same, with its choice of algorithms and settings; empty where it is not installed."""
    try:
        import torch
    except ImportError:
        return ""
    if not torch.cuda.is_available() or any(low != high for low, high in problem.padding):
        return ""
    form = torch.channels_last if problem.data_layout == "NHWC" else torch.contiguous_format
    plain = problem.with_layouts()
    made = {
        name: torch.randn(*map(int, shape), dtype=getattr(torch, dtype), device="cuda").to(memory_format=form)
        for name, (shape, dtype) in plain.tensors.items()
    }
    geometry = (problem.strides, [low for low, _ in problem.padding], problem.dilation, False, [0, 0], problem.groups)
    if face == "forward":
        taken = seconds(
            lambda: torch.convolution(made["data"], made["weight"], None, *geometry), torch.cuda.synchronize, calls
        )
    else:
        mask = [face == "backward_data", face == "backward_weight", False]
        taken = seconds(
            lambda: torch.ops.aten.convolution_backward(
                made["grad"], made["data"], made["weight"], None, *geometry, mask
            ),
            torch.cuda.synchronize,
            calls,
        )
    return f"  torch {taken * 1e3:8.3f} ms"


if __name__ == "__main__":
    main()
