"""The machine code (SASS) of a Mosaic GPU kernel: the instructions of its loops, in their order.

It also shows which wgmmas are in flight meanwhile. ptxas may move arithmetic across a wait, and may
add waits of its own, so that an overlap which the program states is an overlap on the GPU only if
the machine code has it. Reading it needs nvdisasm (`pip install nvidia-cuda-nvdisasm`, which the
extra `dev` has), but no GPU.
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

MATMUL = "HGMMA"
"""A wgmma of 16 columns of the contraction."""
EXP2 = "MUFU.EX2"
"""An exponential."""
WAIT = "WARPGROUP.DEPBAR"
"""A wait for wgmmas."""
BARRIER = "BAR"
"""A barrier of several warps."""
LOCAL = ("LDL", "STL")
"""Accesses to local memory: registers that were spilled."""


@dataclass(frozen=True)
class Loop:
    """The instructions of one loop, in the order of their addresses, without those of inner loops.

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
        """The number of groups of wgmmas that each wait leaves in flight: 0 is a full drain."""
        return tuple(allowed for kind, allowed in self._events() if kind == WAIT)

    def in_flight(self, *opcodes: str) -> tuple[int, ...]:
        """The number of groups of wgmmas in flight when each of these instructions is issued.

        It is that of the second pass through the loop and of all later ones.
        """
        n_groups = 0
        counts: list[int] = []
        for _ in range(2):  # the first pass starts with nothing in flight, unlike those that follow
            counts = []
            for instruction, (kind, number) in zip(self.instructions, self._events(), strict=True):
                if kind == WAIT:
                    n_groups = min(n_groups, number)
                elif kind == MATMUL:
                    n_groups += number
                if _is(instruction, *opcodes):
                    counts.append(n_groups)
        return tuple(counts)

    def _events(self) -> Iterator[tuple[str, int]]:
        """(WAIT, groups left in flight), (MATMUL, groups that end) or ("", 0), by instruction."""
        for instruction in self.instructions:
            if _is(instruction, WAIT):
                yield WAIT, int(instruction.rsplit(", ", 1)[1], 16)
            elif _is(instruction, MATMUL):
                yield MATMUL, int(instruction.endswith("gsb0"))  # which ends a group
            else:
                yield "", 0

    def summary(self) -> str:
        """The loop in lines: its wgmma groups, waits, barriers, and the counts of the rest."""
        lines: list[str] = []
        opcode_counts: Counter[str] = Counter()

        def flush() -> None:
            if opcode_counts:
                lines.append(
                    "  " + " ".join(f"{name}:{n}" for name, n in opcode_counts.most_common())
                )
                opcode_counts.clear()

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
                opcode_counts[name if name == EXP2 else name.split(".")[0]] += 1
        flush()
        return "\n".join(lines)


@dataclass(frozen=True)
class MachineCode:
    """The machine code of one kernel."""

    name: str
    loops: tuple[Loop, ...]
    """The loops that issue wgmmas of their own, in the order of their addresses."""
    local_memory: int
    """Accesses to local memory in the whole kernel."""
    barriers: int
    """bar.sync and bar.arrive in the whole kernel."""


def machine_code(
    fn: Callable[..., Any], *shapes: Any, capability: tuple[int, int] = (9, 0)
) -> list[MachineCode]:
    """Returns the machine code of fn's Mosaic GPU kernels, compiled without a GPU.

    Arguments and errors are as for `resources.resources`. Also raises FileNotFoundError if ptxas or
    nvdisasm is not installed.
    """
    ptxas = tool("ptxas")
    nvdisasm = tool("nvdisasm")
    arch = f"-arch=sm_{capability[0]}{capability[1]}a"
    with tempfile.TemporaryDirectory() as folder:
        kernels = []
        for path in write_ptx(folder, fn, *shapes, capability=capability):
            binary = str(path.with_suffix(".cubin"))
            compilation = [ptxas, arch, "-O3", str(path), "-o", binary]
            subprocess.run(compilation, check=True, capture_output=True)
            sass = subprocess.run(
                [nvdisasm, "-c", binary],
                check=True,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
            )
            kernels += parse(sass.stdout)
        return kernels


