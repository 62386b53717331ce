# SPDX-License-Identifier: Apache-2.0
"""`convgrad bundle`: what is in the archive, that it runs without Python's packages, and what is refused."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.cli.command import Command
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.device.bundle import Bundle, check_artifact
from tvm_convgrad.device.wheels import fetch_command, files_of_wheels
from tvm_convgrad.training.runtime.artifact import Artifact
from tvm_convgrad.training.runtime.session import Session

VERSIONS = {"tvm": "0.27.0", "tvm_ffi": "0.1.14"}


def test_a_bundle_for_this_machine(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    output = tmp_path / "here.tar"
    report = convgrad("bundle", tiny_step, "-o", output, "--json").json
    assert report["bytes"] == output.stat().st_size
    assert report["bytes"] - report["files"]["step.so"] < 8_000_000
    with tarfile.open(output) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "here"
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there - {"SHA256SUMS"} == set(sums)
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == each for name, each in sums.items())
    assert {"licenses/tvm-convgrad-LICENSE", "licenses/apache-tvm-LICENSE", "licenses/apache-tvm-ffi-LICENSE"} <= there
    assert (folder / "step.so").read_bytes() == tiny_step.read_bytes()
    x, y = tiny.make_arrays(tiny.BATCH, 1)
    x.tofile(folder / "x.raw")
    y.tofile(folder / "y.raw")
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    done = subprocess.run(
        ["bin/train", "step.so", "10", "x.raw", "y.raw"],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    session = Session(tiny_step)
    losses = [np.float32(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses == [np.float32(session.step(x, y)[0]) for _ in range(10)]
    command = re.search(r"^    (cc .*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    subprocess.run(command[1].replace("program.c", "example/train.c"), shell=True, cwd=folder, check=True)
    assert subprocess.run(["bin/program", "step.so", "2"], cwd=folder, check=False).returncode == 0


def test_equal_files_give_equal_archives() -> None:
    files = {"b": b"2", "bin/a": b"1"}
    assert Bundle("x", files).archive() == Bundle("x", dict(reversed(files.items()))).archive()


def test_wheels_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no apache_tvm-0.27.0-\*_aarch64.whl; fetch it with `pip download"):
        files_of_wheels(tmp_path, "aarch64", VERSIONS, tmp_path)
    wheel = tmp_path / "apache_tvm-0.27.0-py3-none-manylinux_2_28_aarch64.whl"
    for content in (b"", b"PK\x05\x06", None):
        if content is None:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("tvm/lib/other.so", "")
        else:
            wheel.write_bytes(content)
        with pytest.raises(ArtifactError, match="not a wheel of apache-tvm, or a damaged one"):
            files_of_wheels(tmp_path, "aarch64", VERSIONS, tmp_path)
    assert "apache-tvm-ffi==0.1.14" in fetch_command("aarch64", VERSIONS)


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        ({"target": '{"kind": "cuda"}', "runtimes": {}}, "runs on a GPU, and bundles are for CPUs"),
        ({"target": '{"kind": "llvm"}', "runtimes": {"onednn": "x"}}, "it calls onednn, .* --offload none"),
    ],
)
def test_steps_that_need_more(manifest: dict[str, object], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        check_artifact(Artifact(Path("step.so"), "", manifest))


def test_bad_places(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    convgrad("bundle", tiny_step, "-o", tmp_path / "no" / "a.tar").assert_sentence("the folder")
    convgrad("bundle", tmp_path / "no.so", "-o", tmp_path / "a.tar").assert_sentence("no such file")
    convgrad("bundle", tiny_step, "-o", tmp_path / "a.tar", "--wheels", tmp_path).assert_sentence(
        "there is no apache_tvm"
    )
    assert not (tmp_path / "a.tar").exists()
