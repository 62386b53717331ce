# SPDX-License-Identifier: Apache-2.0
"""Random damage to files, and what importing the result leads to."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from tests.importer import corpus

MEMORY = 2 << 30
SECONDS = 10
LARGEST = 300_000
"""Files above it are left out: damage to them is the same as to small ones, and slower."""


def files(folder: Path, entries: Iterable[corpus.Entry]) -> list[Path]:
    """Programs and parameter files to damage, each once, in a fixed order."""
    found = {path for entry in entries for form in ("json", "text", "tar", "params_file") if (path := entry.path(form))}
    return sorted(path for path in found if len(corpus.content(path)) <= LARGEST)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four changes to the bytes of a file."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not changed:
            break
        at = rng.randrange(len(changed))
        match rng.randrange(7):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.randrange(256)
            case 2:
                del changed[at : at + rng.randint(1, 40)]
            case 3:
                changed[at:at] = changed[at : at + rng.randint(1, 200)]
            case 4:
                other = rng.randrange(len(changed))
                size = rng.randint(1, 60)
                changed[at : at + size] = changed[other : other + size]
            case 5:
                changed = _number(changed, at, rng)
            case 6:
                if rng.random() < 0.2:
                    del changed[at:]
    return bytes(changed)


def _number(data: bytearray, at: int, rng: random.Random) -> bytearray:
    """Another number for the next one behind `at`."""
    start = at
    while start < len(data) and not 48 <= data[start] <= 57:
        start += 1
    end = start
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    choices = [
        "0",
        "-1",
        "1",
        "2",
        "7",
        "65536",
        "2147483648",
        "9223372036854775807",
        "1" * 40,
        str(rng.randrange(600)),
    ]
    data[start:end] = rng.choice(choices).encode()
    return data


def limit() -> None:
    """Keep this process from taking more memory than it may, above what it has mapped already."""
    import tvm_convgrad.importer.convert  # noqa: F401  so that the libraries are loaded before

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


class _TooSlow(Exception):
    pass


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TooSlow


def outcome(path: Path, seed: int, number: int) -> str:
    """What importing mutation `number` of a file leads to: "imported", "refused: …", or "fault: …".

    The time that counts is that of the processor: a busy machine makes no fault.
    """
    from tvm import relax

    from tvm_convgrad.core.errors import ConvGradError
    from tvm_convgrad.importer.convert import convert
    from tvm_convgrad.importer.sources import parse
    from tvm_convgrad.importer.tensors import read_params

    data = mutated(corpus.content(path), random.Random(f"{seed} {number}"))
    signal.signal(signal.SIGVTALRM, _alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        if path.suffix in (".bin", ".params"):
            read_params(data, "mutation")
        else:
            module = convert(parse(data, "mutation").program).module
            if relax.analysis.well_formed(module) is False:  # TVM 0.27 returns nothing, and raises
                return "fault: the module is not well formed"
    except ConvGradError as error:
        return f"refused: {error}"
    except _TooSlow:
        return f"fault: slower than {SECONDS} s"
    except BaseException as error:  # whatever it is, it should have been a ConvGradError
        return f"fault: {type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "imported"
