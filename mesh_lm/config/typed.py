"""The words of a command line that describe a run, to print a command that changes some of it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from mesh_lm.config.layout import Fields


@dataclasses.dataclass(frozen=True)
class TypedRun:
    """A run as it was typed."""

    config: tuple[str, ...] = ()
    """The word that names the config; none for the default."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """section.field -> the word that sets it. A saved layout (--mesh=FILE.json) is none of them."""
    has_layout: bool = False
    """Whether the config itself names a saved layout, which a search does not read."""

    def train_command(self, words: Mapping[str, str]) -> str:
        """Returns the command that trains this run with other values.

        words: section.field -> the word that sets it, in place of the word that was typed.
        """
        typed = [word for field, word in self.options.items() if field not in words]
        return shlex.join(["mesh-lm", "train", *self.config, *typed, *words.values()])

    def fields_to_type(self, fields: Fields, changes: Fields) -> Fields:
        """Returns what must be typed of a layout.

        fields: all of it. changes: what differs from the run without a saved layout.
        """
        return fields if self.has_layout else changes
