# SPDX-License-Identifier: Apache-2.0
"""The options that several commands share: their types and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands.option_values import finite_float32, loss_scale, one_of
from tvm_convgrad.offload import registry
from tvm_convgrad.training.step.names import (
    BATCH_NORMS,
    DECAYED,
    DROPOUTS,
    DTYPES,
    LAYOUTS,
    LOSSES,
    OPTIMIZERS,
    RECOMPUTED,
    RESULTS,
)

DIRECTION_METAVAR = "wgrad|dgrad|forward|all"
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="N|dynamic",
        help="Samples in a batch; dynamic: any number, chosen at run time. Default: the model's own batch.",
    ),
]
Params = Annotated[
    Path | None,
    typer.Option(
        help="Only for a Relay program: the values of its parameters, a file of relay.save_param_dict. Default: the "
        "file beside the program with the ending .params."
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="|".join(LAYOUTS),
        callback=one_of(LAYOUTS),
        help="Layout that the data of convolutions is converted to; NHWC:OHWI: their weights are converted, too.",
    ),
]
DType = Annotated[
    str,
    typer.Option(
        metavar="|".join(DTYPES),
        callback=one_of(DTYPES),
        help="Type of the operands of convolutions and matrix products; parameters stay float32.",
    ),
]
Results = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(RESULTS),
        callback=one_of(RESULTS),
        help="What float16 and bfloat16 steps store in 16 bits: results of convolutions (operands), all activations, "
        "or neither (float32). Default: activations; on GPUs operands.",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        help="What to compile for. native: this CPU, with all its instructions and cores; llvm: any CPU of this "
        "machine's architecture, several times slower; aarch64-linux, armv8.2-a+fp16+dotprod, x86-64-v2-linux, "
        "-v3-linux, -v4-linux: another machine's; cuda:sm_90 and others: a GPU by its architecture; or a target of TVM "
        "as JSON."
    ),
]
Linker = Annotated[
    str | None,
    typer.Option(
        "--cc",
        metavar="COMMAND",
        help="The C++ compiler that links the library. Default: CXX, or one that is installed for the target.",
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        metavar="|".join(LOSSES),
        callback=one_of(LOSSES),
        help="Loss that is minimised. cross_entropy (of scores) and nll (of their logarithms) take class numbers; bce "
        "(of scores), mse, l1 and huber take values. model: the model takes the target, too, and returns the loss "
        "itself, a mean over the batch.",
    ),
]
LabelSmoothing = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="For cross_entropy: the part of each label that is spread over all classes."),
]
ClassWeights = Annotated[
    str | None,
    typer.Option(metavar="W,W,...", help="For cross_entropy, nll and bce: a weight for each class."),
]
IgnoreIndex = Annotated[
    int | None, typer.Option(help="For cross_entropy and nll: a class number whose positions have no loss.")
]
PositiveWeight = Annotated[
    str | None, typer.Option(metavar="W,W,...", help="For bce: for each class, the weight of where it is.")
]
Delta = Annotated[
    float | None,
    typer.Option(min=0.0, callback=finite_float32, help="For huber: where it becomes linear. Default: 1."),
]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="|".join(OPTIMIZERS),
        callback=one_of(OPTIMIZERS),
        help="Optimizer, with PyTorch's meaning of its settings; lamb is that of its paper, for large batches.",
    ),
]
ModelOutputs = Annotated[
    list[str] | None,
    typer.Option(
        "--model-output",
        metavar="NAME[=WEIGHT]",
        help="For a model with several outputs: one that is trained, and the weight of its loss (1 by default). "
        "Repeatable: the loss is the weighted sum, and the first output is the predictions. With --loss model: a loss, "
        "or the predictions.",
    ),
]
ModelTarget = Annotated[
    str | None,
    typer.Option(
        "--model-target", metavar="NAME", help="With --loss model: the input that is the target. Default: the last one."
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Train these parameters only, the rest is frozen: names of parameters or modules, with wildcards, such as "
        "'layer4.*,fc'. Default: all.",
    ),
]
Rate = Annotated[
    float | None, typer.Option(min=0.0, callback=finite_float32, help="Learning rate. Default: the optimizer's.")
]
Momentum = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, callback=finite_float32, help="Momentum, for sgd. Default: 0.")
]
Nesterov = Annotated[
    bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov's momentum, for sgd. Default: no.")
]
Betas = Annotated[
    tuple[float, float] | None,
    typer.Option(help="Decay rates of the two moments, for adam, adamw and lamb. Default: 0.9 0.999."),
]
LossScale = Annotated[
    str | None,
    typer.Option(
        metavar="N|dynamic",
        callback=loss_scale,
        help="Factor on the loss in the backward pass, undone before the update; dynamic: one that adapts, and updates "
        "whose gradients are not finite are left out. Default: 1024 for float16, else 1.",
    ),
]
BatchNorm = Annotated[
    str,
    typer.Option(
        "--bn",
        metavar="|".join(BATCH_NORMS),
        callback=one_of(BATCH_NORMS),
        help="Statistics of batch norms, in whichever mode the model was exported. train: of the batch, but the "
        "running ones in layers whose scale and shift are frozen; train-all: always of the batch; frozen: always the "
        "running ones, also of instance norms that have them.",
    ),
]
Dropout = Annotated[
    str,
    typer.Option(
        metavar="|".join(DROPOUTS),
        callback=one_of(DROPOUTS),
        help="train: every dropout that the model file has, even if it was exported in eval mode, and every random "
        "number of the model, seeded by --seed; off: none.",
    ),
]
WeightDecay = Annotated[
    float | None, typer.Option(min=0.0, callback=finite_float32, help="Weight decay. Default: the optimizer's.")
]
Decayed = Annotated[
    str,
    typer.Option(
        metavar="|".join(DECAYED),
        callback=one_of(DECAYED),
        help="Which parameters have weight decay: all, or matrices: none of one axis, such as biases and norms.",
    ),
]
Ema = Annotated[
    float | None,
    typer.Option(
        metavar="DECAY",
        min=0.0,
        max=1.0,
        callback=finite_float32,
        help="Keep a moving average of each parameter, such as by 0.999 a step; `run --averages` tests and saves it.",
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(callback=finite_float32, help="Scale all gradients to this norm where theirs together is larger."),
]
ClipValue = Annotated[
    float | None, typer.Option(callback=finite_float32, help="Bound each number of the gradients by this size.")
]
Accumulate = Annotated[
    int,
    typer.Option(
        metavar="K", min=1, help="Accumulate the gradients of K batches (micro-batches) in a step, and update once."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Choose recomputation and micro-batches so that the planned memory of a step is at most SIZE, such as "
        "512MB: state, inputs and all tensors at the peak.",
    ),
]
Recompute = Annotated[
    str,
    typer.Option(
        metavar="|".join(RECOMPUTED),
        callback=one_of(RECOMPUTED),
        help="Values of the forward pass that are computed again in the backward pass, for less memory and the same "
        "bits. cheap: none of convolutions and matrix products. auto: of the cheap ones those that cost hardly any "
        "time; with --memory, of all as many as the limit needs.",
    ),
]
Split = Annotated[
    bool,
    typer.Option(
        "--split",
        help="Give the step the functions gradients, apply and evaluate, too: for several processes or a loop of one's "
        "own.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of initial values and of dropout.")]
Offload = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help=f"Vendor libraries for convolutions: {', '.join(registry.NAMES)}; or {registry.NONE}: generated kernels "
        f"only; or {registry.AUTO}: a library where no kernel supports a convolution, or where `tune --offload` has "
        "measured it to be faster.",
    ),
]
Transforms = Annotated[
    bool,
    typer.Option(
        "--transforms",
        help="Allow Winograd's transform for 3x3 kernels where it is estimated to be faster; its rounding differs.",
    ),
]
Tuned = Annotated[
    bool,
    typer.Option(
        "--tuned/--no-tuned", help="Use the tilings and cuDNN engines that `convgrad tune` has found on this machine."
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of `convgrad tune`'s results. Default: CONVGRAD_TUNINGS, or one in the user's cache folder.",
    ),
]

Cache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Take what earlier builds have compiled from CONVGRAD_CACHE, or a folder in the user's cache folder, "
        "and keep what this one compiles there.",
    ),
]
