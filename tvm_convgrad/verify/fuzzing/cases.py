# SPDX-License-Identifier: Apache-2.0
"""`KernelCase`: a case of the fuzzer, which is a problem and all that determines the code of a kernel, as a string.

--problem mb2ic17ih5oc3kh3ph1 --direction wgrad
--tiling "isa=AVX2 l2=4096 parts=3 kernel=implicit_GEMM epilogue=accumulate tiling=tile_m:3,tile_n:1,..."
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import get_type_hints

from tvm_convgrad.codegen.hardware import CPUS, Machine
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Kernel, Plan, Tiling, planned
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue

MACHINE_KEYS = {
    "l2": "l2_bytes",
    "registers": "registers",
    "parts": "parts",
    "parallel": "parallel_from",
    "dot_cost": "dot_cost",
}
"""The keys of the machine's numbers, and the fields of `Machine` that have them."""

KEYS = ("isa", *MACHINE_KEYS, "batch", "kernel", "region", "epilogue")
"""The keys of a case's string besides `tiling`, of which there is one for each loop nest."""


@dataclass(frozen=True)
class KernelCase:
    """A kernel for a direction of a problem.

    Attributes:
        problem: static.
        direction: "forward", "backward_weight" or "backward_data".
        machine: the CPU that the kernel is made for; its caches may be those of no CPU.
        kernel, plan: the kernel and its tilings.
        epilogue: what is fused into the store.
        any_batch: whether the batch is a variable of the generated function.
    """

    problem: ConvProblem
    direction: str
    machine: Machine
    kernel: Kernel
    plan: Plan
    epilogue: Epilogue = NO_EPILOGUE
    any_batch: bool = False

    @property
    def tiling_text(self) -> str:
        """All but the problem and the direction as one string, which `check.read_case` reads."""
        machine = self.machine
        words = [f"isa={machine.name}", f"l2={machine.l2_bytes}", f"parts={machine.parts}"]
        words += [f"registers={machine.registers}"] if machine.registers != CPUS[machine.name].registers else []
        words += [f"parallel={machine.parallel_from}"]
        words += [f"dot_cost={machine.dot_cost}"] if machine.dot_cost != CPUS[machine.name].dot_cost else []
        words += ["batch=any"] if self.any_batch else []
        words += [f"kernel={self.kernel.name.replace(' ', '_')}"]
        words += [f"region={self.plan.region}"] if self.plan.region else []
        fused = [item.name for item in fields(self.epilogue) if getattr(self.epilogue, item.name)]
        words += [f"epilogue={','.join(fused)}"] if fused else []
        return " ".join([*words, *(f"tiling={_plain(tiling)}" for tiling in self.plan.tilings)])

    def __str__(self) -> str:
        return f'--direction {WORDS[self.direction]} --problem {self.problem.descriptor} --tiling "{self.tiling_text}"'

    @property
    def planned_problem(self) -> ConvProblem:
        """The problem that the tilings are made for: with the representative batch if the batch is a variable."""
        return planned(self.compiled_problem)

    @property
    def compiled_problem(self) -> ConvProblem:
        """The problem that the function is built for: its batch is a name if it is a variable."""
        return replace(self.problem, batch="n") if self.any_batch else self.problem


def _plain(tiling: Tiling) -> str:
    """The fields of a tiling: booleans as 0 and 1."""
    values = ((item.name, getattr(tiling, item.name)) for item in fields(tiling))
    return ",".join(f"{name}:{int(value) if isinstance(value, bool) else value}" for name, value in values)


def tiling_of(kind: type[Tiling], text: str) -> Tiling:
    """The tiling of a class that `_plain` wrote.

    Raises:
        ProblemError: it has other fields, or a value of another type.
    """
    words = dict(word.partition(":")[::2] for word in text.split(","))
    types = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    if set(words) != set(names):
        raise ProblemError(f"--tiling: {kind.__name__} has the fields {', '.join(names)}, but {text!r} was given")
    read: dict[type, Callable[[str], object]] = {int: int, bool: lambda word: bool(int(word)), str: str}
    try:
        return kind(**{name: read[types[name]](word) for name, word in words.items()})
    except ValueError as error:
        raise ProblemError(f"--tiling: {text!r} has a value of another type than its field's ({error})") from error


def words_of(text: str) -> tuple[dict[str, str], list[str]]:
    """The words of a case's string by their keys, and its tilings.

    Raises:
        ProblemError: an unknown key, or one that is missing.
    """
    words: dict[str, str] = {}
    tilings = []
    for word in text.split():
        key, _, value = word.partition("=")
        if key == "tiling":
            tilings.append(value)
        elif key in KEYS:
            words[key] = value
        else:
            raise ProblemError(f"--tiling: {key!r} is unknown; use {', '.join(KEYS)} and tiling")
    missing = {"isa", "kernel"} - set(words)
    if missing:
        raise ProblemError(f"--tiling: {', '.join(sorted(missing))} is missing; --fuzz prints whole ones")
    if words["isa"] not in CPUS:
        raise ProblemError(f"--tiling: isa={words['isa']} is unknown; use {', '.join(CPUS)}")
    return words, tilings


def machine_of_words(words: dict[str, str]) -> Machine:
    """The machine that a case's string names."""
    known = CPUS[words["isa"]]
    given = {}
    for key, field in MACHINE_KEYS.items():
        word = words.get(key, str(getattr(known, field)))
        if not word.isdigit() or (key != "parallel" and int(word) < 1):
            raise ProblemError(
                f"--tiling: {key}={word} is not a number that a machine has; leave it out for {known.name}'s"
            )
        given[field] = int(word)
    return replace(known, **given)  # type: ignore[arg-type]


def epilogue_of_words(words: dict[str, str]) -> Epilogue:
    """The epilogue that a case's string names."""
    names = [name for name in words.get("epilogue", "").split(",") if name]
    known = [item.name for item in fields(Epilogue)]
    unknown = set(names) - set(known)
    if unknown:
        raise ProblemError(f"--tiling: epilogue={','.join(sorted(unknown))} is unknown; use {', '.join(known)}")
    return Epilogue(**dict.fromkeys(names, True))


__all__ = ["KernelCase", "epilogue_of_words", "machine_of_words", "tiling_of", "words_of"]