@functools.cache
def tool(name: str) -> str:
    """The path of a tool of the CUDA toolkit. Raises FileNotFoundError if it is not installed.

    It may be in NVIDIA's wheels, on the PATH or in /usr/local/cuda.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).glob(f"*/bin/{name}")):
            if os.access(path, os.X_OK):
                return str(path)
    installed = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if installed is None:
        raise FileNotFoundError(
            f"{name} is not installed; run: pip install -e '.[aot]' nvidia-cuda-nvdisasm"
        )
    return installed


def parse(sass: str) -> list[MachineCode]:
    """The kernels in the text that `nvdisasm -c` writes."""
    _, *sections = re.split(r"^\.text\.(\S+):$", sass, flags=re.M)
    kernels = []
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        code = _Code(text)
        instructions = [_without_predicate(instruction) for instruction in code.instructions]
        loops = [Loop(tuple(instructions[i] for i in body)) for body in code.loops()]
        kernels.append(
            MachineCode(
                name=name,
                loops=tuple(loop for loop in loops if loop.count(MATMUL)),
                local_memory=sum(_is(instruction, *LOCAL) for instruction in instructions),
                barriers=sum(_is(instruction, BARRIER) for instruction in instructions),
            )
        )
    return kernels


def _is(instruction: str, *opcodes: str) -> bool:
    name = instruction.split(" ", 1)[0]
    return any(name == opcode or name.startswith(opcode + ".") for opcode in opcodes)


def _without_predicate(instruction: str) -> str:
    return re.sub(r"^@!?\w+\s+", "", instruction)


class _Code:
    """The instructions of a function, and the graph of its basic blocks.

    Attributes:
      instructions: with predicates, without addresses.
      starts, stops: of each block, its first instruction and the one after its last.
      successors: of each block, the blocks that may follow it.
    """

    def __init__(self, text: str) -> None:
        self.instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            label = re.match(r"(\.L_\w+):", line)
            instruction = re.match(r"\s+(?:\{\s*)?/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
            if label:
                labels[label[1]] = len(self.instructions)
            elif instruction:
                self.instructions.append(instruction[1])

        n_instructions = len(self.instructions)
        jumps: dict[int, int] = {}
        block_ends: set[int] = set()
        for i, instruction in enumerate(self.instructions):
            jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instruction)
            if jump:
                jumps[i] = labels[jump[1]]
            if jump or _is(_without_predicate(instruction), "EXIT", "RET"):
                block_ends.add(i)
        starts = {0, *jumps.values(), *(i + 1 for i in block_ends)}
        self.starts = sorted(i for i in starts if i < n_instructions)
        self.stops = [*self.starts[1:], n_instructions]

        block_by_start = {start: block for block, start in enumerate(self.starts)}
        self.successors: list[list[int]] = []
        for block, stop in enumerate(self.stops):
            last = stop - 1
            successors = []
            if jumps.get(last, n_instructions) < n_instructions:
                successors.append(block_by_start[jumps[last]])
            # A branch with a predicate may fall through.
            is_conditional = re.match(r"@|BRA\.DIV|BRA\S* !?U?P", self.instructions[last])
            falls_through = last not in block_ends or is_conditional
            if falls_through and block + 1 < len(self.stops):
                successors.append(block + 1)
            self.successors.append(successors)

    def loops(self) -> list[list[int]]:
        """The indices of the instructions of each natural loop, without those of inner loops.

        Loops are in the order of their first instructions.
        """
        dominators = self._dominators()
        predecessors = self._predecessors()
        # The blocks of each loop, by its head, which dominates a block that jumps back to it.
        bodies: dict[int, set[int]] = {}
        for block, successors in enumerate(self.successors):
            for head in successors:
                if head not in dominators[block]:
                    continue
                body = bodies.setdefault(head, {head})
                unvisited = [block]
                while unvisited:
                    member = unvisited.pop()
                    if member not in body:
                        body.add(member)
                        unvisited += predecessors[member]

        loops = []
        for head in sorted(bodies):
            inner: set[int] = set()
            for other, body in bodies.items():
                if other != head and other in bodies[head]:
                    inner |= body
            instructions = []
            for block in sorted(bodies[head] - inner):
                instructions += range(self.starts[block], self.stops[block])
            loops.append(instructions)
        return loops

    def _predecessors(self) -> list[list[int]]:
        predecessors: list[list[int]] = [[] for _ in self.successors]
        for block, successors in enumerate(self.successors):
            for successor in successors:
                predecessors[successor].append(block)
        return predecessors

    def _dominators(self) -> list[set[int]]:
        """For each block, the blocks that every path from the start to it visits.

        Blocks that no path reaches are dominated by nothing.
        """
        reached = {0}
        unvisited = [0]
        while unvisited:
            new_blocks = set(self.successors[unvisited.pop()]) - reached
            reached |= new_blocks
            unvisited += new_blocks

        # The greatest fixed point.
        predecessors = self._predecessors()
        n_blocks = len(self.successors)
        dominators = [set(reached) if block in reached else set() for block in range(n_blocks)]
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for block in sorted(reached - {0}):
                incoming = [dominators[p] for p in predecessors[block] if p in reached]
                common = {block} | set.intersection(*incoming)
                if common != dominators[block]:
                    dominators[block] = common
                    changed = True
        return dominators
