# SPDX-License-Identifier: Apache-2.0
"""The Relay lane against the Relax lane and PyTorch: 16 gradients, on one thread and on two.

    python benchmarks/relay_lane.py --relay .venv-relay/bin/python --markdown out/relay.md

Layers: 3x3 of 64 channels at 56x56, 3x3 of 256 at 14x14, 1x1 from 256 to 64 at 56x56, depthwise 3x3 of 96 at 56x56;
batch 8, float32, wgrad and dgrad, NCHW and NHWC. A TVM with Relay and one without cannot share a process, so the Relay
lane runs in a process of its own, and the three take turns (`measure.timing`) across both. The library of Relay is that
of `relay.build` at opt_level 3. What is measured is `GraphModule.run`; each result is compared with PyTorch's.

TVM's threads sleep as soon as they have no work (TVM_THREAD_POOL_SPIN_COUNT=0, in both processes): those of the other
process cannot be made to settle by calls of this one (`timing.SETTLE`), and spinning take a core from PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.measure.timing import Call, turn

LAYERS = {
    "3x3 64 ch 56²": "mb8ic64ih56oc64oh56kh3ph1",
    "3x3 256 ch 14²": "mb8ic256ih14oc256oh14kh3ph1",
    "1x1 256→64 56²": "mb8ic256ih56oc64kh1",
    "depthwise 96 56²": "g96mb8ic96ih56oc96kh3ph1",
}
LAYOUTS = {"NCHW": "", "NHWC": "_lay=NHWC:OHWI:NHWC"}
GRADIENTS = {"wgrad": "backward_weight", "dgrad": "backward_data"}
MCPU = "skylake-avx512"
"""What both TVMs compile for: LLVM 10, which the TVM with Relay has, knows no newer AMD CPU with AVX-512."""

ROUNDS = 5
"""Of turns, at the least."""

TOLERANCE = 1e-3
"""Largest difference to PyTorch's result, relative to its largest element: float32 sums in another order."""


@dataclass(frozen=True)
class Row:
    """The fastest turn of each lane for one gradient, in seconds; what else runs on a machine disturbs that least."""

    threads: int
    layer: str
    layout: str
    gradient: str
    relax: float
    torch: float
    relay: float
    rounds: int

    @property
    def to_relax(self) -> float:
        """Relay's time / Relax's."""
        return self.relay / self.relax

    @property
    def to_torch(self) -> float:
        """PyTorch's time / Relay's."""
        return self.torch / self.relay


