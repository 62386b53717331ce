# SPDX-License-Identifier: Apache-2.0
"""The initial state as data of an artifact, which its function `init` copies into new tensors.

A constant of TVM's virtual machine is in memory as long as the library is loaded, once more than the state itself: of
networks with many weights a third of a step's memory. Data of the library are pages of its file, which are dropped when
they have been copied. Zeros, such as most slots of optimizers, take no place.
"""

from __future__ import annotations

import os
import shutil
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.training.ir.graph import function_scope
from tvm_convgrad.training.model.model import Array
from tvm_convgrad.training.passes.in_place import INIT

COPY = "convgrad_initial_state"
"""The function of the library that copies: of the number of a tensor in the state, and a tensor that it fills."""
_ALIGNMENT = 64
_ZEROS = -1
_LARGE = 1 << 30
"""Bytes from which on the data are out of the reach of short addresses on x86-64; clang takes them from version 17."""
_SOURCE = Path(__file__).parent / "runtime" / "initial_state.c"


@dataclass(frozen=True)
class InitialState:
    """The values of the state's tensors, in order."""

    values: Sequence[Array]

    def module(self, module: tvm.IRModule) -> tvm.IRModule:
        """The step's module with an `init` that calls the library's function for each tensor, for a CPU."""
        builder = relax.BlockBuilder()
        with function_scope(builder, INIT, []):
            with builder.dataflow():
                copies = [
                    relax.call_dps_packed(
                        COPY, relax.Tuple([relax.prim_value(number)]), relax.TensorType(value.shape, str(value.dtype))
                    )
                    for number, value in enumerate(self.values)
                ]
                output = builder.emit_output(relax.Tuple([builder.emit(copy) for copy in copies]))
            builder.emit_func_output(output)
        found = module.clone()
        found[INIT] = builder.get()[INIT]
        return found

    @cached_property
    def offsets(self) -> list[int]:
        """Where in the data each tensor is; -1: it is zero. An array that is there twice has one place."""
        places: dict[int, int] = {}
        end = 0
        for value in self.values:
            if id(value) in places:
                continue
            places[id(value)] = end if _bytes_of(value).any() else _ZEROS  # by bytes: -0.0 is not all zeros
            end += round_up(value.nbytes, _ALIGNMENT) if places[id(value)] == end else 0
        return [places[id(value)] for value in self.values]

    def write(self, folder: Path) -> Path:
        """Write the data and the C file that makes them data of the library; gives the C file."""
        data, source = folder / "initial_state.bin", folder / _SOURCE.name
        with data.open("wb") as file:
            for offset, value in zip(self.offsets, self.values, strict=True):
                if offset >= file.tell():
                    file.write(bytes(offset - file.tell()))
                    file.write(_bytes_of(value).data)
        pairs = zip(self.offsets, self.values, strict=True)
        entries = ", ".join(f"{{{offset}, {value.nbytes}}}" for offset, value in pairs)
        large = int(data.stat().st_size >= _LARGE)
        header = (
            f"#define STATE_FILE {_assembler_string(data)}\n"
            f"#define STATE_TENSORS {entries}\n"
            f"#define STATE_IS_LARGE {large}\n"
        )
        (folder / "initial_state_table.h").write_text(header, encoding="ascii")
        shutil.copy(_SOURCE, source)
        return source


def _bytes_of(value: Array) -> Array:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _assembler_string(path: Path) -> str:
    """A path as a C string that holds an assembler's string: what is no letter, digit or such as an octal escape.

    Names of folders are any bytes. Assemblers take octal escapes alone for all of them, and C takes the backslash of
    these twice.
    """
    plain = frozenset(b"/._-" + (string.ascii_letters + string.digits).encode())
    text = "".join(chr(byte) if byte in plain else f"\\\\{byte:03o}" for byte in os.fsencode(path))
    return f'"\\"{text}\\""'


__all__ = ["COPY", "InitialState"]
