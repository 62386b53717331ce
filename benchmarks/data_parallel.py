# SPDX-License-Identifier: Apache-2.0
"""Data parallel training beside PyTorch's DistributedDataParallel: losses, throughput, and how it would scale.

    python -m benchmarks.data_parallel --model resnet18_cifar --batch 32 --ranks 2 --json out/ddp.json
    python -m benchmarks.data_parallel --scale out/ddp.json

Both train the same network from the same values on the same batches, in turns, in the same processes: on each turn
all ranks meet at a barrier, then train a step of one of them; what counts is the time of rank 0 until its step is done.
Each rank has one thread of each library, unless --threads says otherwise. PyTorch's network is in channels_last unless
--contiguous, with buckets of DDP's own size. SGD with momentum, cross-entropy.

--scale computes from the measured time of a step without communication, t, the bytes of the gradients, S, and the
latency of a small all-reduce on two ranks, what N machines on a network of B bytes/s would have with a ring all-reduce
behind each step:

    time = t + 2 (N - 1) / N * S / B + 2 (N - 1) * latency / 2           efficiency = t / time
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvm_convgrad.training.runtime.torch_ranks import TorchRanks

RATE, MOMENTUM = 0.05, 0.9
WARMUP = 3


def build(model: str, batch: int, folder: Path) -> Path:
    """Export the network and build its step in two, by the command; its path."""
    import torch

    program = torch.export.export(network_of(model)[0], (torch.zeros(batch, *network_of(model)[1]),))
    torch.export.save(program, folder / "net.pt2")
    step = folder / "step.so"
    options = ["--target", "native", "--split", "--lr", str(RATE), "--momentum", str(MOMENTUM), "--bn", "train-all"]
    command = [sys.executable, "-m", "tvm_convgrad", "build", str(folder / "net.pt2"), "-o", str(step), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return step


def network_of(model: str) -> tuple[Any, tuple[int, ...]]:
    """A network with its initial values, always the same, and the shape of a sample."""
    import torch
    from torch import nn

    from tvm_convgrad.bench.bridge_networks import BRIDGE_NETWORKS
    from tvm_convgrad.bench.networks import network

    torch.manual_seed(0)
    if model == "smooth":  # small, and without kinks, so that losses of many steps can be compared
        layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1)]
        layers += [nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
        return nn.Sequential(*layers).train(), (3, 8, 8)
    if model in BRIDGE_NETWORKS:
        make, shape = BRIDGE_NETWORKS[model]
        return make().train(), shape
    made, size = network(model)
    return made, (3, size, size)


def measure(arguments: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the JSON."""
    import torch

    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.training.runtime.torch_ranks import joined

    use_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    with joined() as ranks:
        result = in_turns(arguments, ranks)
        # DistributedDataParallel, which refers to itself, has to end before the process group whose threads it uses.
        gc.collect()
    if ranks.rank == 0:
        print(json.dumps(result))


