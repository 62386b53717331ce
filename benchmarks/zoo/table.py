# SPDX-License-Identifier: Apache-2.0
"""The Markdown table of the zoo's outcomes: counts, geometric means, a line for every case, and every refusal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean

import torch

from benchmarks.zoo.case import NOT_EXPORTED, RIGHT, Outcome
from tvm_convgrad.bench.results import cpu_name
from tvm_convgrad.report.tables import installed_version

_OTHERS = "## Rewritten, refused, wrong, or not exported"
COSTS = ("step ms", "ratio", "memory")
LIBRARIES = ("torchvision", "timm", "segmentation_models_pytorch", "onnx", "onnxscript", "apache-tvm")


def document(outcomes: Sequence[Outcome], command: str, cases: int) -> str:
    """The text of the document.

    Args:
        command: what was run, for the reader to repeat it.
        cases: how many there are, tried or not.
    """
    versions = ", ".join(f"{name} {installed_version(name)}" for name in LIBRARIES)
    forms = dict.fromkeys(each.form for each in outcomes)
    results = dict.fromkeys(each.result for each in sorted(outcomes, key=lambda each: each.result != RIGHT))
    counts = Counter((each.form, each.result) for each in outcomes)
    rows = [[form, *(counts[form, result] for result in results), *_means(outcomes, form)] for form in forms]
    parts = [
        "# Architectures of other people, measured",
        f"Written by\n\n    {command}",
        f"on {cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {versions}. "
        "`train` and `eval` are .pt2 files exported in that mode, `onnx` is what torch.onnx.export writes by default. "
        "A step is right if its loss, the gradients of all parameters and the new running statistics are those of "
        "PyTorch in float64, but for a few times the error that PyTorch itself makes in float32 "
        "(`benchmarks/zoo/comparison.py`). Ratios are PyTorch's eager step / ours, medians of turns in one process; "
        "memory is ours / PyTorch's, each in a process of its own.",
        f"{len(outcomes)} of {cases} cases have been tried. Imported ones were read and differentiated, and not built. "
        "Rewritten ones are right but for parameters that PyTorch's exporter has folded or computed in advance (batch "
        "norms, weight norms), of which the import warns. Parameters of one value are moved apart before an export to "
        "ONNX, as the exporter merges two layers of one tensor with equal values. Build times are of machines that may "
        "have been busy.",
        _table(("form", *results, "geometric mean of the ratio", "slower", "mean memory"), rows),
        "## Every case",
        _table(
            ("model", "form", "parameters", "result", "error", "of PyTorch", "batch", "build s", *COSTS),
            [_row(each) for each in outcomes],
        ),
    ]
    others = [(each.name, each.form, each.result, each.reason) for each in outcomes if each.reason]
    if others:
        parts += [_OTHERS, _table(("model", "form", "result", "why"), others)]
    return "\n\n".join(parts) + "\n"


def _means(outcomes: Sequence[Outcome], form: str) -> list[str]:
    """Of a form: the geometric mean of the ratios, how many are under 1, the geometric mean of the memory's."""
    of_form = [each for each in outcomes if each.form == form]
    ratios = [each.ratio for each in of_form if each.ratio]
    memories = [each.memory / each.torch_memory for each in of_form if each.memory and each.torch_memory]
    return [
        f"{geometric_mean(ratios):.2f}" if ratios else "",
        f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}" if ratios else "",
        f"{geometric_mean(memories):.0%}" if memories else "",
    ]


def _row(case: Outcome) -> list[str]:
    memory = case.memory / case.torch_memory if case.memory and case.torch_memory else math.nan
    return [
        case.name,
        case.form,
        "" if case.result == NOT_EXPORTED else f"{case.parameters / 1e6:.2f} M",
        case.result,
        _number(case.error, ".1e"),
        _number(case.float32_error, ".1e"),
        _number(case.batch, "d"),
        _number(case.build_seconds, ".0f"),
        _number(case.step and case.step * 1e3, ".1f"),
        _number(case.ratio, ".2f"),
        "" if math.isnan(memory) else f"{memory:.0%}",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def read(text: str) -> list[Outcome]:
    """The outcomes of a document, in the digits that it shows; without its sums."""
    every, _, others = text.partition("## Every case")[2].partition("\n## ")
    reasons = {(cells[0], cells[1]): cells[3] for cells in _rows(others)}
    return [_outcome(cells, reasons.get((cells[0], cells[1]), "")) for cells in _rows(every)]


def _rows(text: str) -> list[list[str]]:
    """The cells of the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]] for line in lines[2:]
    ]


def _outcome(cells: Sequence[str], reason: str) -> Outcome:
    name, form, parameters, result, error, float32_error, batch, build, step, ratio, memory = cells
    seconds = float(step) / 1e3 if step else None
    return Outcome(
        name,
        form,
        result,
        reason,
        parameters=round(float(parameters.removesuffix(" M") or 0) * 1e6),
        error=float(error) if error else None,
        float32_error=float(float32_error) if float32_error else None,
        batch=int(batch) if batch else None,
        build_seconds=float(build) if build else None,
        step=seconds,
        torch_step=seconds and seconds * float(ratio),
        ratio=float(ratio) if ratio else None,
        memory=round(float(memory.rstrip("%"))) if memory else None,
        torch_memory=100 if memory else None,
    )
