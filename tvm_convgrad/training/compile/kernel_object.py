# SPDX-License-Identifier: Apache-2.0
"""One kernel as an object file: what is compiled apart from the others, by this process or a worker, and its key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import tvm
from tvm.target import codegen
from tvm_ffi import serialization

from relax_ops import compat
from tvm_convgrad import __version__
from tvm_convgrad.training.passes import internal_calls, symbolic_divisions

_OF_THE_MODULE = ("global_symbol", "op_pattern")


@dataclass(frozen=True)
class Settings:
    """What the kernels of a module are compiled with, as texts, which go to other processes.

    Attributes:
        target: of TVM, with its LLVM options.
        context: the configuration of the pass context, in TVM's JSON.
        level: its level of optimisation.
    """

    target: str
    context: str
    level: int

    @classmethod
    def current(cls, target: tvm.target.Target) -> Settings:
        """Those of `target` in the pass context that is in force."""
        context = tvm.transform.PassContext.current()
        return cls(str(target), tvm.ir.save_json(context.config), int(context.opt_level))


def kernel_key(text: str, name: str, settings: Settings) -> str:
    """What a kernel's object is found by: all that its code depends on.

    Args:
        text: the function in TVM's JSON, without its name.
        name: it, less what tells equal kernels apart.
    """
    parts = json.dumps([text, name, settings.target, settings.context, settings.level, compilers()])
    return hashlib.sha256(parts.encode()).hexdigest()


_SOURCES = (__file__, internal_calls.__file__, symbolic_divisions.__file__, compat.__file__)
"""The files of the pipeline."""


@lru_cache(maxsize=1)
def compilers() -> list[str]:
    """The versions of what makes code of a kernel: this package and its pipeline, TVM and its library, LLVM."""
    maps = Path("/proc/self/maps").read_text()  # of Linux, where alone steps are built; a library by any path
    loaded = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libtvm" in line}
    states = [(Path(path).name, Path(path).stat()) for path in sorted(loaded)]
    return [
        __version__,
        *(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in _SOURCES),
        tvm.__version__,
        metadata.version("apache-tvm-ffi"),
        f"LLVM {codegen.llvm_version_major()}",
        *(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states),
    ]


def without_name(function: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """A kernel without what tells only where it stands in a module: its name, and what fusion reads of it."""
    for attribute in _OF_THE_MODULE:
        if function.attrs is not None and attribute in function.attrs:
            function = function.without_attr(attribute)
    return function


def kernel_text(function: tvm.tirx.PrimFunc) -> str:
    """A kernel in TVM's JSON, as `without_name` has it."""
    return str(tvm.ir.save_json(without_name(function)))


def read_kernel(text: str) -> tvm.tirx.PrimFunc:
    """The kernel of `kernel_text`."""
    return serialization.from_json_graph_str(text)  # tvm.ir.load_json looks for types that older TVMs have written


def make_object(function: tvm.tirx.PrimFunc, name: str, settings: Settings, folder: Path) -> bytes:
    """The object file of a lowered kernel, which exports it as `name`; files are made in `folder`."""
    path = folder / "kernel.o"
    module = tvm.IRModule({name: function.with_attr("global_symbol", name)})
    with tvm.transform.PassContext(opt_level=settings.level, config=tvm.ir.load_json(settings.context)):
        library = tvm.tirx.build(module, tvm.target.Target(settings.target), internal_calls.PIPELINE)
    library.write_to_file(str(path))
    content = path.read_bytes()
    path.unlink()  # some file systems write a file to the disk when it is overwritten, which takes milliseconds
    return content


__all__ = ["Settings", "compilers", "kernel_key", "kernel_text", "make_object", "read_kernel", "without_name"]
