# SPDX-License-Identifier: Apache-2.0
"""Writing an artifact: the compiled step, its manifest and a seal in one shared library (see `runtime.artifact`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import tvm
from tvm_ffi import libinfo

from tvm_convgrad.codegen.hardware import cores_of
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.files import check_destination, write_atomic
from tvm_convgrad.offload.registry import NAMES, backend
from tvm_convgrad.targets import required_features
from tvm_convgrad.training.compile.initial_state import InitialState
from tvm_convgrad.training.compile.linking import Linker, linker_for
from tvm_convgrad.training.compile.workspace import workspace
from tvm_convgrad.training.model.model import TensorSchema
from tvm_convgrad.training.runtime.artifact import ARTIFACT, Artifact, versions
from tvm_convgrad.training.runtime.envelope import Manifest, seal
from tvm_convgrad.training.runtime.origin import Origin
from tvm_convgrad.training.runtime.schema import TensorSpec
from tvm_convgrad.training.step.module import StateSchema, StepModule
from tvm_convgrad.training.step.predictor import Predictor

_LITERAL_BYTES = 2000
_PLAIN = ("-O2", "-g0")
"""Without -O ziglang checks arithmetic by a runtime of 4 MB; its debugging information names the temporary folder."""


def built_for_of(target: tvm.target.Target) -> Manifest:
    """What code depends on, for the manifest: the target's text, and the cores that CPU kernels are made for."""
    return {"target": str(target), "cores": cores_of(target) if target.kind.name == "llvm" else None}


def make_manifest(
    step: StepModule, target: tvm.target.Target, convolutions: Sequence[Manifest], origin: Origin | None = None
) -> Manifest:
    """The manifest of `step` compiled for `target`, with its convolutions, and the model's file if there is one."""

    schema = {
        "inputs": [_entry(tensor) for tensor in step.inputs],
        "target": _entry(step.target),
        "prediction": _entry(step.prediction),
        "state": [_entry(tensor) for tensor in step.state],
        **({"flat": step.flat.to_json()} if step.flat is not None else {}),
    }
    return _manifest(schema, step.options, target, convolutions, origin)


def make_inference_manifest(
    predictor: Predictor, target: tvm.target.Target, convolutions: Sequence[Manifest], origin: Origin | None = None
) -> Manifest:
    """The same of an inference library, which has neither target nor state."""
    schema = {
        "inputs": [_entry(tensor) for tensor in predictor.inputs],
        "prediction": _entry(predictor.prediction),
        "state": [],
    }
    return _manifest(schema, predictor.options, target, convolutions, origin)


def _entry(tensor: TensorSchema | StateSchema) -> Manifest:
    spec = TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype)
    if isinstance(tensor, TensorSchema):
        return replace(spec, range=tensor.range, least=tensor.least, limits=tensor.limits).to_json()
    return replace(spec, role=tensor.role).to_json()


def _manifest(
    schema: Manifest,
    options: Manifest,
    target: tvm.target.Target,
    convolutions: Sequence[Manifest],
    origin: Origin | None,
) -> Manifest:
    model = {"model": origin.to_json()} if origin is not None else {}
    described = json.dumps({"schema": _without_ranges(schema), "options": options} | model, sort_keys=True)
    return {
        "versions": versions(),
        **({"step": hashlib.sha256(described.encode()).hexdigest()} if model else {}),
        **built_for_of(target),
        "cpu_features": required_features(target),
        "schema": schema,
        "options": options,
        **model,
        "runtimes": {name: str(backend(name).library()) for name in NAMES if _calls(convolutions, name)},
        "gradients": [entry for entry in convolutions if "backward" in entry["op"]],
        "forward": [entry for entry in convolutions if "backward" not in entry["op"]],
    }


def _without_ranges(schema: Manifest) -> Manifest:
    """The schema as it was before it had ranges and least extents, which follow from the model.

    So a step that was built before is the same step.
    """

    def plain(entry: Manifest) -> Manifest:
        return {key: value for key, value in entry.items() if key not in ("range", "least")}

    without = {**schema, "inputs": [plain(entry) for entry in schema["inputs"]]}
    return without | ({"target": plain(schema["target"])} if "target" in schema else {})


def _calls(convolutions: Sequence[Manifest], name: str) -> bool:
    return any(entry["kernel"].split()[0] == name for entry in convolutions)


def save_artifact(
    executable: tvm.runtime.Executable,
    manifest: Manifest,
    path: Path,
    linker: Linker | None = None,
    initial: InitialState | None = None,
) -> Artifact:
    """Link `executable` (of `tvm.compile`) into one shared library with `manifest` and write it to `path`, whole.

    Args:
        linker: None is that of the manifest's target.
        initial: the state that the executable's `init` takes from the library, as `compile_to_link` gives it.

    Raises:
        SetupError: there is no C++ compiler for the target, or it fails; or the temporary folder is full.
        ArtifactError: `path` is a folder, or cannot be written.
    """
    check_destination(path)
    target = tvm.target.Target(json.loads(manifest["target"]))
    linker = linker or linker_for(target)
    includes = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    with workspace() as folder:
        source, linked = folder / "manifest.c", folder / "step.so"
        try:
            source.write_text(_manifest_source(manifest))
            sources = [source] if initial is None else [source, initial.write(folder)]
        except OSError as error:
            raise SetupError(
                f"{folder.parent}: the sources of the library cannot be written to this temporary folder "
                f"({error.strerror}); make room there, or set TMPDIR to another folder."
            ) from error
        try:
            executable.export_library(
                str(linked),
                fcompile=linker,
                fpack_imports=partial(_packed, target) if target.kind.name == "llvm" else None,
                addons=[str(each) for each in sources],
                options=[*_PLAIN, *includes],
                workspace_dir=str(folder),
            )
        except SetupError as error:
            raise SetupError(f"{path}: the compiled step could not be linked: {error}.") from error
        content, digest = seal(ARTIFACT, linked.read_bytes(), manifest)
    write_atomic(path, content)
    return Artifact(path, digest, manifest)


def _packed(
    target: tvm.target.Target, module: tvm.runtime.Module, is_system_lib: bool, prefix: str, folder: str
) -> str:
    """An object file with the virtual machine's code and its constants, written by LLVM; arguments are TVM's.

    Of kernels that are object files already, TVM makes a C array of them instead, for which a compiler needs minutes
    and gigabytes.
    """
    path = Path(folder) / "imports.o"
    pack = tvm.get_global_func("runtime.ModulePackImportsToLLVM")
    pack(module, is_system_lib, str(target), prefix).write_to_file(str(path))
    return str(path)


def _manifest_source(manifest: Manifest) -> str:
    """A C file that exports the manifest through the calling convention of tvm-ffi, as a function of no arguments."""
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True)  # ASCII: json escapes everything else
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    # Pieces below the length of a literal that compilers must accept; never split within an escape.
    lines: list[str] = []
    while quoted:
        end = min(_LITERAL_BYTES, len(quoted))
        while quoted[end - 1] == "\\":
            end -= 1
        lines.append(f'  "{quoted[:end]}"')
        quoted = quoted[end:]
    literal = "\n".join(lines)
    return f"""#include <tvm/ffi/c_api.h>
static const char manifest[] =
{literal};
#ifdef __cplusplus
extern "C"
#endif
TVM_FFI_DLL_EXPORT int
__tvm_ffi_convgrad_manifest(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {{
  TVMFFIByteArray text = {{manifest, sizeof(manifest) - 1}};
  return TVMFFIStringFromByteArray(&text, result);
}}
"""
