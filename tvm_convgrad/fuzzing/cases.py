# SPDX-License-Identifier: Apache-2.0
"""A case of the fuzzer: a problem, and all that decides which code a kernel has for it, as replayable strings.

--problem mb2ic17ih5oc3kh3ph1 --op wgrad
--tiling "isa=AVX2 l2=4096 parts=3 kernel=implicit_GEMM_wgrad epilogue=accumulate tiling=rows:3,columns:1,..."
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from tvm_convgrad.errors import ProblemError
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.target import CPUS, Machine
from tvm_convgrad.problem import ConvProblem

KEYS = ("isa", "l2", "registers", "parts", "parallel", "batch", "kernel", "region", "epilogue")
"""Words of a case's string besides `tiling=`, of which there is one for each loop nest."""


@dataclass(frozen=True)
class KernelCase:
    """A kernel for a direction of a problem.

    Attributes:
        problem: static.
        direction: "forward", "backward_weight" or "backward_data".
        machine: the CPU that the kernel is made for; it may have other caches than any CPU has.
        kind: the kernel's name.
        tilings: one for each of its loop nests.
        region: which decomposition of the result into regions an implicit GEMM has; 0 is none.
        epilogue: what is fused into the store.
        any_batch: whether the batch is a variable of the kernel.
    """

    problem: ConvProblem
    direction: str
    machine: Machine
    kind: str
    tilings: tuple[Any, ...]
    region: int = 0
    epilogue: Epilogue = NO_EPILOGUE
    any_batch: bool = False

    @property
    def tiling_text(self) -> str:
        """All but the problem and the direction as one string, which `case_of` reads."""
        machine = self.machine
        words = [f"isa={machine.name}", f"l2={machine.l2_bytes}", f"parts={machine.parts}"]
        words += [f"registers={machine.registers}"] if machine.registers != CPUS[machine.name].registers else []
        words += [f"parallel={machine.parallel_from}"]
        words += ["batch=any"] if self.any_batch else []
        words += [f"kernel={self.kind.replace(' ', '_')}"]
        words += [f"region={self.region}"] if self.region else []
        fused = [item.name for item in fields(self.epilogue) if getattr(self.epilogue, item.name)]
        words += [f"epilogue={','.join(fused)}"] if fused else []
        return " ".join([*words, *(f"tiling={_plain(tiling)}" for tiling in self.tilings)])

    def __str__(self) -> str:
        op = {"backward_weight": "wgrad", "backward_data": "dgrad"}.get(self.direction, self.direction)
        return f'--op {op} --problem {self.problem.descriptor} --tiling "{self.tiling_text}"'

    @property
    def planned_problem(self) -> ConvProblem:
        """The problem that the tilings are made for: of the representative batch where the kernel takes any."""
        return replace(self.problem, batch=plan.REPRESENTATIVE_BATCH) if self.any_batch else self.problem

    @property
    def compiled_problem(self) -> ConvProblem:
        """The problem as the kernel is made for it: its batch is a name where it is a variable of the kernel."""
        return replace(self.problem, batch="n") if self.any_batch else self.problem


def _plain(tiling: Any) -> str:
    """The fields of a tiling: booleans as 0 and 1."""
    values = ((item.name, getattr(tiling, item.name)) for item in fields(tiling))
    return ",".join(f"{name}:{int(value) if isinstance(value, bool) else value}" for name, value in values)


def tiling_of(kind: type, text: str) -> Any:
    """The tiling of a class that `_plain` wrote.

    Raises:
        ProblemError: it has other fields, or a value of another type.
    """
    words = dict(word.partition(":")[::2] for word in text.split(","))
    types = {item.name: str(item.type) for item in fields(kind)}
    if set(words) != set(types):
        raise ProblemError(f"--tiling: {kind.__name__} has the fields {', '.join(types)}, but {text!r} was given")
    read: dict[str, Callable[[str], object]] = {"int": int, "bool": lambda word: bool(int(word)), "str": str}
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
    numbers = {
        "l2": known.l2_bytes,
        "registers": known.registers,
        "parts": known.parts,
        "parallel": known.parallel_from,
    }
    for key in numbers:
        word = words.get(key, str(numbers[key]))
        if not word.isdigit() or (key != "parallel" and int(word) < 1):
            raise ProblemError(
                f"--tiling: {key}={word} is no number that a machine has; leave it out for {known.name}'s"
            )
        numbers[key] = int(word)
    return replace(
        known,
        l2_bytes=numbers["l2"],
        registers=numbers["registers"],
        parts=numbers["parts"],
        parallel_from=numbers["parallel"],
    )


def epilogue_of_words(words: dict[str, str]) -> Epilogue:
    """The epilogue that a case's string names."""
    names = [name for name in words.get("epilogue", "").split(",") if name]
    known = [item.name for item in fields(Epilogue)]
    unknown = set(names) - set(known)
    if unknown:
        raise ProblemError(f"--tiling: epilogue={','.join(sorted(unknown))} is unknown; use {', '.join(known)}")
    return Epilogue(**dict.fromkeys(names, True))


def choice_of(case: KernelCase, detail: Any) -> plan.Choice:
    """The choice that the plan would have made for the case."""
    return plan.Choice(case.kind, "a case of the fuzzer", detail=detail)


__all__ = ["KernelCase", "choice_of", "epilogue_of_words", "machine_of_words", "tiling_of", "words_of"]
