# SPDX-License-Identifier: Apache-2.0
"""A new user's five minutes: an empty environment, the wheel, and README's commands; `make test-wheel` runs it.

    python -m tests.release.five_minutes DIST

DIST has the wheel and the source distribution of `python -m build`. The wheel is compared with the sources, both are
installed, the commands and programs of README are run in its order and as they stand there, in a folder with a model
and data and no sources, and the sizes of what was installed are listed. Sections that need another framework are named
with the reason why they are left out. This interpreter makes the model; it needs the extra demo.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tests.readme import sections

ROOT = Path(__file__).parents[2]
PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize")
LEFT_OUT = {
    "In Relay": "needs a TVM that has Relay; make test-relay runs it",
    "Under PyTorch": "installs PyTorch; make test-torch runs it",
    "Under JAX": "installs JAX; make test-jax runs it",
}
"""Sections that are not followed, and why."""

GIVEN = """
import numpy
with numpy.load("data.npz") as data:
    images, labels = data["x_train"][:32], data["y_train"][:32]
mean_over_ranks = lambda gradients: gradients
"""
"""What README takes for given in its programs; the mean of one rank is its own."""

SIZES = """
import importlib.metadata as metadata, pathlib
rows = []
for each in metadata.distributions():
    files = [pathlib.Path(file.locate()) for file in each.files or ()]
    rows.append((sum(file.stat().st_size for file in files if file.is_file()), each.name, each.version))
for size, name, version in sorted(rows, reverse=True):
    print(f"{size / 2**20:8.1f} MiB  {name} {version}")
print(f"{sum(size for size, *_ in rows) / 2**20:8.1f} MiB  in all")
"""


def check_contents(wheel: Path) -> None:
    """The wheel has every file of the packages that git knows, and nothing else but its own description."""
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = set(listed.splitlines())
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    missing, strange = sorted(wanted - packed), sorted(packed - wanted)
    if missing or strange:
        raise SystemExit(f"{wheel.name}: without {missing}, with {strange}")
    print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 2**20:.1f} MiB")


class User:
    """Somebody with an environment and a folder of his own."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.bin, self.folder = venv / "bin", folder
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "CONVGRAD_CACHE": str(folder / "cache")}
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)

    def run(self, *words: str) -> None:
        """A command, which must not fail."""
        start = time.perf_counter()
        subprocess.run(words, check=True, cwd=self.folder, env=self.environment)
        print(f"    {time.perf_counter() - start:6.1f} s  {shlex.join(words)[:100]}", flush=True)

    def shell(self, line: str) -> None:
        """A line for a shell, which must not fail."""
        self.run("bash", "-c", line)

    def output(self, *words: str) -> str:
        """What a command prints, without the line's end."""
        return subprocess.run(
            words, check=True, cwd=self.folder, env=self.environment, capture_output=True, text=True
        ).stdout.strip()

    def python(self, program: str) -> None:
        """A program, which must not fail."""
        path = self.folder / "program.py"
        path.write_text(program, encoding="utf-8")
        self.run("python", path.name)


def for_user(line: str, wheel: Path) -> str | None:
    """A command line of README for this user, who has the wheel where README has the sources.

    None stands for a line that needs PyTorch, or a CPU of another kind.
    """
    installs = re.fullmatch(r"pip install '?\.(\[\w+\])?'?", line)
    if installs:
        return f"python -m pip install --quiet --disable-pip-version-check '{wheel}{installs[1] or ''}'"
    return None if line.startswith("torchrun ") else line


def follow_readme(user: User, wheel: Path) -> None:
    """All that README says, in its order, but for what is LEFT_OUT; what it installs is the wheel."""
    for heading, section in sections().items():
        reason = LEFT_OUT.get(heading)
        if heading == "On a device" and platform.machine() != "x86_64":
            reason = "its target is an x86 CPU"
        print(f"{heading}{f': left out, as it {reason}' if reason else ''}", flush=True)
        if reason:
            continue
        for line in section.commands:
            command = for_user(line, wheel)
            if command is None:
                print(f"             left out, as it needs PyTorch: {line}", flush=True)
            else:
                user.shell(command)
        for program in section.python:
            user.python(GIVEN + program)


def check_versions(user: User, wheel: Path) -> None:
    """The command, and the C library's header in the wheel, have the version of the wheel's name."""
    version = wheel.name.split("-")[1]
    said = user.output("convgrad", "--version")
    header = Path(user.output("convgrad", "config", "--includedir"), "convgrad.h").read_text(encoding="utf-8")
    if said != version:
        raise SystemExit(f"{wheel.name}: convgrad --version says {said}; build the wheel again.")
    if f'#define CONVGRAD_VERSION "{version}"' not in header:
        raise SystemExit(f"{wheel.name}: convgrad.h is of another version than {version}; mend its CONVGRAD_VERSION.")


def main() -> None:
    """Be the user; the exit code tells whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    options = parser.parse_args()
    (wheel,), (source,) = sorted(options.dist.glob("*.whl")), sorted(options.dist.glob("*.tar.gz"))
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "folder")
        make = [sys.executable, ROOT / "examples" / "digits_cnn.py", "--out", folder]
        subprocess.run(make, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        (folder / "digits_cnn.onnx").rename(folder / "model.onnx")
        (folder / "digits.npz").rename(folder / "data.npz")
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        user = User(Path(name, "venv"), folder)
        follow_readme(user, wheel.absolute())
        check_versions(user, wheel)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        print(f"a new user was done after {time.perf_counter() - start:.0f} s, and {seconds:.0f} s of the CPU")
        user.python(SIZES)
        pip = ("python", "-m", "pip", "--disable-pip-version-check")
        user.run(*pip, "check")
        user.run(*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(source.absolute()))
        user.run("convgrad", "--version")


if __name__ == "__main__":
    main()
