"""One run, one program: before a program's first call, the processes of a run compare a digest of
what each of them has lowered.

Every process traces and lowers the programs of a run itself. If two of them arrive at different
programs, perhaps because a model's code iterates over a set, the collectives of the one do not
match those of the other: the processes wait for each other for ever, or exchange arrays of the same
size that are not the same. So a difference ends the run before the first collective of the program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax

from mesh_lm import distributed

_ADDRESS = re.compile(r'(@CustomSPMDPartitioning\(.*?backend_config = )"\d*"')
"""A function of jax.custom_partitioning, such as attention of cuDNN. Its address differs between
processes."""
_KERNEL = re.compile(r'\b(kernel_hash|module) = "[^"]*"')
"""A kernel of Mosaic. It has the paths of its source files, which differ where hosts have the code
in different directories; and no collectives, so that no process waits for it."""


def compared(name: str, program: jax.stages.Wrapped) -> Callable[..., Any]:
    """The jitted program, which the processes of the run compare before its first call; with one
    process, the program itself.

    name: what the program is, for the message.
    """
    return program if jax.process_count() == 1 else _ComparedProgram(name, program)


def digest(lowered: jax.stages.Lowered) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a lowered program, without what differs
    between processes.
    """
    return hashlib.sha256(comparable(lowered.as_text()).encode()).hexdigest()[:12]


def comparable(text: str) -> str:
    """The text of a lowered program without addresses of functions and without kernels; it has no
    source lines.
    """
    return _KERNEL.sub(r"\1", _ADDRESS.sub(r"\1", text))


class _ComparedProgram:
    """A jitted program that all processes of the run call. The first call raises ConfigError on
    each of them if their programs differ.
    """

    def __init__(self, name: str, program: jax.stages.Wrapped) -> None:
        self._name = name
        self._program = program
        self._is_compared = False

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_compared:
            self._compare(arguments)
            self._is_compared = True
        return self._program(*arguments)

    def _compare(self, arguments: tuple[Any, ...]) -> None:
        with distributed.collective_errors():
            # JAX keeps what it has lowered, and the call that follows compiles that.
            program_digest = digest(self._program.lower(*arguments))
        distributed.assert_equal_across_processes(
            f"the program of {self._name}",
            program_digest,
            (
                "sort the sets over which the model's code iterates, or set PYTHONHASHSEED=0 on "
                "all hosts"
            ),
        )
