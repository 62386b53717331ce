# SPDX-License-Identifier: Apache-2.0
"""Ranks of PyTorch's DistributedDataParallel with the PyTorch bridge and without, each on one core.

    python -m benchmarks.bridge_ddp --model mobilenet_v2 --batch 8 --layout NHWC --json out/ddp.json

Each rank is a process with one thread, on a core of its own where there are as many. They train one network on batches
of their own, by turns with the bridge and without: at each turn they meet at a barrier, then train a step; what counts
is the time until the last of them is done. Gradients are summed by gloo, in buckets of DDP's own size. SGD.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

WARM = 60
"""Steps in which choices are made, at the most."""


def measure(arguments: argparse.Namespace) -> None:
    """What one rank does; rank 0 prints the result as JSON."""
    import torch
    import torch.distributed as distributed
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import tvm_convgrad.torch as bridge
    from tvm_convgrad.bench.bridge_networks import BRIDGE_NETWORKS

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    make, shape = BRIDGE_NETWORKS[arguments.model]
    model, x = make().train(), torch.randn(arguments.batch, *shape)
    if arguments.layout == "NHWC":
        form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=form), x.to(memory_format=form)
    target = torch.randint(10, (arguments.batch,), generator=torch.Generator().manual_seed(rank))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(parallel(x), target).backward()
        optimizer.step()

    def slowest(work: Callable[[], None]) -> tuple[float, float]:
        """Seconds until the last rank is done, and the most processor time of a rank."""
        distributed.barrier()
        processor, begin = time.process_time(), time.perf_counter()
        work()
        found = torch.tensor([time.perf_counter() - begin, time.process_time() - processor], dtype=torch.float64)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return float(found[0]), float(found[1])

    enabled = partial(bridge.enable, wait=True)
    with enabled():
        for _ in range(WARM):
            step()
            waiting = sum(told.where in ("compiling", "measuring") for told in bridge.explain())
            left = torch.tensor(float(waiting))
            distributed.all_reduce(left)  # all ranks take as many steps
            if not left:
                break
    pairs = []
    for _ in range(arguments.steps):
        with enabled():
            ours = slowest(step)
        pairs.append((ours, slowest(step)))
    where = [told.where for told in bridge.explain()]
    if rank == 0:
        result = {
            "model": arguments.model,
            "batch": arguments.batch,
            "layout": arguments.layout,
            "ranks": ranks,
            "ratio": median(own[0] / ours[0] for ours, own in pairs),
            "processor_ratio": median(own[1] / ours[1] for ours, own in pairs),
            "seconds": median(ours[0] for ours, _ in pairs),
            "seconds_without": median(own[0] for _, own in pairs),
            "pairs": len(pairs),
            "calls": {word: where.count(word) for word in ("kernels", "both", "PyTorch")},
        }
        print(json.dumps(result), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, and give what rank 0 has measured."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    place = {
        "WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.bridge_ddp", *sys.argv[1:], "--rank"]
    processes = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(arguments.ranks)
    ]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= arguments.ranks:
        for process, core in zip(processes, cores, strict=False):
            os.sched_setaffinity(process.pid, {core})
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed; its message is above.")
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mobilenet_v2", help="of bench/bridge_networks.py")
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--layout", choices=("NCHW", "NHWC"), default="NHWC")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="pairs of steps")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments)
        return
    result = launch(arguments)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
