# SPDX-License-Identifier: Apache-2.0
"""The command: each network in a process of its own, which imports one framework."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import benchmarks.bridge_bound
from benchmarks.bridge_bound.result import Bound, show
from tvm_convgrad.bench.bridge import BRIDGES, FORMATS, Request
from tvm_convgrad.threads import intended_threads


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bridge_bound",
        description=benchmarks.bridge_bound.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bridge", choices=BRIDGES, default="torch")
    parser.add_argument("--model", help="names of bench/bridge_networks.py or bench/jax_networks.py, by commas")
    parser.add_argument("--batch", default="8", help="samples, by commas")
    parser.add_argument("--layout", default=",".join(FORMATS), help="NCHW, NHWC, or both")
    parser.add_argument("--threads", type=int, default=intended_threads(), help="of PyTorch")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the pairs of each comparison")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measured(bridge: str, request: Request) -> Bound:
    command = [sys.executable, "-m", "benchmarks.bridge_bound", "--bridge", bridge]
    done = subprocess.run(
        [*command, "--alone", json.dumps(asdict(request))], stdout=subprocess.PIPE, text=True, check=True
    )
    return Bound(**json.loads(done.stdout.splitlines()[-1]))


def _alone(bridge: str, request: Request) -> Bound:
    if bridge == "torch":
        from benchmarks.bridge_bound.torch_steps import measure
    else:
        from benchmarks.bridge_bound.jax_steps import measure
    return measure(request)


def main() -> None:
    """Measure, and print a table."""
    arguments = _arguments()
    if arguments.alone:
        print(json.dumps(asdict(_alone(arguments.bridge, Request(**json.loads(arguments.alone))))))
        return
    framework, found = BRIDGES[arguments.bridge], []
    for model in arguments.model.split(",") if arguments.model else framework.default_models:
        for batch in map(int, arguments.batch.split(",")):
            for layout in arguments.layout.split(","):
                request = Request(model, batch, layout, arguments.seconds, arguments.threads, "")
                found.append(_measured(arguments.bridge, request))
                if arguments.json:
                    arguments.json.write_text(json.dumps(list(map(asdict, found)), indent=1) + "\n")
    show(framework.name, found)


main()
