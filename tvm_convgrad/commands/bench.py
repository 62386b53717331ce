# SPDX-License-Identifier: Apache-2.0
"""`convgrad bench`: the kernels of a network's convolutions, or its whole training step, against others."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.errors import ArtifactError

FACES = ("backward_weight", "backward_data", "forward")
LAYOUTS = ("NCHW", "NHWC")
STEP_LAYOUTS = (*LAYOUTS, "NHWC:OHWI")

OF_LAYERS = ("suite", "problem", "face", "against", "resume", "roofline", "markdown")
OF_STEPS = ("optimizer", "loss")
NOT_OF_PROBLEMS = ("suite", "batch", "layout")
NOT_PER_SAMPLE = ("layout", "optimizer", "loss")
"""Options that mean nothing where layers, steps, single problems or per-sample gradients are measured."""


def bench(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME[,…]|all",
            help="resnet50, mobilenet_v2, vgg16, convnext_t (all of them: all); "
            "resnext50 (grouped), deeplab (dilated), i3d (3-D), unet (transposed) (all of them: kinds).",
        ),
    ] = "all",
    problem: Annotated[
        list[str] | None, typer.Option(metavar="DESC", help="This problem instead of a suite; repeatable.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A whole training step instead: resnet18_cifar, resnet18, mobilenet_v2, convnext_t, groupnorm_cifar, "
            "or a model file.",
        ),
    ] = None,
    per_sample: Annotated[
        bool, typer.Option("--per-sample", help="Of --step: gradients of each sample, against torch.func.vmap(grad).")
    ] = False,
    batch: Annotated[
        str | None, typer.Option(metavar="N[,…]", help="Batch sizes. Default: 8; for a model file what it says.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="NCHW[,NHWC]", help="Layouts; of a step also NHWC:OHWI. Default: NCHW,NHWC."),
    ] = None,
    face: Annotated[str, typer.Option(metavar="FACE[,…]", help="backward_weight, backward_data, forward, or all.")] = (
        "backward_weight,backward_data"
    ),
    impl: Annotated[
        str | None,
        typer.Option(
            metavar="kernel|transforms|onednn|cudnn|cutlass",
            help="What is measured: generated kernels, these with Winograd's transform allowed, or a vendor library. "
            "Default: kernel; on a GPU cudnn.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|float16|bfloat16", help="Of all tensors of layers, on a GPU; of a step's convolutions."
        ),
    ] = "float32",
    against: Annotated[
        str,
        typer.Option(
            metavar="torch|torch-same|jax|stock|onednn|cudnn|cutlass[,…]",
            help="The rivals; torch-same: PyTorch in the same layout, where torch is the better of two.",
        ),
    ] = "torch",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for the pairs of each measurement.")] = 0.5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every party. Default: TVM_NUM_THREADS, or all cores.")
    ] = None,
    optimizer: options.Optimizer = "sgd",
    loss: options.Loss = "cross_entropy",
    target: options.Target = "native",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all measurements as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an earlier run left in --json.")] = False,
    roofline: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a roofline, as PNG.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write tables of all layers.")] = None,
) -> None:
    """Interleaved pairs, medians of their ratios; worst first, then geometric means."""
    _refuse_what_means_nothing(context, step=step is not None, per_sample=per_sample, problem=bool(problem))
    faces = list(FACES) if face == "all" else _names("--face", face, FACES)
    own = "NHWC:OHWI" if step is not None and impl == "cutlass" else "NCHW,NHWC"
    layouts = _names("--layout", layout or own, STEP_LAYOUTS if step is not None else LAYOUTS)
    sizes = batch.split(",") if batch is not None else []
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"--batch {batch}: give positive numbers.")
    if resume and json is None:
        raise typer.BadParameter("--resume needs --json, the file of the earlier run.")
    for path in (json, roofline, markdown):
        if path is not None and not path.parent.is_dir():
            raise ArtifactError(f"{path}: the folder {path.parent} does not exist; make it first.")
    batches = [int(size) for size in sizes]
    from tvm_convgrad.bench.place import KERNEL, TYPES, place_of
    from tvm_convgrad.kernels.transforms import TRANSFORMS
    from tvm_convgrad.offload.common import NAMES

    if len(_names("--impl", impl or KERNEL, (KERNEL, TRANSFORMS, *NAMES))) > 1:
        raise typer.BadParameter(f"--impl {impl}: give one.")
    _names("--dtype", dtype, TYPES)
    if not per_sample and target != "cuda":  # this machine's GPU, which is looked for where it is needed
        options.parse_target(target, gpus=True)
    if per_sample and impl not in (None, KERNEL):
        raise typer.BadParameter(f"--per-sample measures the generated kernels, not {impl}; leave --impl out.")
    if per_sample and dtype != TYPES[0]:
        raise typer.BadParameter(f"--per-sample measures {TYPES[0]}; leave --dtype out.")
    if per_sample and step is not None:
        from tvm_convgrad.bench.per_sample import run_per_sample, show_per_sample

        found = run_per_sample(step, batches or None, target=target, seconds=seconds, threads=threads, path=json)
        show_per_sample(found)
        return
    if step is not None:
        from tvm_convgrad.bench.steps import run_steps, show_steps

        show_steps(
            run_steps(
                step,
                batches or None,
                layouts,
                optimizer=optimizer,
                loss=loss,
                place=place_of(target, impl, dtype),
                seconds=seconds,
                threads=threads,
                path=json,
            )
        )
        return
    from tvm_convgrad.bench.rivals import RIVALS
    from tvm_convgrad.bench.suites import KINDS, NETWORKS, SUITES

    rivals = _names("--against", against, RIVALS)
    groups = {"all": NETWORKS, "kinds": KINDS}
    names = list(groups[suite]) if suite in groups else _names("--suite", suite, SUITES)
    from tvm_convgrad.bench.layers import layers_of, problems_from, run_layers, show
    from tvm_convgrad.bench.roofline import save_roofline

    layers = problems_from(problem, dtype) if problem else layers_of(names, batches or [8], layouts, dtype)
    place = place_of(target, impl, dtype)
    results = run_layers(layers, faces, rivals, place=place, seconds=seconds, threads=threads, path=json, resume=resume)
    if roofline is not None:
        save_roofline(roofline, results.measurements, results.held)
    if markdown is not None:
        from tvm_convgrad.bench.markdown import save_markdown

        save_markdown(markdown, results, "convgrad " + shlex.join(sys.argv[1:]))
    show(results)


def _refuse_what_means_nothing(context: typer.Context, *, step: bool, per_sample: bool, problem: bool) -> None:
    """Refuse options that were given and would change nothing.

    Raises:
        typer.BadParameter: with the first kind of them.
    """
    if per_sample and not step:
        raise typer.BadParameter("--per-sample goes with --step, the network.")
    of_steps = "of whole training steps: give --step MODEL, or leave out"
    of_layers = "of layers, and --step measures whole steps beside PyTorch: leave out --step, or"
    kinds = [
        (not step, OF_STEPS, of_steps),
        (step, OF_LAYERS, of_layers),
        (per_sample, NOT_PER_SAMPLE, "not of --per-sample, which has no update and one layout: leave out"),
        (problem, NOT_OF_PROBLEMS, "said by the descriptor of --problem: leave out --problem, or"),
    ]
    for here, options_of, why in kinds:
        sources = {name: context.get_parameter_source(name) for name in options_of} if here else {}
        # by its name, as click's class is typer's own in newer versions
        given = [f"--{name}" for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if given:
            verb = "is" if len(given) == 1 else "are"
            raise typer.BadParameter(f"{' and '.join(given)} {verb} {why} {' and '.join(given)}.")


def _names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The names that an option's value lists.

    Raises:
        typer.BadParameter: one of them is unknown.
    """
    names, allowed = list(dict.fromkeys(text.split(","))), list(known)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise typer.BadParameter(f"{option} {text}: use {', '.join(allowed)}.")
    return names
