# SPDX-License-Identifier: Apache-2.0
"""Run the federated example on this machine: a server and two clients, which are processes on the loopback.

    python examples/digits_cnn.py --out out
    convgrad build out/digits_cnn.onnx -o out/step.so --lr 0.05 --momentum 0.9
    python examples/federated/loopback.py out/step.so out/digits.npz

On machines of their own, each of these commands runs where it belongs, with certificates in place of --insecure; see
Flower's documentation of deployments.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = Path(sys.executable).parent
SECONDS = 300.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_for(port: int) -> None:
    """Return when someone listens on a port of the loopback."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server has not answered on port {port} for 60 s.")


def main() -> int:
    """The command; its exit code is that of `flwr run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=Path, help="what `convgrad build` wrote")
    parser.add_argument("data", type=Path, help=".npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    server, *clients = free_ports(1 + arguments.clients)
    if not (PROGRAMS / "flower-superlink").exists():
        sys.exit("loopback: Flower is not installed here; pip install 'tvm-convgrad[federated]'")
    address = f"127.0.0.1:{server}"
    with tempfile.TemporaryDirectory(prefix="federated-") as home:
        environment = os.environ | {"FLWR_HOME": home, "FLWR_TELEMETRY_ENABLED": "0", "TVM_NUM_THREADS": "1"}
        environment["PATH"] = f"{PROGRAMS}{os.pathsep}{environment.get('PATH', '')}"
        (Path(home) / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n[superlink.loopback]\naddress = "{address}"\ninsecure = true\n'
        )
        started: list[subprocess.Popen[bytes]] = []
        with (Path(home) / "log").open("wb") as log:

            def start(*command: str) -> None:
                started.append(
                    subprocess.Popen(
                        [str(PROGRAMS / command[0]), *command[1:]], env=environment, stdout=log, stderr=log
                    )
                )

            try:
                start(
                    "flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(server)
                )
                wait_for(server)
                for number, port in enumerate(clients):
                    node = f"partition-id={number} num-partitions={arguments.clients}"
                    start(
                        "flower-supernode",
                        "--insecure",
                        "--superlink",
                        address,
                        "--port",
                        str(port),
                        "--node-config",
                        node,
                    )
                config = f"step='{arguments.step.resolve()}' data='{arguments.data.resolve()}' "
                config += f"clients={arguments.clients} rounds={arguments.rounds}"
                run = [str(PROGRAMS / "flwr"), "run", str(HERE), "loopback", "--stream", "--run-config", config]
                return subprocess.run(run, env=environment, check=False, timeout=SECONDS).returncode
            finally:
                for process in started:
                    process.terminate()
                for process in started:
                    process.wait()


if __name__ == "__main__":
    sys.exit(main())
