# SPDX-License-Identifier: Apache-2.0
"""The C code by which compiled programs call a backend's runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


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
        setting: an environment variable while it is loaded, if it needs one.
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

__all__ = ["call_source"]
