# SPDX-License-Identifier: Apache-2.0
"""The libraries that this package's host process loads: kernels, and the functions that they call. It loads TVM."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tvm

from tvm_convgrad.bridge.compiler import compiler_command
from tvm_convgrad.bridge.job import EXTRA, HEADERS, HOST, SYMBOL, TORCH_ENTRIES, XLA_HOST, Job, package_folder
from tvm_convgrad.codegen.hardware import cores_of, machine_of, native_target
from tvm_convgrad.core.entries import default_path
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.tuned import use_winners
from tvm_convgrad.training.compile.kernel_object import Settings, make_object
from tvm_convgrad.training.compile.workspace import workspace
from tvm_convgrad.tuning.store import Store

HOST_SOURCES = {HOST: "host.cc", XLA_HOST: "xla.cc", TORCH_ENTRIES: "torch.cc"}

_COMPILED = ("-shared", "-fPIC", "-O2", "-std=c++17", "-DNDEBUG")
"""How a library is compiled. PyTorch's headers have checks without NDEBUG that PyTorch itself is built without."""

_OPTIONS: Mapping[str, Callable[[Path], Sequence[str]]] = {
    XLA_HOST: lambda folder: [f"-I{folder / 'include'}"],
    TORCH_ENTRIES: lambda folder: [
        *("-std=c++20", "-w", f"-I{folder / 'include'}", f"-L{folder / 'lib'}"),
        *("-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"),
    ],
}
"""What the compiler is told where a package's folder is."""


def make_kernel(job: Job) -> bytes:
    """The library of a job, for this CPU.

    Raises:
        UnsupportedError: no kernel computes it.
        SetupError: there is no C++ compiler.
    """
    target = native_target()
    machine, problem = machine_of(target), job.problem
    if machine is None:
        raise UnsupportedError(f"{job.direction} of {job.descriptor}: no kernels are made for this CPU ({target})")
    with use_winners(Store(default_path(), cores_of(target))):
        choice = chooser.choose(problem, job.direction, machine)
    if not choice.is_kernel:
        raise UnsupportedError(f"{job.direction} of {job.descriptor}: no kernel computes it: {choice.reason}")
    epilogue = Epilogue(**dict.fromkeys(EXTRA[job.extra], True))
    function = chooser.build(problem, job.direction, machine, choice, SYMBOL, epilogue)
    with workspace() as folder, tvm.transform.PassContext():
        source = folder / "kernel.o"
        source.write_bytes(make_object(function, SYMBOL, Settings.current(target), folder))
        return _linked(source, folder)


def make_host(name: str) -> bytes:
    """The library of a job that is not a kernel; HEADERS has the package whose headers it needs.

    Raises:
        SetupError: there is no C++ compiler, or not that package.
    """
    package = HEADERS.get(name)
    options: Sequence[str] = ()
    if package is not None:
        folder = package_folder(package)
        if folder is None:
            raise SetupError(f"{package}, whose headers {HOST_SOURCES[name]} needs, is not installed")
        options = _OPTIONS[name](folder)
    with workspace() as made:
        return _linked(Path(__file__).parent / "runtime" / HOST_SOURCES[name], made, options)


def _linked(source: Path, folder: Path, options: Sequence[str] = ()) -> bytes:
    compiler = compiler_command()
    if not compiler:
        raise SetupError("there is no C++ compiler, which links kernels: install g++ or clang++, or set CXX")
    library, named = folder / "library.so", shlex.join(compiler)
    command = [*compiler, *_COMPILED, "-o", str(library), str(source), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SetupError(
            f"the C++ compiler {named} cannot be started ({error.strerror}): install g++ or clang++, or set CXX"
        ) from error
    if done.returncode:
        raise SetupError(f"the C++ compiler {named} cannot make {source.name} a library: {_complaint(done)}")
    return library.read_bytes()


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """What a compiler says of its failure: the first error, not the last line, which is often a caret or a count."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return next(iter(errors or lines[-1:]), f"exit code {done.returncode}")


__all__ = ["HOST_SOURCES", "make_host", "make_kernel"]
