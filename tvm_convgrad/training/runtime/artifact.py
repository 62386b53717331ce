# SPDX-License-Identifier: Apache-2.0
"""Reading an artifact of `convgrad build`: one shared library with a step's code, its manifest, and a seal at its end.

The manifest is there twice: after the ELF image, where it is read and checked without loading any code (see
`envelope`), and as the function `convgrad_manifest` of the library, for programs that have it loaded already.
`compile.artifact_writer` makes artifacts; docs/ARTIFACT.md has the format.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import struct
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tvm_convgrad
from tvm_convgrad.core.cpu_features import local_features, tile_refusal
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.flat import FlatLayout
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.offload.registry import load_runtime
from tvm_convgrad.training.runtime.envelope import Kind, Manifest, unseal
from tvm_convgrad.training.runtime.loading import load_library
from tvm_convgrad.training.runtime.origin import Origin
from tvm_convgrad.training.runtime.schema import TensorSpec

if TYPE_CHECKING:  # an artifact is read and checked without TVM
    import tvm

ARTIFACT = Kind(magic=b"CVGSTEP\x01", version=1, noun="a compiled training step", maker="convgrad build")
TILES, HALF_TILES = "AMX", "AMX-FP16"
"""What the names of kernels begin with that request tiles when they are called, and those of float16 among them."""

_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


@dataclass(frozen=True)
class Artifact:
    """A checked artifact: where it is, its SHA-256 in hex (its identity), and its manifest.

    Attributes:
        gradients, forward: one entry for each such convolution of the step, see `report.gradients`.
        options: those of `build`, `lr` among them.
    """

    path: Path
    id: str
    manifest: Manifest

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the model, in order."""
        return tuple(map(TensorSpec.from_json, self.manifest["schema"]["inputs"]))

    @property
    def trains(self) -> bool:
        """Whether it is a training step; else it is an inference library, which has `predict` alone."""
        return "target" in self.manifest["schema"]

    @property
    def target(self) -> TensorSpec:
        """The target of the loss; an inference library is refused."""
        self.require_training()
        spec = TensorSpec.from_json(self.manifest["schema"]["target"])
        if spec.range is None and self.classes is not None:  # libraries of before have no ranges
            return replace(spec, range=IndexRange.of_classes(self.classes, self.ignored))
        return spec

    @property
    def classes(self) -> int | None:
        """The number of classes, or None if targets are not class numbers or the model returns its loss itself."""
        self.require_training()
        dtype = str(self.manifest["schema"]["target"]["dtype"])
        if self.options.get("loss") == "model" or not dtype.startswith("int"):
            return None
        _, *classes = self.prediction.shape  # [batch, classes, ...], as cross_entropy has it
        return classes[0] if classes and isinstance(classes[0], int) else None

    @property
    def ignored(self) -> int | None:
        """The class number that the loss ignores (`ignore_index`), or None."""
        found = self.options.get("ignore_index")
        return None if found is None else int(found)

    @property
    def averages(self) -> dict[str, str]:
        """For each parameter the name of its moving average in the state.

        Raises:
            ArtifactError: the step was built without --ema.
        """
        kept = [[spec.name for spec in self.state if spec.role == role] for role in ("parameter", "average")]
        if not kept[1]:
            raise ArtifactError(f"{self.path}: the step keeps no averages of its parameters; build it with --ema.")
        return dict(zip(*kept, strict=True))

    def require_training(self) -> None:
        """Refuse an inference library where a step is needed.

        Raises:
            ArtifactError: it is one.
        """
        if not self.trains:
            raise ArtifactError(
                f"{self.path}: an inference library, which has predict alone and does not train; give the library that "
                "`convgrad build` wrote."
            )

    @property
    def prediction(self) -> TensorSpec:
        """The predictions of the model."""
        return TensorSpec.from_json(self.manifest["schema"]["prediction"])

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """The entries of the state, in order."""
        return tuple(map(TensorSpec.from_json, self.manifest["schema"]["state"]))

    @property
    def origin(self) -> Origin | None:
        """The model file of the build; None for a model in memory, or an artifact of an older version."""
        found = self.manifest.get("model")
        return None if found is None else Origin.from_json(found)

    @property
    def step(self) -> str:
        """What is trained, whatever machine it is compiled for: a digest of the model's files, schema and options.

        Checkpoints go from one build to another of the same. "" of a model in memory, and of libraries of before.
        """
        return str(self.manifest.get("step", ""))

    @property
    def flat(self) -> FlatLayout | None:
        """The layout of the gradients of a split step; None: it is not split."""
        found = self.manifest["schema"].get("flat")
        return None if found is None else FlatLayout.from_json(found)

    @property
    def options(self) -> Manifest:
        """The options of the build."""
        return dict(self.manifest["options"])

    @property
    def gradients(self) -> list[Manifest]:
        """The gradient operators of the step."""
        return list(self.manifest["gradients"])

    @property
    def forward(self) -> list[Manifest]:
        """The forward convolutions of the step."""
        return list(self.manifest["forward"])


