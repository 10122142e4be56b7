"""The machine code (SASS) of a Mosaic GPU kernel: what its loops issue, in which order, and what is
in flight meanwhile.

ptxas may move arithmetic across a wait, and may add waits of its own, so that an overlap which the
program states is an overlap on the GPU only if the machine code has it. Reading it needs nvdisasm
(`pip install nvidia-cuda-nvdisasm`, which the extra `dev` has), but no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.dev.resources import write_ptx

MATMUL, EXP2, WAIT, BARRIER = "HGMMA", "MUFU.EX2", "WARPGROUP.DEPBAR", "BAR"
"""A wgmma of 16 columns of the contraction, an exponential, a wait for wgmmas, a barrier of several
warps."""
LOCAL = ("LDL", "STL")
"""Accesses to local memory: registers that were spilled."""


@dataclass(frozen=True)
class Loop:
    """The instructions of one loop, in the order of their addresses, without those of loops inside
    it.

    Code that ptxas moved out of line, such as a barrier's second attempt, comes last.
    """

    instructions: tuple[str, ...]
    """Without predicate and address, such as "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24,
    gsb0"."""

    def count(self, *opcodes: str) -> int:
        """The number of instructions that start with one of `opcodes`."""
        return sum(_is(instruction, *opcodes) for instruction in self.instructions)

    @property
    def waits(self) -> tuple[int, ...]:
        """For each wait, the number of groups of wgmmas that it leaves in flight: 0 is a full
        drain.
        """
        return tuple(left for kind, left in self._events() if kind == WAIT)

    def in_flight(self, *opcodes: str) -> tuple[int, ...]:
        """For each of these instructions, the number of groups of wgmmas in flight when it is
        issued, from the second pass on.
        """
        flying, found = 0, []
        for _ in range(2):  # the first pass starts with nothing in flight, unlike those that follow
            found = []
            for instruction, (kind, number) in zip(self.instructions, self._events(), strict=True):
                if kind == WAIT:
                    flying = min(flying, number)
                elif kind == MATMUL:
                    flying += number
                if _is(instruction, *opcodes):
                    found.append(flying)
        return tuple(found)

    def _events(self) -> Iterator[tuple[str, int]]:
        for instruction in self.instructions:
            if _is(instruction, WAIT):
                yield WAIT, int(instruction.rsplit(", ", 1)[1], 16)
            elif _is(instruction, MATMUL):
                yield MATMUL, int(instruction.endswith("gsb0"))  # which ends a group
            else:
                yield "", 0

    def summary(self) -> str:
        """The loop in lines: each wgmma group, wait and barrier, and between them the counts of
        everything else.
        """
        lines: list[str] = []
        others: Counter[str] = Counter()

        def flush() -> None:
            if others:
                lines.append("  " + " ".join(f"{name}:{n}" for name, n in others.most_common()))
                others.clear()

        matmuls = 0
        for instruction in self.instructions:
            if _is(instruction, MATMUL):
                matmuls += 1
                if instruction.endswith("gsb0"):
                    flush()
                    lines.append(f"{matmuls} x {instruction}")
                    matmuls = 0
            elif _is(instruction, WAIT, BARRIER, "SYNCS", "BRA"):
                flush()
                lines.append(instruction)
            else:
                name = instruction.split()[0]
                others[name if name == EXP2 else name.split(".")[0]] += 1
        flush()
        return "\n".join(lines)


@dataclass(frozen=True)
class MachineCode:
    """One kernel. loops: those that issue wgmmas, in the order of their addresses; a loop without
    any of its own is left out.
    """

    name: str
    loops: tuple[Loop, ...]
    local_memory: int
    """Accesses to local memory in the whole kernel."""
    barriers: int
    """bar.sync and bar.arrive in the whole kernel."""


def machine_code(
    fn: Callable[..., Any], *shapes: Any, capability: tuple[int, int] = (9, 0)
) -> list[MachineCode]:
    """The machine code of fn's Mosaic GPU kernels, compiled without a GPU. Arguments and errors as
    for `resources.resources`.

    Also raises FileNotFoundError if ptxas or nvdisasm is not installed.
    """
    ptxas, nvdisasm = tool("ptxas"), tool("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for path in write_ptx(folder, fn, *shapes, capability=capability):
            binary = str(path.with_suffix(".cubin"))
            arch = f"-arch=sm_{capability[0]}{capability[1]}a"
            subprocess.run(
                [ptxas, arch, "-O3", str(path), "-o", binary], check=True, capture_output=True
            )
            found += parse(
                subprocess.run(
                    [nvdisasm, "-c", binary],
                    check=True,
                    capture_output=True,
                    encoding="utf-8",
                    errors="replace",
                ).stdout
            )
        return found


@functools.cache
def tool(name: str) -> str:
    """The path of a tool of the CUDA toolkit, from NVIDIA's wheels, the PATH or /usr/local/cuda.
    Raises FileNotFoundError.
    """
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        path
        for root in (spec and spec.submodule_search_locations) or ()
        for path in sorted(Path(root).glob(f"*/bin/{name}"))
    ]
    found = next((str(path) for path in wheels if os.access(path, os.X_OK)), None)
    found = found or shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        raise FileNotFoundError(
            f"{name} is not installed; run: pip install -e '.[aot]' nvidia-cuda-nvdisasm"
        )
    return found


