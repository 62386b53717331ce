# SPDX-License-Identifier: Apache-2.0
"""Calls of a vendor library's runtime in a region's C++ source: the runtime is opened when first called."""

from __future__ import annotations

import tvm

from relay_ops.patterns import Match
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.offload.registry import backend, verdict


class LibraryCalls:
    """The calls of one library in one region."""

    def __init__(self, name: str, symbol: str, target: tvm.target.Target) -> None:
        self._backend, self._symbol, self._target = backend(name), symbol, target
        self._numbers: dict[tuple[int, ...], str] = {}

    def head(self) -> str:
        """The function that opens the runtime and calls it."""
        name, library, setting = self._backend.name, self._backend.library(), self._backend.entry.setting
        key, value = map(_quoted, setting or ("", ""))
        return _SOURCE.format(
            name=name,
            path=_quoted(str(library)),
            file=_quoted(library.name),
            before=f"const int unset = getenv({key}) == 0;\n  if (unset) setenv({key}, {value}, 1);" if setting else "",
            after=f"if (unset) unsetenv({key});" if setting else "",
        )

    def call(self, match: Match, tensors: list[str]) -> str:
        """A call with its numbers."""
        name, direction = self._backend.name, match.direction.name
        found = verdict(name, direction, match.problem, match.epilogue, self._target)
        if isinstance(found, str):
            raise UnsupportedError(f"{self._symbol}: {direction} of {match.problem.descriptor}: {name}: {found}")
        numbers = tuple(self._backend.numbers(direction, match.problem, match.epilogue, self._target))
        own = self._numbers.setdefault(numbers, f"{self._symbol}_call{len(self._numbers)}")
        return f"run_{name}({own}, {', '.join(tensors)})"

    def functions(self) -> str:
        """The numbers of the calls."""
        return "".join(
            f"static const int64_t {own}[] = {{{', '.join(map(str, numbers))}}};\n"
            for numbers, own in self._numbers.items()
        )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    return f'"{escaped}"'


_SOURCE = """\
typedef int (*Run_{name})(const int64_t* numbers, Tensor* const* tensors, int count);

static void* open_{name}(void) {{
  {before}
  void* opened = dlopen({path}, RTLD_NOW | RTLD_LOCAL);
  if (!opened) opened = dlopen({file}, RTLD_NOW | RTLD_LOCAL);
  {after}
  return opened;
}}

template <typename... Given>
static int run_{name}(const int64_t* numbers, Given*... given) {{
  Tensor* const tensors[] = {{given...}};
  static Run_{name} known = 0;
  Run_{name} run = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
  if (!run) {{
    void* opened = open_{name}();
    if (opened) run = (Run_{name})dlsym(opened, "convgrad_{name}_run");
    if (!run) {{
      char text[1500];
      const char* why = dlerror();
      snprintf(text, sizeof(text),
               "{name}: this program calls the library %s, which cannot be loaded (%s). It lies in the user's cache "
               "where the program is built; put a copy of it and of what it needs on LD_LIBRARY_PATH.",
               {path}, why ? why : "it has no convgrad_{name}_run");
      TVMAPISetLastError(text);
      return -1;
    }}
    __atomic_store_n(&known, run, __ATOMIC_RELEASE);
  }}
  return run(numbers, tensors, sizeof...(given));
}}

"""

__all__ = ["LibraryCalls"]