def in_turns(arguments: argparse.Namespace, ranks: TorchRanks) -> dict[str, Any]:
    """Train both in turns; the result is what this rank has measured."""
    import torch
    import torch.distributed as distributed
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from tvm_convgrad.training.runtime.parallel import DataParallel
    from tvm_convgrad.training.runtime.session import Session

    session = Session(arguments.step)
    parallel = DataParallel(session, ranks)
    model, shape = network_of(arguments.model)
    layout = torch.contiguous_format if arguments.contiguous else torch.channels_last
    if len(shape) == 3:
        model = model.to(memory_format=layout)
    theirs = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=RATE, momentum=MOMENTUM)
    random = np.random.default_rng(ranks.rank)
    batches = [
        (random.standard_normal((arguments.batch, *shape), "float32"), random.integers(0, 10, arguments.batch))
        for _ in range(4)
    ]

    def their_step(x: np.ndarray, y: np.ndarray) -> float:
        given = torch.from_numpy(x)
        given = given.to(memory_format=layout) if len(shape) == 3 else given
        optimizer.zero_grad()
        loss = functional.cross_entropy(theirs(given), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    found: dict[str, list[float]] = {"ours": [], "theirs": [], "our_losses": [], "their_losses": [], "alone": []}
    for number in range(WARMUP + arguments.steps):
        x, y = batches[number % len(batches)]
        distributed.barrier()
        begin = time.perf_counter()
        loss, _ = parallel.step(x, y)
        ours = time.perf_counter() - begin
        distributed.barrier()
        begin = time.perf_counter()
        other = np.array(their_step(x, y) / ranks.size)
        theirs_seconds = time.perf_counter() - begin
        ranks.sum(other)
        found["our_losses"].append(loss)
        found["their_losses"].append(float(other))
        distributed.barrier()
        begin = time.perf_counter()
        gradients = session.gradients(x, y, 0)
        own = time.perf_counter() - begin
        flat = np.array(gradients.flat)
        distributed.barrier()
        begin = time.perf_counter()
        ranks.sum(flat)
        reduced = time.perf_counter() - begin
        if number >= WARMUP:
            found["ours"].append(ours)
            found["theirs"].append(theirs_seconds)
            found["alone"].append(own)
            found.setdefault("reduced", []).append(reduced)
    small: list[float] = []
    for _ in range(200):
        begin = time.perf_counter()
        ranks.sum(np.zeros(1))
        small.append(time.perf_counter() - begin)
    ratios = [theirs / ours for ours, theirs in zip(found["ours"], found["theirs"], strict=True)]
    return {
        "model": arguments.model,
        "batch": arguments.batch,
        "ranks": ranks.size,
        "threads": arguments.threads,
        "seconds": median(found["ours"]),
        "ddp_seconds": median(found["theirs"]),
        "ratio": median(ratios),
        "gradients_seconds": median(found["alone"]),
        "all_reduce_seconds": median(found["reduced"]),
        "small_all_reduce_seconds": median(small),
        "gradient_bytes": session.artifact.flat.size * 4 if session.artifact.flat else 0,
        "loss_difference": max(abs(a - b) for a, b in zip(found["our_losses"], found["their_losses"], strict=True)),
        "losses": [found["our_losses"][0], found["our_losses"][-1]],
        "first_losses": list(zip(found["our_losses"][:WARMUP], found["their_losses"], strict=False)),
    }


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, start the ranks, and give what rank 0 has measured."""
    with tempfile.TemporaryDirectory(prefix="data-parallel-") as folder:
        step = build(arguments.model, arguments.batch, Path(folder))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        processes = []
        for rank in range(arguments.ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1"}
            place |= {"MASTER_PORT": port, "TVM_BIND_THREADS": "0", "OMP_NUM_THREADS": str(arguments.threads)}
            place["TVM_NUM_THREADS"] = str(arguments.threads)
            command = [sys.executable, "-m", "benchmarks.data_parallel", *sys.argv[1:], "--step", str(step)]
            processes.append(subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed; its message is above.")
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result


def scale(path: Path, machines: list[int], gigabits: list[float]) -> str:
    """The table of what N machines would have; the formula is at the top of this file."""
    measured = json.loads(path.read_text())
    alone, size = measured["seconds"] - measured["all_reduce_seconds"], measured["gradient_bytes"]
    latency = measured["small_all_reduce_seconds"]
    lines = [
        f"| machines | {' | '.join(f'{speed:g} Gb/s' for speed in gigabits)} |",
        "|" + "---|" * (len(gigabits) + 1),
    ]
    for count in machines:
        cells = []
        for speed in gigabits:
            total = alone + 2 * (count - 1) / count * size / (speed * 1e9 / 8) + 2 * (count - 1) * latency / 2
            cells.append(f"{count * measured['batch'] / total:.0f}/s, {alone / total:.0%}")
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet18_cifar", help="of bench/networks.py or bench/bridge_networks.py; or smooth"
    )
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--contiguous", action="store_true", help="PyTorch's network in NCHW")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--scale", type=Path, metavar="JSON", help="compute the table of such a result")
    parser.add_argument("--step", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scale:
        print(scale(arguments.scale, [1, 2, 4, 8, 16, 32, 64], [10.0, 100.0]))
    elif arguments.step:
        measure(arguments)
    else:
        result = launch(arguments)
        print(json.dumps(result, indent=2))
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
