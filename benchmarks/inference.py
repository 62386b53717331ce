# SPDX-License-Identifier: Apache-2.0
"""Inference libraries of `convgrad export --inference` beside ONNX Runtime, on the same trained weights.

    pip install '.[onnxruntime,torch,demo]'
    python benchmarks/inference.py                                  # three small models, one and eight samples
    python benchmarks/inference.py --models digits --batches 1      # one of them
    python benchmarks/inference.py --onnx model.onnx                # a file of your own, with its own batch

Both are compiled for this machine's CPU and take turns in one process with the same number of threads; times are
medians, and the ratio of the fastest turns is what counts where the machine has other work. ONNX Runtime gets the file
that `convgrad export` would write. Random images, and weights as initialised.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.digits_cnn import make_model
from tests.linked import linked
from tvm_convgrad.measure.timing import Call, pairs
from tvm_convgrad.report.tables import print_json, print_table
from tvm_convgrad.threads import use_threads

MODELS = ("digits", "resnet18_cifar", "mobilenet_v2")


def exported(name: str, batch: int) -> onnx.ModelProto:
    """An ONNX model in train mode; all but the digits are PyTorch's."""
    if name == "digits":
        return make_model(batch)
    import torch

    from tvm_convgrad.bench.networks import network

    module, size = network(name)
    stream, mode = io.BytesIO(), torch.onnx.TrainingMode.TRAINING
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.zeros(batch, 3, size, size)
        torch.onnx.export(module, (x,), stream, dynamo=False, training=mode, do_constant_folding=False)
    return onnx.load_from_string(stream.getvalue())


def calls(proto: onnx.ModelProto, threads: int, layout: str) -> Iterator[Call]:
    """Ours and ONNX Runtime's prediction of one batch of random numbers."""
    import onnxruntime
    import tvm
    from tvm import relax

    from tvm_convgrad.codegen.hardware import native_target
    from tvm_convgrad.training.compile.lower import compile_predictor
    from tvm_convgrad.training.export.onnx_writer import with_trained
    from tvm_convgrad.training.frontends.onnx.model import from_onnx
    from tvm_convgrad.training.step.options import StepOptions
    from tvm_convgrad.training.step.predictor import build_predictor

    model = from_onnx(proto)
    values = {**model.parameters, **model.states}
    predictor = build_predictor(model, values, StepOptions(layout=layout))
    machine: relax.VirtualMachine = linked(compile_predictor(predictor, native_target())[0])
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(each.shape).astype(each.dtype) for each in model.inputs]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    yield Call("ours", partial(machine["predict"], *tensors), lambda result: result.numpy())

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    written = with_trained(proto, values, "model").proto
    session = onnxruntime.InferenceSession(written.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    feed = {each.name: array for each, array in zip(session.get_inputs(), arrays, strict=True)}
    name = session.get_outputs()[0].name
    yield Call("ONNX Runtime", partial(session.run, [name], feed), lambda result: np.asarray(result[0]))


def main() -> None:
    """Measure the models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--onnx", type=Path, nargs="*", default=[], help="files to measure in their place")
    parser.add_argument("--layout", default="NCHW", help="of ours, as `build` takes it")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=5.0, help="of turns of each model, at the least")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    threads = use_threads(options.threads)
    named = [
        (f"{name}, batch {batch}", partial(exported, name, batch))
        for name in options.models
        for batch in options.batches
    ]
    if options.onnx:
        named = [(path.name, partial(onnx.load, path)) for path in options.onnx]
    rows = []
    for title, load in named:
        both = list(calls(load(), threads, options.layout))
        found, expected = (call.read(call.run()) for call in both)
        apart = float(np.abs(found - expected).max() / np.abs(expected).max())
        times = pairs(both, options.seconds)
        own, other = times.values()
        row = {
            "model": title,
            "ours_ms": statistics.median(own) * 1e3,
            "onnxruntime_ms": statistics.median(other) * 1e3,
        }
        row["ratio"] = statistics.median(theirs / ours for ours, theirs in zip(own, other, strict=True))
        row["ratio_of_fastest"] = min(other) / min(own)
        rows.append(row | {"apart": apart})
    if options.json:
        print_json({"threads": threads, "rows": rows})
        return
    print_table(
        f"inference with {threads} threads: ms, and ONNX Runtime's time / ours",
        ("model", "ours", "ONNX Runtime", "ratio", "of fastest", "difference"),
        [
            (
                row["model"],
                f"{row['ours_ms']:.3f}",
                f"{row['onnxruntime_ms']:.3f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_of_fastest']:.2f}",
                f"{row['apart']:.1e}",
            )
            for row in rows
        ],
        right=("ours", "ONNX Runtime", "ratio", "of fastest", "difference"),
    )


if __name__ == "__main__":
    main()
