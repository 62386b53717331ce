# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: state, place in the data and loss history, from which it goes on bit for bit."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.training.runtime.envelope import Kind, seal, unseal
from tvm_convgrad.training.runtime.schedules import CONSTANT, Schedule

CHECKPOINT = Kind(magic=b"CVGCKPT\x01", version=1, noun="a checkpoint", maker="convgrad run --checkpoint-dir")
KEPT = 2
BEST, BEST_BEFORE = "best.ckpt", "best-before.ckpt"
"""The names of the checkpoint of the best validation, and of the one that was the best when the last checkpoint was
written."""
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{10})\.ckpt")


@dataclass
class Progress:
    """The progress of a run, and all that its continuation depends on besides the state.

    Attributes:
        artifact, data: SHA-256 digests of the artifact and of the training data.
        seed: seed of the order of samples and of augmentations.
        batch_size: samples per batch.
        lr: the learning rate of the next step.
        schedule: the schedule of the learning rate, as the text of a `Schedule`.
        epoch: number of completed epochs.
        position: number of completed batches of the current epoch: the next batch is number `position` from 0.
        losses: the loss of each step so far.
        monitor, best, best_step: name and best value of the measure of all validations, and the number of steps after
            which it was reached; "", None and 0 without validations.
        stale: number of validations since then.
        micro_batches: number of micro-batches of a batch.
        planned: number of epochs that the schedule was laid out for; 0 if it does not depend on that number.
        step: digest of the step independent of its target ("step" in the manifest), or "".
    """

    artifact: str
    data: str
    seed: int
    batch_size: int
    lr: float
    schedule: str = CONSTANT
    epoch: int = 0
    position: int = 0
    losses: list[float] = field(default_factory=list)
    monitor: str = ""
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    micro_batches: int = 1
    planned: int = 0
    step: str = ""

    def is_of(self, artifact: str, step: str) -> bool:
        """Whether it can be resumed with an artifact: the same one, or a build of the same step for another machine."""
        return self.artifact == artifact or (step != "" and self.step == step)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and verified.

    Attributes:
        path: its file.
        progress: epoch, losses, seed, learning rate and data of the run, and the identity of the artifact.
        state: the tensors of the state by name.
    """

    path: Path
    progress: Progress
    state: dict[str, np.ndarray]


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make `folder`, see that files can be written to it, and lock it against other runs inside the block.

    The lock is one of the operating system on the file `.lock`, so it ends with the process, however that ends; the
    file stays.

    Raises:
        ArtifactError: the folder cannot be made or written, or another run has locked it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ArtifactError(
            f"{folder}: another run writes its checkpoints there; wait for its end, or use another --checkpoint-dir."
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise ArtifactError(
            f"{folder}: the checkpoint folder cannot be made, as a file is in its place; use another --checkpoint-dir."
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        try:
            with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder):
                pass
        except OSError as error:
            raise _unusable(folder, error) from error
        yield
    finally:
        lock.release()


def _unusable(folder: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{folder}: checkpoints cannot be written there ({error.strerror}); use another --checkpoint-dir."
    )


def save(
    folder: Path, progress: Progress, state: dict[str, np.ndarray], keep: Path | None = None, file: str | None = None
) -> Path:
    """Write a checkpoint into `folder` (made if missing) and delete all but the last two and `keep`.

    With `file` it is called so, and no other is dropped; `load_latest` does not find it.

    Raises:
        ArtifactError: the folder cannot be made or written.
    """
    arrays: list[dict[str, Any]] = []
    blocks: list[bytes] = []
    offset = 0
    losses = np.asarray(progress.losses, "float64")
    for name, array in [("losses", losses), *((f"state/{name}", array) for name, array in state.items())]:
        block = array.tobytes()  # in C order, whatever the array's
        arrays.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "offset": offset})
        blocks.append(block)
        offset += len(block)
    place = asdict(progress)
    del place["losses"], place["step"]
    if progress.schedule == CONSTANT:
        del place["schedule"]  # so that earlier versions read the checkpoints of constant rates
    if not progress.planned:
        del place["planned"]  # the same for those that do not depend on the length of the run
    if not progress.monitor:
        for name in ("monitor", "best", "best_step", "stale"):
            del place[name]  # the same for runs without validation
    if progress.micro_batches == 1:
        del place["micro_batches"]  # the same for whole steps
    step = {"step": progress.step} if progress.step else {}  # not in `progress`: earlier versions read the rest
    content, _ = seal(CHECKPOINT, b"".join(blocks), {"progress": place, "arrays": arrays} | step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{folder}: the checkpoint folder cannot be made ({error.strerror}).") from error
    path = folder / (file or f"step-{len(progress.losses):010d}.ckpt")
    write_atomic(path, content)
    if file is not None:
        return path
    for old in _listed(folder)[:-KEPT]:
        if old != keep:
            old.unlink(missing_ok=True)
    return path


def load(path: str | Path) -> Checkpoint:
    """Read the checkpoint at `path`.

    Raises:
        ArtifactError: it is missing, foreign, truncated, damaged or of another format version, or its manifest is not
            that of a checkpoint.
    """
    path = Path(path)
    sealed = unseal(CHECKPOINT, path)
    payload = sealed.payload()
    arrays: dict[str, np.ndarray] = {}
    try:
        for entry in sealed.manifest["arrays"]:
            if min(entry["shape"], default=0) < 0:
                raise ValueError(f"negative extent in {entry['shape']}")
            count = math.prod(entry["shape"])
            flat = np.frombuffer(payload, numpy_dtype(entry["dtype"]), count, entry["offset"])
            arrays[entry["name"]] = flat.reshape(entry["shape"]).copy()
        losses = arrays.pop("losses").tolist()
        progress = Progress(**sealed.manifest["progress"], losses=losses, step=sealed.manifest.get("step", ""))
        state = {name.removeprefix("state/"): array for name, array in arrays.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(path, f"{type(error).__name__}: {error}") from error
    wrong = _wrong_field(progress)
    if wrong:
        raise _malformed(path, wrong)
    return Checkpoint(path, progress, state)


def _wrong_field(progress: Progress) -> str:
    """Which field has a value that no run writes, or ""."""
    for name in ("artifact", "data", "step"):
        if not isinstance(getattr(progress, name), str):
            return f"{name} is {getattr(progress, name)!r}, not a digest"
    zero = ("seed", "epoch", "position", "best_step", "stale", "planned")
    numbers = [*((name, 0) for name in zero), ("batch_size", 1), ("micro_batches", 1)]
    for name, least in numbers:
        value = getattr(progress, name)
        if type(value) is not int or value < least:
            return f"{name} is {value!r}, not an integer of at least {least}"
    if not isinstance(progress.monitor, str) or type(progress.best) not in (int, float, type(None)):
        return f"the best {progress.monitor!r} is {progress.best!r}, not a number"
    if progress.batch_size % progress.micro_batches:
        return f"batch_size is {progress.batch_size}, which {progress.micro_batches} micro-batches do not divide"
    if type(progress.lr) not in (int, float):
        return f"lr is {progress.lr!r}, not a number"
    try:
        Schedule.parse(progress.schedule)
    except (UnsupportedError, AttributeError) as error:
        return f"schedule is {progress.schedule!r}: {error}"
    if not isinstance(progress.losses, list) or not all(isinstance(loss, float) for loss in progress.losses):
        return "losses are not a vector of floats"
    return ""


def _malformed(path: Path, reason: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: {CHECKPOINT.noun} whose manifest does not describe one ({reason}); remove it, and make it again with "
        f"`{CHECKPOINT.maker}`."
    )


def load_latest(folder: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest undamaged checkpoint of a folder.

    Args:
        folder: the folder of `convgrad run --checkpoint-dir`.

    Returns:
        The checkpoint (None if the folder has none), and an error message for each newer one that is damaged.

    Raises:
        ArtifactError: the folder has checkpoints, and all of them are damaged.
    """
    complaints: list[str] = []
    for path in reversed(_listed(Path(folder))):
        try:
            return load(path), complaints
        except ArtifactError as error:
            complaints.append(str(error))
    if complaints:
        raise ArtifactError(
            f"{folder}: none of the checkpoints can be used; remove them to start again. {' '.join(complaints)}"
        )
    return None, []


def _listed(folder: Path) -> list[Path]:
    """The checkpoint files in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