class RelayProcess:
    """The process of the Relay lane, which answers one JSON line to each."""

    def __init__(self, python: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TVM_NUM_THREADS": str(threads)},
        )

    def ask(self, **request: Any) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"relay_lane: the process of Relay ended with exit code {self._process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """The Relay lane: compiles the gradient that a request names, or times a turn of it."""
    import tvm  # the TVM with Relay
    from tvm import relay
    from tvm.contrib import graph_executor

    from relay_ops.ir import call_of

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TVM prints
    for line in sys.stdin:
        request = json.loads(line)
        if "problem" in request:
            problem = ConvProblem.from_descriptor(request["problem"])
            direction = DIRECTIONS[request["direction"]]
            operands = [
                relay.var(name, shape=problem.tensors[name][0], dtype=problem.tensors[name][1])
                for name in direction.operands
            ]
            module = tvm.IRModule.from_expr(relay.Function(operands, call_of(direction, problem, *operands)))
            with tvm.transform.PassContext(opt_level=3):
                library = relay.build(module, f"llvm -mcpu={MCPU} -num-cores={request['cores']}")
            executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
            with np.load(request["arrays"]) as arrays:
                for name in direction.operands:
                    executor.set_input(name, arrays[name])
                executor.run()
                wanted, found = arrays["result"], executor.get_output(0).numpy()
            call = Call("relay", executor.run, np.asarray)
            answer: float = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        else:
            answer = turn(call, request["expected"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def measured(relay: RelayProcess, threads: int, seconds: float, only: str, scratch: Path) -> Iterator[Row]:
    """The row of each gradient."""
    import tvm

    from tvm_convgrad.bench.baselines import BASELINES
    from tvm_convgrad.bench.configuration import Configuration
    from tvm_convgrad.measure.program import random_operands, tvm_call

    target = tvm.target.Target({"kind": "llvm", "mcpu": MCPU, "num-cores": threads})
    config = Configuration(target, False, "kernel")
    for layer, text in LAYERS.items():
        for layout, suffix in LAYOUTS.items():
            for gradient, direction in GRADIENTS.items():
                if only not in f"{layer} {layout} {gradient}":
                    continue
                problem = ConvProblem.from_descriptor(text + suffix)
                arrays = random_operands(direction, problem)
                ours = tvm_call(direction, problem, arrays, config.target, config.impl)
                (theirs,) = BASELINES["torch"](direction, problem, arrays, config, same_layout=True)
                result = theirs.read(theirs.run())
                np.savez(scratch, result=result, **arrays)
                request = {"problem": problem.descriptor, "direction": direction, "cores": threads}
                errors = {
                    "Relay": relay.ask(**request, arrays=str(scratch)),
                    "Relax": float(np.abs(ours.read(ours.run()) - result).max() / np.abs(result).max()),
                }
                for lane, error in errors.items():
                    if not error <= TOLERANCE:
                        raise SystemExit(f"{layer} {layout} {gradient}: {lane} differs from PyTorch by {error:.1e}")
                times: dict[str, list[float]] = {"relax": [], "torch": [], "relay": []}
                begin = time.perf_counter()
                while len(times["relax"]) < ROUNDS or time.perf_counter() - begin < seconds:
                    last = {name: found[-1] if found else 0.0 for name, found in times.items()}
                    times["relax"].append(turn(ours, last["relax"]))
                    times["relay"].append(relay.ask(expected=last["relay"]))
                    times["torch"].append(turn(theirs, last["torch"]))
                yield Row(
                    threads,
                    layer,
                    layout,
                    gradient,
                    **{name: min(found) for name, found in times.items()},
                    rounds=len(times["relax"]),
                )


def work(threads: int, relay: str, seconds: float, only: str, scratch: Path) -> None:
    """Measure with a number of threads, in this process and one of Relay; print a JSON line for each row."""
    from tvm_convgrad.bench.contenders import prepare_torch
    from tvm_convgrad.threads import use_threads

    use_threads(threads)
    prepare_torch(threads, None)
    process = RelayProcess(relay, threads)
    for row in measured(process, threads, seconds, only, scratch):
        print(json.dumps(asdict(row)), flush=True)
    process.end()


def document(rows: list[Row], command: str, machine: str, versions: str) -> str:
    """The table as Markdown."""
    from tvm_convgrad.bench.measure import geometric_mean

    lines = [
        "# The Relay lane, measured",
        "",
        f"Written by\n\n    {command}\n",
        f"on {machine},",
        f"{versions}. Milliseconds of a call: the fastest of",
        "the turns that the three take in rounds. Tensors of PyTorch are in the row's layout.",
        "`benchmarks/relay_lane.py` describes what is measured.",
        "",
    ]
    for threads in dict.fromkeys(row.threads for row in rows):
        found = [row for row in rows if row.threads == threads]
        to_relax = geometric_mean(row.to_relax for row in found)
        to_torch = geometric_mean(row.to_torch for row in found)
        lines += [
            f"## {threads} thread{'s' * (threads > 1)}",
            "",
            "| layer | layout | gradient | Relax lane | PyTorch | Relay | Relay / Relax | PyTorch / Relay |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(
                f"| {row.layer} | {row.layout} | {row.gradient} | {row.relax * 1e3:.2f} | {row.torch * 1e3:.2f} "
                f"| {row.relay * 1e3:.2f} | {row.to_relax:.2f} | {row.to_torch:.2f} |"
                for row in found
            ),
            f"| geometric mean | | | | | | **{to_relax:.2f}** | **{to_torch:.2f}** |",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    """Measure with each number of threads in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", default=".venv-relay/bin/python", help="a Python whose TVM has Relay")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=2.0, help="for the rounds of each gradient")
    parser.add_argument("--only", default="", help="gradients whose name has this, such as 'NHWC dgrad'")
    parser.add_argument("--markdown", type=Path, help="write the table here, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.work:
        work(options.work, options.relay, options.seconds, options.only, options.scratch)
        return 0
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Collect the rows of all numbers of threads."""
    import tempfile
    from importlib.metadata import version

    from tvm_convgrad.bench.results import _cpu
    from tvm_convgrad.codegen.hardware import machine_of, native_target

    command = [sys.executable, __file__, "--relay", options.relay, "--only", options.only]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = str(Path(folder) / "arrays.npz")
        for threads in options.threads:
            words = ["--seconds", str(options.seconds), "--scratch", scratch, "--work", str(threads)]
            environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "TVM_THREAD_POOL_SPIN_COUNT": "0"}
            with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, env=environment) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    rows.append(Row(**json.loads(line)))
                    print(line, end="", file=sys.stderr)
            if process.returncode:
                return process.returncode
    asked = [options.relay, "-c", "import tvm; print(tvm.__version__)"]
    other = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[-1]
    machine = machine_of(native_target())
    versions = f"apache-tvm {version('apache-tvm')} (Relax), TVM {other} (Relay), torch {version('torch')}"
    where = f"{_cpu()} ({machine.name if machine else 'no kernels'}, compiled for {MCPU})"
    text = document(rows, "make bench-relay", where, versions)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
