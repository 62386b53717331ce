# SPDX-License-Identifier: Apache-2.0
"""`convgrad bench`: layers, whole training steps or per-sample gradients, timed against baselines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_convgrad.commands import option_values, options
from tvm_convgrad.commands.given import refuse_given
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.files import check_destination
from tvm_convgrad.offload.registry import ENTRIES, NAMES, names_of_kind

if TYPE_CHECKING:
    from tvm_convgrad.bench.configuration import Configuration
    from tvm_convgrad.bench.run_options import RunOptions
    from tvm_convgrad.bench.suites import Layer

DIRECTIONS = ("backward_weight", "backward_data", "forward")
"""What --direction all is, in the order of the tables."""

LAYOUTS = ("NCHW", "NHWC")
STEP_LAYOUTS = (*LAYOUTS, "NHWC:OHWI")

OF_LAYERS = ("suite", "problem", "direction", "against", "resume", "roofline", "markdown")
OF_STEPS = ("optimizer", "loss")
NOT_OF_PROBLEMS = ("suite", "batch", "layout")
NOT_PER_SAMPLE = ("layout", "optimizer", "loss")
NOT_OF_BRIDGES = (*OF_LAYERS, *OF_STEPS, "per_sample", "impl", "dtype", "target")
"""Options that mean nothing where layers, steps, single problems, per-sample gradients or bridges are measured."""


def bench(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME[,…]|all|kinds",
            help="Networks whose convolutions are measured. all: resnet50, mobilenet_v2, vgg16, convnext_t. kinds: "
            "resnext50 (grouped), deeplab (dilated), i3d (3-D), unet (transposed).",
        ),
    ] = "all",
    problem: Annotated[
        list[str] | None,
        typer.Option(metavar="DESC", help="Measure this convolution instead, given by its descriptor; repeatable."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL[,…]",
            help="Measure whole training steps instead: of resnet18_cifar, resnet18, mobilenet_v2, convnext_t, "
            "groupnorm_cifar, or of model files.",
        ),
    ] = None,
    per_sample: Annotated[
        bool,
        typer.Option(
            "--per-sample", help="With --step: measure the gradients of each sample, against torch.func.vmap(grad)."
        ),
    ] = False,
    bridge: Annotated[
        str | None,
        typer.Option(
            metavar="torch|jax",
            help="Measure the framework's own training steps with our kernels under them and without, of --step "
            "(default: of torch resnet18, resnet50, mobilenet_v2, convnext_t, cnn3d, unet; of jax resnet18, "
            "mobilenet_v2).",
        ),
    ] = None,
    calls: Annotated[
        bool,
        typer.Option(
            "--calls",
            help="With --bridge: also time each different convolution call of the steps, as it was chosen, beside the "
            "framework's own.",
        ),
    ] = False,
    batch: Annotated[
        str | None, typer.Option(metavar="N[,…]", help="Batch sizes. Default: 8; for a model file its own batch.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NCHW[,NHWC]",
            help="Layouts of the data. With --step also NHWC:OHWI, which names the kernels' layout. "
            "Default: NCHW,NHWC.",
        ),
    ] = None,
    direction: Annotated[
        str,
        typer.Option(
            metavar=f"{options.DIRECTION_METAVAR}[,…]",
            help="Directions of the convolution: gradient of the weights, gradient of the data, forward.",
        ),
    ] = "wgrad,dgrad",
    impl: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(("kernel", "transforms", *NAMES)),
            help="The implementation that is measured. kernel: generated kernels; transforms: these with Winograd's "
            f"transform allowed; or a vendor library. Default: kernel; on a GPU {names_of_kind('cuda')[0]}.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|float16|bfloat16",
            help="Type of all tensors of a layer; with --step of the operands of convolutions.",
        ),
    ] = "float32",
    against: Annotated[
        str,
        typer.Option(
            metavar="|".join(("torch", "torch-same", "jax", "stock", *NAMES)) + "[,…]",
            help="The baselines. torch: the faster of PyTorch's two layouts; torch-same: PyTorch in the layout of the "
            "problem; stock: TVM's own operators.",
        ),
    ] = "torch",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each measurement, beyond compiling.")] = 0.5,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of ours and of baselines. Default: TVM_NUM_THREADS, or all cores."),
    ] = None,
    optimizer: options.Optimizer = "sgd",
    loss: options.Loss = "cross_entropy",
    target: options.Target = "native",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all measurements as JSON.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the measurements that an earlier run left in the file of --json."),
    ] = False,
    roofline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the layers under the machine's roofline, as PNG.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write tables of all layers, as Markdown.")
    ] = None,
) -> None:
    """Time convolutions, or training steps with --step or --bridge, alternately with baselines such as PyTorch.

    A ratio is time of the baseline / ours, the median over interleaved pairs: above 1 ours is faster. The slowest
    layers are listed first, geometric means of groups of layers at the end.
    """
    if bridge is not None:
        _bench_bridge(context, bridge, step, _batches(batch), layout, seconds, threads, calls, json)
        return
    if calls:
        raise typer.BadParameter("--calls is for --bridge; without --bridge leave --calls out.")
    _refuse_what_means_nothing(context, step=step is not None, per_sample=per_sample, problem=bool(problem))
    directions = option_values.parse_directions(direction, DIRECTIONS)
    only = ENTRIES[impl].layout if step is not None and impl is not None and impl in ENTRIES else None
    layouts = _names("--layout", layout or only or "NCHW,NHWC", STEP_LAYOUTS if step is not None else LAYOUTS)
    batches = _batches(batch)
    if resume and json is None:
        raise typer.BadParameter("--resume needs --json, the file of the earlier run.")
    for path in (json, roofline, markdown):
        if path is not None:
            check_destination(path)
    from tvm_convgrad.bench.run_options import RunOptions

    run = RunOptions(_configuration(target, impl, dtype, per_sample), seconds, threads, json)
    if per_sample and step is not None:
        from tvm_convgrad.bench.per_sample import run_per_sample, show_per_sample

        show_per_sample(run_per_sample(_models(step), batches or None, run))
    elif step is not None:
        from tvm_convgrad.bench.steps import TrainingOptions, run_steps, show_steps

        show_steps(run_steps(_models(step), batches or None, TrainingOptions(layouts, optimizer, loss), run))
    else:
        from tvm_convgrad.bench.baselines import BASELINES
        from tvm_convgrad.bench.layers import layers_of, problems_from

        baselines = _names("--against", against, BASELINES)
        suites = _suites(suite)
        layers = problems_from(problem, dtype) if problem else layers_of(suites, batches or [8], layouts, dtype)
        _bench_layers(layers, directions, baselines, run, resume=resume, roofline=roofline, markdown=markdown)


def _bench_bridge(
    context: typer.Context,
    bridge: str,
    step: str | None,
    batches: list[int],
    layout: str | None,
    seconds: float,
    threads: int | None,
    calls: bool,
    path: Path | None,
) -> None:
    """Measure training steps with a bridge and without it."""
    from tvm_convgrad.bench.bridge import BRIDGES, run_bridge
    from tvm_convgrad.bench.bridge_tables import show_bridge

    _names("--bridge", bridge, tuple(BRIDGES))
    framework = BRIDGES[bridge]
    refuse_given(context, NOT_OF_BRIDGES, "not of --bridge, which measures a framework's own steps: leave out")
    if path is not None:
        check_destination(path)
    if threads is not None and bridge == "jax":
        raise UnsupportedError(
            "--threads has no effect on --bridge jax: XLA uses all cores of the process; limit them by taskset."
        )
    models = framework.default_models if step is None else _names("--step", step, framework.models)
    layouts = _names("--layout", layout or "NCHW,NHWC", LAYOUTS)
    sizes = batches or [8]
    found = run_bridge(bridge, models, sizes, layouts, seconds=seconds, threads=threads, calls=calls, path=path)
    show_bridge(bridge, found)


def _bench_layers(
    layers: list[Layer],
    directions: list[str],
    baselines: list[str],
    run: RunOptions,
    *,
    resume: bool,
    roofline: Path | None,
    markdown: Path | None,
) -> None:
    """Measure layers, write the files that are wanted, and print the tables."""
    from tvm_convgrad.bench.layers import run_layers, show

    results = run_layers(layers, directions, baselines, run, resume=resume)
    if roofline is not None:
        from tvm_convgrad.bench.roofline_plot import save_roofline

        save_roofline(roofline, results.measurements, results.sustained)
    if markdown is not None:
        from tvm_convgrad.bench.markdown import save_markdown

        save_markdown(markdown, results, "convgrad " + shlex.join(sys.argv[1:]))
    show(results)


def _configuration(target: str, impl: str | None, dtype: str, per_sample: bool) -> Configuration:
    """The configuration of --target, --impl and --dtype.

    Raises:
        typer.BadParameter: an unknown value, or one that --per-sample does not take.
        UnsupportedError, SetupError: as `configuration_of`.
    """
    from tvm_convgrad.bench.configuration import DTYPES, KERNEL, Configuration, configuration_of
    from tvm_convgrad.kernels.transforms import TRANSFORMS
    from tvm_convgrad.offload.registry import NAMES
    from tvm_convgrad.training.compile import targets

    if len(_names("--impl", impl or KERNEL, (KERNEL, TRANSFORMS, *NAMES))) > 1:
        raise typer.BadParameter(f"--impl {impl}: give one implementation.")
    _names("--dtype", dtype, DTYPES)
    if not per_sample:
        if target != "cuda":  # this machine's GPU, which `configuration_of` looks for
            option_values.parse_target(target, gpus=True)
        return configuration_of(target, impl, dtype)
    if impl not in (None, KERNEL):
        raise typer.BadParameter(f"--per-sample measures the generated kernels, not {impl}; leave --impl out.")
    if dtype != DTYPES[0]:
        raise typer.BadParameter(f"--per-sample measures {DTYPES[0]}; leave --dtype out.")
    return Configuration(targets.parse_target(target), gpu=False, impl=KERNEL)


def _batches(text: str | None) -> list[int]:
    """The numbers of --batch; none without it.

    Raises:
        typer.BadParameter: one is not a positive number.
    """
    sizes = text.split(",") if text is not None else []
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"--batch {text}: give positive numbers.")
    return [int(size) for size in sizes]


def _models(text: str) -> list[str]:
    """The models of --step; a file whose name has a comma is one model."""
    return [text] if Path(text).exists() else list(dict.fromkeys(text.split(",")))


def _suites(text: str) -> list[str]:
    """The suites of --suite.

    Raises:
        typer.BadParameter: an unknown one.
    """
    from tvm_convgrad.bench.suites import KINDS, NETWORKS, SUITES

    groups = {"all": NETWORKS, "kinds": KINDS}
    if text in groups:
        return list(groups[text])
    if not set(text.split(",")) <= set(SUITES):
        raise typer.BadParameter(f"--suite {text}: use all, kinds, or some of {', '.join(SUITES)}.")
    return _names("--suite", text, SUITES)


def _refuse_what_means_nothing(context: typer.Context, *, step: bool, per_sample: bool, problem: bool) -> None:
    """Refuse options that were given and that would change nothing here.

    Raises:
        typer.BadParameter: with the first kind of them.
    """
    if per_sample and not step:
        raise typer.BadParameter("--per-sample needs --step, which names the network.")
    of_steps = "of whole training steps: to measure one, give --step MODEL; to measure layers, leave out"
    of_layers = (
        "of layers, but --step measures a whole training step, always beside PyTorch: to measure layers, leave out "
        "--step; to measure the step, leave out"
    )
    kinds = [
        (not step, OF_STEPS, of_steps),
        (step, OF_LAYERS, of_layers),
        (per_sample, NOT_PER_SAMPLE, "not of --per-sample, which has no update and one layout: leave out"),
        (problem, NOT_OF_PROBLEMS, "part of the descriptor of --problem: to measure that problem, leave out"),
    ]
    for here, options_of, why in kinds:
        if here:
            refuse_given(context, options_of, why)


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