def parse(sass: str) -> list[MachineCode]:
    """The kernels in the text that `nvdisasm -c` writes."""
    parts = re.split(r"^\.text\.(\S+):$", sass, flags=re.M)
    found = []
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        code = _Code(text)
        plain = [_plain(instruction) for instruction in code.instructions]
        loops = (Loop(tuple(plain[i] for i in body)) for body in code.loops())
        found.append(
            MachineCode(
                name,
                tuple(loop for loop in loops if loop.count(MATMUL)),
                sum(_is(instruction, *LOCAL) for instruction in plain),
                sum(_is(instruction, BARRIER) for instruction in plain),
            )
        )
    return found


def _is(instruction: str, *opcodes: str) -> bool:
    name = instruction.split(" ", 1)[0]
    return any(name == opcode or name.startswith(opcode + ".") for opcode in opcodes)


def _plain(instruction: str) -> str:
    return re.sub(r"^@!?\w+\s+", "", instruction)


class _Code:
    """The instructions of a function, and the graph of its basic blocks."""

    def __init__(self, text: str) -> None:
        self.instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if match := re.match(r"(\.L_\w+):", line):
                labels[match[1]] = len(self.instructions)
            elif match := re.match(r"\s+(?:\{\s*)?/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                self.instructions.append(match[1])
        jumps = {
            i: labels[match[1]]
            for i, x in enumerate(self.instructions)
            if (match := re.search(r"\bBRA\b.*`\((\.L_\w+)\)", x))
        }
        leaves = {
            i
            for i, x in enumerate(self.instructions)
            if i in jumps or _is(_plain(x), "EXIT", "RET")
        }
        count = len(self.instructions)
        self.starts = sorted(i for i in {0, *jumps.values(), *(i + 1 for i in leaves)} if i < count)
        self.stops = [*self.starts[1:], count]
        block = {start: number for number, start in enumerate(self.starts)}
        self.next: list[list[int]] = []
        for number, stop in enumerate(self.stops):
            last = self.instructions[stop - 1]
            after = (
                [block[jumps[stop - 1]]] if stop - 1 in jumps and jumps[stop - 1] < count else []
            )
            always = stop - 1 in leaves and not re.match(r"@|BRA\.DIV|BRA\S* !?U?P", last)
            self.next.append(
                after if always or number + 1 == len(self.stops) else [*after, number + 1]
            )

    def loops(self) -> list[list[int]]:
        """The indices of the instructions of each natural loop, without those of loops inside it,
        in the order of the first ones.
        """
        dominators, before = self._dominators(), self._before()
        bodies: dict[int, set[int]] = {}
        for block, successors in enumerate(self.next):
            for head in successors:
                if head in dominators[block]:
                    body, left = bodies.setdefault(head, {head}), [block]
                    while left:
                        if (one := left.pop()) not in body:
                            body.add(one)
                            left += before[one]
        found = []
        for head in sorted(bodies):
            inner = set().union(
                *(body for other, body in bodies.items() if other != head and other in bodies[head])
            )
            own = sorted(bodies[head] - inner)
            found.append([i for block in own for i in range(self.starts[block], self.stops[block])])
        return found

    def _before(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.next]
        for block, successors in enumerate(self.next):
            for other in successors:
                before[other].append(block)
        return before

    def _dominators(self) -> list[set[int]]:
        """For each block, those that every path from the start to it visits. Blocks that no path
        reaches are dominated by nothing.
        """
        reached, left = {0}, [0]
        while left:
            fresh = set(self.next[left.pop()]) - reached
            reached |= fresh
            left += fresh
        before = self._before()
        found = [set(reached) if block in reached else set() for block in range(len(self.next))]
        found[0], changed = {0}, True
        while changed:
            changed = False
            for block in sorted(reached - {0}):
                new = {block} | set.intersection(
                    *(found[other] for other in before[block] if other in reached)
                )
                changed |= new != found[block]
                found[block] = new
        return found
