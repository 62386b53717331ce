# SPDX-License-Identifier: Apache-2.0
"""The compiled step as a file: read without loading, refused in sentences, and free of everything but the runtime."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.targets import required_features
from tvm_convgrad.training.compile import artifact_writer
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.runtime.artifact import (
    ARTIFACT,
    inspect_artifact,
    load_module,
    notices,
    read_artifact,
    versions,
)
from tvm_convgrad.training.runtime.envelope import Kind, seal, unseal
from tvm_convgrad.training.runtime.session import Session


def resealed(step: Path, path: Path, kind: Kind = ARTIFACT, **changes: object) -> Path:
    """A copy of an artifact with a changed manifest and a seal that fits."""
    sealed = unseal(ARTIFACT, step)
    path.write_bytes(seal(kind, sealed.payload(), sealed.manifest | changes)[0])
    return path


def test_manifest(tiny_step: Path) -> None:
    found = read_artifact(tiny_step)
    assert found.manifest["versions"] == versions()
    assert [str(spec) for spec in found.inputs] == ["float32[8, 1, 6, 6]"]
    assert str(found.target) == "int64[8]"
    assert str(found.prediction) == "float32[8, 3]"
    assert {spec.role for spec in found.state} >= {"parameter", "running_stat", "optimizer"}
    assert found.options["lr"] == 0.1
    (gradient,) = found.gradients
    assert gradient["op"] == "conv2d_backward_weight"
    assert gradient["descriptor"] == "mb8ic1ih6oc4oh3kh3sh2ph1"
    assert gradient["gflop"] == pytest.approx(2e-9 * 8 * 4 * 9 * 9)
    assert gradient["kernel"].endswith("wgrad")
    assert gradient["reason"]
    assert gradient["plan"]
    assert all(other["reason"] for other in gradient["refused"])
    assert [entry["op"] for entry in found.forward] == ["conv2d"]


def test_manifest_is_read_without_tvm(tiny_step: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tvm_convgrad.training.runtime.artifact import read_artifact\n"
        "print(read_artifact(Path(sys.argv[1])).id)\n"
        "assert 'tvm' not in sys.modules and 'tvm_ffi' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tiny_step)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == read_artifact(tiny_step).id


def test_manifest_is_a_function_of_the_library(tiny_step: Path) -> None:
    artifact = read_artifact(tiny_step)
    function = load_module(artifact).get_function("convgrad_manifest", query_imports=True)
    assert json.loads(str(function())) == artifact.manifest


def test_manifest_source_survives_awkward_text(tmp_path: Path) -> None:
    """Quotes, backslashes, trigraphs and cuts at the length of a literal, through a real compiler."""
    text = {"a": '"\\?' * 2000 + "??=é\n" + "x" * 5000}
    source = artifact_writer._manifest_source(text)
    array = source[source.index("static const") : source.index("#ifdef")]
    program = f"#include <cstdio>\n{array}int main() {{ std::fwrite(manifest, 1, sizeof(manifest) - 1, stdout); }}\n"
    compiled = tmp_path / "print"
    subprocess.run(["g++", "-xc++", "-std=c++98", "-", "-o", str(compiled)], input=program, text=True, check=True)
    printed = subprocess.run([str(compiled)], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == text


def test_only_runtime_libraries_are_needed(tiny_step: Path) -> None:
    listed = subprocess.run(["readelf", "-d", str(tiny_step)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", listed))
    assert not {name for name in needed if not re.match(r"lib(tvm_ffi|stdc\+\+|m|gcc_s|c)\.so", name)}, needed


def test_other_tvm_is_refused(tiny_step: Path, tmp_path: Path) -> None:
    old = resealed(tiny_step, tmp_path / "old.so", versions=versions() | {"tvm": "0.19.0"})
    with pytest.raises(ArtifactError, match=r"compiled with Apache TVM 0\.19\.0"):
        read_artifact(old)


def test_other_format_is_refused(tiny_step: Path, tmp_path: Path) -> None:
    newer = Kind(ARTIFACT.magic, ARTIFACT.version + 1, ARTIFACT.noun, ARTIFACT.maker)
    with pytest.raises(ArtifactError, match="format version 2"):
        read_artifact(resealed(tiny_step, tmp_path / "newer.so", newer))


def test_other_cpu_is_refused(tiny_step: Path, tmp_path: Path) -> None:
    other = resealed(tiny_step, tmp_path / "other.so", cpu_features=["a-feature-of-the-future"])
    with pytest.raises(ArtifactError, match="a-feature-of-the-future, which this one lacks"):
        read_artifact(other)


def test_other_architecture_is_refused(tiny_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ArtifactError, match="not a shared library for riscv64"):
        read_artifact(tiny_step)


def test_foreign_library_is_never_loaded(tmp_path: Path) -> None:
    """A shared library whose loading would leave a trace."""
    source, library, trace = tmp_path / "evil.c", tmp_path / "evil.so", tmp_path / "loaded"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void go(void) {{ fopen("{trace}", "w"); }}\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(ArtifactError, match="not a compiled training step"):
        Session(library)
    assert not trace.exists()


def test_a_process_without_tiles_is_told(tiny_step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of an artifact that has kernels of AMX, and only where there are no tiles."""
    plain = inspect_artifact(tiny_step)
    kernel = {"kernel": "AMX GEMM + relu"}
    built = replace(plain, manifest={**plain.manifest, "gradients": [], "forward": [kernel, {"kernel": "depthwise"}]})
    monkeypatch.setattr("tvm_convgrad.training.runtime.artifact.tile_refusal", lambda *_: "a hypervisor hides them")
    assert notices(plain) == ()
    (text,) = notices(built)
    assert text.endswith("1 of its kernels are built for AMX and convert to float32 instead: a hypervisor hides them")
    half = {"kernel": "AMX-FP16 GEMM wgrad"}
    mixed = replace(plain, manifest={**plain.manifest, "gradients": [half, half], "forward": [kernel]})
    assert "2 of its kernels are built for AMX-FP16 and convert to float32 instead" in notices(mixed)[1]
    monkeypatch.setattr("tvm_convgrad.training.runtime.artifact.tile_refusal", lambda *_: "")
    assert notices(built) == ()


def test_targets() -> None:
    assert parse_target("llvm").kind.name == "llvm"
    assert set(required_features(parse_target("native"))) <= local_features()
    assert "avx512f" in required_features(
        parse_target('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"}')
    )
    for wrong in ("rubbish", "cuda", "{not json", '{"kind": 3}'):
        with pytest.raises(UnsupportedError, match="use llvm"):
            parse_target(wrong)