def versions() -> dict[str, str]:
    """The versions that an artifact made now would record."""
    return {
        "tvm_convgrad": tvm_convgrad.__version__,
        "tvm": importlib.metadata.version("apache-tvm"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
    }


def inspect_artifact(path: Path) -> Artifact:
    """Check the seal of the artifact at `path`, which may be for any machine.

    Raises:
        ArtifactError: missing, foreign, truncated, damaged, or of another format version.
    """
    sealed = unseal(ARTIFACT, path)
    return Artifact(path, sealed.digest, sealed.manifest)


def require_versions(artifact: Artifact) -> None:
    """Refuse an artifact that was compiled with another TVM or tvm-ffi than the installed one, in major or minor.

    Raises:
        ArtifactError: it was.
    """
    made, here = artifact.manifest["versions"], versions()
    for package, name in (("tvm", "Apache TVM"), ("tvm_ffi", "apache-tvm-ffi")):
        if _release(made[package]) != _release(here[package]):
            raise ArtifactError(
                f"{artifact.path}: compiled with {name} {made[package]}, and {here[package]} is installed; their "
                "libraries do not fit together, so build the step again."
            )


def require_machine(artifact: Artifact) -> None:
    """Refuse an artifact whose library is for another kind of machine, which cannot be loaded here.

    Raises:
        ArtifactError: it is.
    """
    path, machine = artifact.path, platform.machine()
    with path.open("rb") as file:
        header = file.read(20)
    if header[:4] != b"\x7fELF" or struct.unpack_from("<H", header, 18)[0] != _ELF_MACHINES.get(machine):
        raise ArtifactError(f"{path}: its code is not a shared library for {machine}; build the step on this machine.")


def read_artifact(path: Path) -> Artifact:
    """Check the artifact at `path` without loading it: its seal, and that it runs on this machine.

    Raises:
        ArtifactError: as `inspect_artifact`, or of another TVM version, or for another CPU.
    """
    artifact = inspect_artifact(path)
    require_versions(artifact)
    require_machine(artifact)
    missing = sorted(set(artifact.manifest["cpu_features"]) - local_features())
    if missing:
        raise ArtifactError(
            f"{path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; build it here, or with "
            "--target llvm."
        )
    return artifact


def notices(artifact: Artifact) -> tuple[str, ...]:
    """What is slower here than in the build, a sentence each: AMX kernels to which Linux grants no tiles."""
    names = [str(entry["kernel"]) for entry in (*artifact.manifest["gradients"], *artifact.manifest["forward"])]
    of_half = sum(name.startswith(HALF_TILES) for name in names)
    count = sum(name.startswith(TILES) for name in names) - of_half
    found = []
    if count and (reason := tile_refusal()):
        found.append(f"{count} of its kernels are built for AMX and convert to float32 instead: {reason}")
    if of_half and (reason := tile_refusal("amx-fp16")):
        found.append(f"{of_half} of its kernels are built for AMX-FP16 and convert to float32 instead: {reason}")
    return tuple(f"{artifact.path}: {text}" for text in found)


def is_for_gpu(manifest: Manifest) -> bool:
    """Whether a step runs on an NVIDIA GPU."""
    return bool(json.loads(manifest["target"])["kind"] == "cuda")


def load_module(artifact: Artifact) -> tvm.runtime.Module:
    """Load the code of an artifact that `read_artifact` has checked: a module for `relax.VirtualMachine`.

    Raises:
        SetupError: a vendor's library that the step calls, or the GPU that it is for, is missing on this machine.
        ArtifactError: the file was overwritten in place while it was loaded.
    """
    for_gpu = is_for_gpu(artifact.manifest)
    kernels: AbstractContextManager[None] = nullcontext()
    if for_gpu:
        from tvm_convgrad.offload.cuda import local_target  # they import TVM
        from tvm_convgrad.offload.nvrtc import precise_kernels

        local_target()
        kernels = precise_kernels()
    for name, path in artifact.manifest.get("runtimes", {}).items():
        load_runtime(name, Path(path))
    with kernels:
        return load_library(artifact.path, artifact.id)


def _release(version: str) -> list[str]:
    """Major and minor of a version: TVM promises no compatibility across them."""
    return version.split(".")[:2]
