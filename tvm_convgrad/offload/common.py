# SPDX-License-Identifier: Apache-2.0
"""What a backend is, which there are, in which order they are asked, and the C code by which programs call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tvm_convgrad.errors import SetupError, UnsupportedError
from tvm_convgrad.offload import libraries
from tvm_convgrad.problem import ConvProblem

if TYPE_CHECKING:  # importing kernels imports TVM, and artifacts are read without it
    from tvm_convgrad.kernels.epilogue import Epilogue

AUTO, NONE = "auto", "none"
NAMES = ("onednn", "cudnn", "cutlass")
"""The backends, in the order in which `auto` asks them."""


@dataclass(frozen=True)
class Engine:
    """What a library uses for one call.

    Attributes:
        implementation: the library's own name of it.
        detail: what else there is to know, in words: formats, how many primitives, whether it is deterministic.
        workspace: bytes; None where that is known at run time only.
    """

    implementation: str
    detail: str
    workspace: int | None


class Backend(Protocol):
    """A vendor's library."""

    name: str
    kinds: tuple[str, ...]
    """Of targets, that it computes for: "llvm", "cuda"."""
    entry: str
    """The global function of its runtime that computes: (pointer to the numbers of a call, tensors...)."""
    setting: tuple[str, str] | None
    """An environment variable while the runtime is loaded, unless the user has set it."""

    def unavailable(self, target: Any) -> str:
        """Why programs for a target cannot use it at all, with the remedy; empty if they can."""

    def refusal(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> str:
        """Why it does not compute a face of a problem, by its rules; empty if it does. Needs no library."""

    def engine(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> Engine | str:
        """What the library uses for a target (a CPU: this machine's), or why nothing. Builds and loads the runtime.

        Raises:
            SetupError: the runtime cannot be built.
        """

    def numbers(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> list[int]:
        """The call as the runtime reads it."""

    def digest(self) -> str:
        """Of what its runtime is made from; empty where it is not installed."""

    def version(self) -> str:
        """What is loaded: the library's own version, once the runtime is."""

    def library(self) -> Path:
        """The runtime's library, built if it was not.

        Raises:
            SetupError: a package or the compiler is missing.
        """


@cache
def backend(name: str) -> Backend:
    """A backend by name.

    Raises:
        UnsupportedError: there is none of that name.
    """
    if name == "onednn":
        from tvm_convgrad.offload.onednn.backend import OneDnn

        return OneDnn()
    if name == "cudnn":
        from tvm_convgrad.offload.cudnn.backend import CuDnn

        return CuDnn()
    if name == "cutlass":
        from tvm_convgrad.offload.cutlass.backend import Cutlass

        return Cutlass()
    raise UnsupportedError(f"offload: there is no backend {name!r}; there is {', '.join(NAMES)}")


def names_for(target: Any) -> tuple[str, ...]:
    """The backends that compute for a target's kind, in the order in which `auto` asks them."""
    return tuple(name for name in NAMES if target.kind.name in backend(name).kinds)


def verdict(name: str, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> Engine | str:
    """What a backend would use for a face of a problem in a program for `target`, or why it does not compute it."""
    chosen = backend(name)
    reason = chosen.unavailable(target) or chosen.refusal(face, problem, epilogue, target)
    return reason or chosen.engine(face, problem, epilogue, target)


def parse_offload(text: str) -> tuple[str, ...]:
    """The value of --offload: "auto", "none", or names of backends with commas between them, in order of preference.

    Raises:
        UnsupportedError: an unknown name, or auto or none beside others.
    """
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in (AUTO, NONE, *NAMES)]
    if unknown or (len(names) > 1 and {AUTO, NONE} & set(names)):
        raise UnsupportedError(f"--offload {text}: use {AUTO}, {NONE}, or backends: {', '.join(NAMES)}")
    return names


def require(names: Sequence[str], target: Any) -> None:
    """Raise SetupError if a program for `target` cannot use one of the backends."""
    for name in names:
        reason = backend(name).unavailable(target)
        if reason:
            raise SetupError(f"offload to {name}: {reason}")


def load_runtime(name: str, stated: Path) -> None:
    """Load the runtime of a backend that a program calls: the library that it states, else the one of this machine.

    Raises:
        SetupError: neither can be had; the text has the command that helps.
    """
    chosen = backend(name)
    settings = dict([chosen.setting]) if chosen.setting else {}
    libraries.load(name, stated if stated.is_file() else chosen.library(), chosen.entry, settings)


def call_source(
    calls: Sequence[tuple[str, Sequence[int]]], entry: str, name: str, library: Path, setting: tuple[str, str] | None
) -> str:
    """C functions that pass their tensors on to a backend's runtime, each with the numbers of its call before them.

    The runtime's function is looked up when first called. If no library in the process has it, the runtime is loaded:
    from where it lay when this was compiled, or from where the loader looks for its name.

    Args:
        calls: the function's symbol and its numbers.
        entry, name: the backend's global function, and the backend.
        library: the runtime.
        setting: an environment variable while it is loaded, if it wants one.
    """
    functions = "\n".join(
        f"""static const int64_t {symbol}_call[] = {{{", ".join(map(str, numbers))}}};
TVM_FFI_DLL_EXPORT int __tvm_ffi_{symbol}(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {{
  return call_{name}({symbol}_call, args, count, result);
}}"""
        for symbol, numbers in calls
    )
    key, value = map(_quoted, setting or ("", ""))
    before = f"const int unset = getenv({key}) == 0;\n  if (unset) setenv({key}, {value}, 1);" if setting else ""
    return _SOURCE.format(
        entry=entry,
        name=name,
        path=_quoted(str(library)),
        file=_quoted(library.name),
        before=before,
        after=f"if (unset) unsetenv({key});" if setting else "",
        functions=functions,
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    return f'"{escaped}"'


_SOURCE = """#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>
#ifdef __cplusplus
extern "C" {{
#endif
static TVMFFIObjectHandle find_{name}(void) {{
  static const char entry[] = "{entry}";
  TVMFFIByteArray key = {{entry, sizeof(entry) - 1}};
  TVMFFIObjectHandle found = 0;
  return TVMFFIFunctionGetGlobal(&key, &found) == 0 ? found : 0;
}}
static int load_{name}(void) {{
  int loaded;
  {before}
  loaded = dlopen({path}, RTLD_NOW | RTLD_LOCAL) || dlopen({file}, RTLD_NOW | RTLD_LOCAL);
  {after}
  return loaded;
}}
static int call_{name}(const int64_t* call, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {{
  static TVMFFIObjectHandle known = 0;
  TVMFFIAny passed[9];
  int32_t i;
  TVMFFIObjectHandle run = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
  if (!run) {{
    run = find_{name}();
    if (!run && load_{name}()) run = find_{name}();
    if (!run) {{
      char text[1500];
      const char* why = dlerror();
      snprintf(text, sizeof(text),
               "{name}: this program calls the library %s, which cannot be loaded (%s). `convgrad build-runtime "
               "{name}` makes it in the user's cache; put its folder on LD_LIBRARY_PATH if it is not found there.",
               {path}, why ? why : "it lacks {entry}");
      TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
      return -1;
    }}
    __atomic_store_n(&known, run, __ATOMIC_RELEASE);
  }}
  if (count > 8) {{
    TVMFFIErrorSetRaisedFromCStr("ValueError", "{name}: more than 8 tensors");
    return -1;
  }}
  passed[0].type_index = kTVMFFIOpaquePtr;
  passed[0].zero_padding = 0;
  passed[0].v_ptr = (void*)call;
  for (i = 0; i < count; ++i) passed[i + 1] = args[i];
  return TVMFFIFunctionCall(run, passed, count + 1, result);
}}
{functions}
#ifdef __cplusplus
}}
#endif
"""

__all__ = [
    "AUTO",
    "NAMES",
    "NONE",
    "Backend",
    "Engine",
    "backend",
    "call_source",
    "load_runtime",
    "names_for",
    "parse_offload",
    "require",
    "verdict",
]
