# SPDX-License-Identifier: Apache-2.0
"""Calls of C loops in a region's C++ source, with vectors of the target's instruction set."""

from __future__ import annotations

import tvm

from relay_ops.c_loops import C_TYPES, function, refuses
from relay_ops.c_tiles import vector_types
from relay_ops.patterns import Match
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.errors import UnsupportedError

_FEATURES = {
    "AVX-512": "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,prefer-vector-width=512",
    "AVX2": "avx2,fma",
}
"""What a compiler is told of an instruction set that is not its default."""

_LEAST_VECTOR = 16
"""Bytes of the vectors that nearly every CPU has; compilers split what it has not."""

_CLANG = 'clang attribute push(__attribute__((target("{}"))), apply_to = function)'


class LoopCalls:
    """The calls of loops in one region."""

    def __init__(self, symbol: str, target: tvm.target.Target) -> None:
        self._symbol = symbol
        machine = machine_of(target)
        self._features = _FEATURES.get(machine.name, "") if machine is not None else ""
        self._vector_bytes = machine.vector_bytes if machine is not None else _LEAST_VECTOR
        self._functions: dict[str, str] = {}

    def head(self) -> str:
        """What the loops call."""
        own = "static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }\n\n"
        return vector_types(tuple(C_TYPES.values())) + own

    def call(self, match: Match, tensors: list[str]) -> str:
        """A call of the function of the match's direction and problem."""
        reason = refuses(match.problem)
        if reason is not None:
            raise UnsupportedError(f"{self._symbol}: {match.problem.descriptor}: {reason}")
        # The text is the same for the same direction of the same problem.
        text = function(
            match.direction,
            match.problem,
            "NAME",
            accumulate=match.epilogue.accumulate,
            vector_bytes=self._vector_bytes,
        )
        name = self._functions.setdefault(text, f"{self._symbol}_part{len(self._functions)}")
        return f"{name}({', '.join(f'start_of({tensor})' for tensor in tensors)})"

    def functions(self) -> str:
        """The functions, for the target's instruction set."""
        text = "\n".join(text.replace("NAME", name) for text, name in self._functions.items())
        if not self._features:
            return text
        return (
            f"#if defined(__clang__)\n#pragma {_CLANG.format(self._features)}\n"
            f'#elif defined(__GNUC__)\n#pragma GCC push_options\n#pragma GCC target("{self._features}")\n#endif\n'
            f"{text}"
            "#if defined(__clang__)\n#pragma clang attribute pop\n#elif defined(__GNUC__)\n#pragma GCC pop_options\n"
            "#endif\n"
        )


__all__ = ["LoopCalls"]
