# SPDX-License-Identifier: Apache-2.0
"""A folder of compiled objects gives back what was put into it or nothing, stays within its limit, and fails nobody."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tvm_convgrad.core.kept_objects import VARIABLE, KeptObjects, default_folder

KEY, OTHER = "ab" + "0" * 62, "cd" + "1" * 62


def test_objects_are_kept_by_key(tmp_path: Path) -> None:
    kept = KeptObjects(tmp_path / "objects")
    assert kept.get(KEY) is None
    kept.put(KEY, b"code")
    kept.put(OTHER, b"")
    again = KeptObjects(tmp_path / "objects")
    assert (again.get(KEY), again.get(OTHER)) == (b"code", b"")
    assert again.size()[0] == 2
    assert not again.problem


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-1], lambda content: b"", lambda content: content + b"x", lambda content: content[::-1]],
)
def test_a_damaged_object_is_none(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    kept = KeptObjects(tmp_path)
    kept.put(KEY, b"code")
    (path,) = tmp_path.glob("*/*.object")
    path.write_bytes(damage(path.read_bytes()))
    assert kept.get(KEY) is None
    assert not path.exists()
    kept.put(KEY, b"code")
    assert kept.get(KEY) == b"code"


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptObjects(tmp_path / "file" / "objects")
    kept.put(KEY, b"code")
    first = kept.problem
    kept.put(OTHER, b"code")
    kept.trim()
    assert kept.get(KEY) is None
    assert str(kept.folder) in first
    assert "CONVGRAD_CACHE" in first
    assert kept.problem == first


def test_a_full_disk_leaves_no_part_of_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = KeptObjects(tmp_path)
    monkeypatch.setattr(Path, "rename", full)
    kept.put(KEY, b"code")
    assert "No space left on device" in kept.problem
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    """What lies there may be anybody's code; removing the permission makes it usable."""
    folder = tmp_path / "objects"
    KeptObjects(folder).put(KEY, b"code")
    folder.chmod(mode)
    kept = KeptObjects(folder)
    assert kept.get(KEY) is None
    kept.put(OTHER, b"code")
    assert f"{mode:o}" in kept.problem
    assert "CONVGRAD_CACHE" in kept.problem
    folder.chmod(0o755)
    assert KeptObjects(folder).get(KEY) == b"code"
    assert KeptObjects(folder).get(OTHER) is None


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeptObjects(tmp_path).put(KEY, b"code")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    kept = KeptObjects(tmp_path)
    assert kept.get(KEY) is None
    assert "belongs to another user" in kept.problem


def test_folders_are_made_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KeptObjects(tmp_path / "objects").put(KEY, b"code")
    finally:
        os.umask(before)
    assert KeptObjects(tmp_path / "objects").get(KEY) == b"code"


def test_what_was_used_least_recently_goes(tmp_path: Path) -> None:
    kept = KeptObjects(tmp_path, limit=1000)
    keys = [f"{number:02x}" * 32 for number in range(10)]
    for number, key in enumerate(keys):
        kept.put(key, bytes(150))
        os.utime(kept._path(key), (number, number))
    assert kept.get(keys[0]) is not None  # which makes it the last that was used
    kept.trim()
    assert kept.size()[1] <= 1000
    assert kept.get(keys[0]) is not None
    assert kept.get(keys[1]) is None
    assert kept.get(keys[9]) is not None


def test_many_may_write_the_same(tmp_path: Path) -> None:
    def work(_number: int) -> bytes | None:
        own = KeptObjects(tmp_path)
        own.put(KEY, b"code" * 10_000)
        return own.get(KEY)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(64))) == {b"code" * 10_000}
    assert KeptObjects(tmp_path).size()[0] == 1
    assert not list(tmp_path.glob("*/*.tmp"))


def test_the_folder_is_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert default_folder() == KeptObjects().folder == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert default_folder().parts[-2:] == ("tvm-convgrad", "objects")


def test_objects_are_removed_by_key_or_beginning(tmp_path: Path) -> None:
    kept = KeptObjects(tmp_path)
    assert kept.remove(b"co") == 0
    kept.put(KEY, b"code")
    kept.put(OTHER, b"failed: code")
    assert kept.remove(b"failed") == 1
    assert (kept.get(KEY), kept.get(OTHER)) == (b"code", None)
    kept.drop(KEY)
    kept.drop(KEY)
    assert kept.size()[0] == 0
    assert not kept.problem
