# SPDX-License-Identifier: Apache-2.0
"""The artifact of a build: one shared library with the step's code, its manifest inside, and a seal at its end.

The manifest is there twice: after the ELF image, where it is read and checked without loading any code (see
`envelope`), and as the function `convgrad_manifest` of the library, for programs that have it loaded already.
docs/ARTIFACT.md has the format.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm_convgrad
from tvm_convgrad.errors import ArtifactError, SetupError
from tvm_convgrad.offload.common import NAMES, backend, load_runtime
from tvm_convgrad.training.cpu import local_features, required_features
from tvm_convgrad.training.envelope import Kind, check_destination, seal, unseal, write_atomic
from tvm_convgrad.training.schema import TensorSpec

if TYPE_CHECKING:
    from tvm_convgrad.training.model import TensorSchema
    from tvm_convgrad.training.step import StateSchema, StepModule

ARTIFACT = Kind(magic=b"CVGSTEP\x01", version=1, noun="a compiled training step", maker="convgrad build")
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_LITERAL_BYTES = 2000
_WORKSPACE = "convgrad-build-"
_YOUNG_SECONDS = 10  # between making a folder and locking it no other build may take it for left behind


@dataclass(frozen=True)
class Artifact:
    """A checked artifact: where it is, its SHA-256 in hex (its identity), and its manifest.

    Attributes:
        gradients, forward: one entry for each such convolution of the step, see `report.gradients`.
        options: what `build` was asked for, `lr` among them.
    """

    path: Path
    id: str
    manifest: dict[str, Any]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the model, in order."""
        return tuple(map(TensorSpec.from_json, self.manifest["schema"]["inputs"]))

    @property
    def target(self) -> TensorSpec:
        """The target of the loss."""
        return TensorSpec.from_json(self.manifest["schema"]["target"])

    @property
    def prediction(self) -> TensorSpec:
        """The predictions of the model."""
        return TensorSpec.from_json(self.manifest["schema"]["prediction"])

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """The entries of the state, in order."""
        return tuple(map(TensorSpec.from_json, self.manifest["schema"]["state"]))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the build."""
        return dict(self.manifest["options"])

    @property
    def gradients(self) -> list[dict[str, Any]]:
        """The gradient operators of the step."""
        return list(self.manifest["gradients"])

    @property
    def forward(self) -> list[dict[str, Any]]:
        """The forward convolutions of the step."""
        return list(self.manifest["forward"])


def versions() -> dict[str, str]:
    """The versions that an artifact made now would record."""
    return {
        "tvm_convgrad": tvm_convgrad.__version__,
        "tvm": importlib.metadata.version("apache-tvm"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
    }


def built_for_of(target: Any) -> dict[str, Any]:
    """What code depends on, for the manifest: the target's text, and the cores that CPU kernels are made for."""
    from tvm_convgrad.kernels.target import cores_of  # which loads TVM

    return {"target": str(target), "cores": cores_of(target) if target.kind.name == "llvm" else None}


def make_manifest(step: StepModule, target: Any, convolutions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The manifest of `step` compiled for `target`, a TVM target, with an entry for each of its convolutions."""

    def entry(tensor: TensorSchema | StateSchema) -> dict[str, Any]:
        return TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype, getattr(tensor, "role", "")).to_json()

    return {
        "versions": versions(),
        **built_for_of(target),
        "cpu_features": required_features(target),
        "schema": {
            "inputs": [entry(tensor) for tensor in step.inputs],
            "target": entry(step.target),
            "prediction": entry(step.prediction),
            "state": [entry(tensor) for tensor in step.state],
        },
        "options": step.options,
        "runtimes": {name: str(backend(name).library()) for name in NAMES if _calls(convolutions, name)},
        "gradients": [entry for entry in convolutions if "backward" in entry["op"]],
        "forward": [entry for entry in convolutions if "backward" not in entry["op"]],
    }


def _calls(convolutions: Sequence[dict[str, Any]], name: str) -> bool:
    return any(entry["kernel"].split()[0] == name for entry in convolutions)


def save_artifact(executable: Any, manifest: dict[str, Any], path: Path) -> Artifact:
    """Link `executable` (of `tvm.compile`) into one shared library with `manifest` and write it to `path`, whole.

    Raises:
        SetupError: there is no C++ compiler, or it fails.
        ArtifactError: `path` is a folder, or cannot be written.
    """
    from tvm.support import cc
    from tvm_ffi import libinfo

    check_destination(path)
    if cc.get_cc() is None:
        raise SetupError("build needs a C++ compiler to link the step; install g++ or clang++, or set CXX to yours.")
    headers = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    with _workspace() as folder:
        source, linked = folder / "manifest.c", folder / "step.so"
        source.write_text(_manifest_source(manifest))
        try:
            executable.export_library(str(linked), addons=[str(source)], options=headers, workspace_dir=str(folder))
        except RuntimeError as error:  # what TVM raises when the compiler fails, with its output
            last = str(error).strip().splitlines()[-1]
            raise SetupError(f"{path}: the compiled step could not be linked: {last}") from error
        content, digest = seal(ARTIFACT, linked.read_bytes(), manifest)
    write_atomic(path, content)
    return Artifact(path, digest, manifest)


@contextmanager
def _workspace() -> Iterator[Path]:
    """A temporary folder for a build; one that a killed build has left is removed by the next.

    Its maker holds a lock on it, which the system takes away when that process ends, however it ends.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_WORKSPACE}*"):
        with suppress(OSError), _locked(left):  # BlockingIOError: in use; PermissionError: another user's
            if time.time() - left.stat().st_mtime > _YOUNG_SECONDS:
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=_WORKSPACE))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def read_artifact(path: Path) -> Artifact:
    """Check the artifact at `path` without loading it.

    Raises:
        ArtifactError: missing, foreign, truncated, damaged, of another format or TVM version, or for another CPU.
    """
    sealed = unseal(ARTIFACT, path)
    made, here = sealed.manifest["versions"], versions()
    for package, name in (("tvm", "Apache TVM"), ("tvm_ffi", "apache-tvm-ffi")):
        if _release(made[package]) != _release(here[package]):
            raise ArtifactError(
                f"{path}: compiled with {name} {made[package]}, and {here[package]} is installed; their libraries do "
                "not fit together, so build the step anew."
            )
    with path.open("rb") as file:
        header = file.read(20)
    machine = platform.machine()
    if header[:4] != b"\x7fELF" or struct.unpack_from("<H", header, 18)[0] != _ELF_MACHINES.get(machine):
        raise ArtifactError(f"{path}: its code is not a shared library for {machine}; build the step on this machine.")
    missing = sorted(set(sealed.manifest["cpu_features"]) - local_features())
    if missing:
        raise ArtifactError(
            f"{path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; build it here, or with "
            "--target llvm."
        )
    return Artifact(path, sealed.digest, sealed.manifest)


def is_for_gpu(manifest: dict[str, Any]) -> bool:
    """Whether a step runs on an NVIDIA GPU."""
    return bool(json.loads(manifest["target"])["kind"] == "cuda")


def load_module(artifact: Artifact) -> Any:
    """Load the code of an artifact that `read_artifact` has checked: a module for `relax.VirtualMachine`.

    Raises:
        SetupError: a vendor's library that the step calls, or the GPU that it is for, cannot be had on this machine.
    """
    import tvm

    if is_for_gpu(artifact.manifest):
        from tvm_convgrad.offload.cuda import local_target

        local_target()
    for name, path in artifact.manifest.get("runtimes", {}).items():
        load_runtime(name, Path(path))
    return tvm.runtime.load_module(str(artifact.path))


def _release(version: str) -> list[str]:
    """Major and minor of a version: TVM promises no compatibility across them."""
    return version.split(".")[:2]


def _manifest_source(manifest: dict[str, Any]) -> str:
    """A C file that exports the manifest through the calling convention of tvm-ffi, as a function of no arguments."""
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True)  # ASCII: json escapes everything else
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    # Pieces below the length of a literal that compilers must accept; never cut within an escape.
    lines: list[str] = []
    while quoted:
        cut = min(_LITERAL_BYTES, len(quoted))
        while quoted[cut - 1] == "\\":
            cut -= 1
        lines.append(f'  "{quoted[:cut]}"')
        quoted = quoted[cut:]
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
