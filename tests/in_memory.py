"""Token streams in memory."""

from __future__ import annotations

import numpy as np

from mesh_lm.data.indexed import TokenStream


class Tokens(TokenStream):
    """One document of the given ids; ids outside the uint16 range wrap around."""

    def __init__(self, tokens, vocab: int | None = None) -> None:
        self.tokens, self.prefix, self.first, self._source = np.asarray(tokens, np.uint16), "memory", 0, "memory.bin"
        self.offsets, self._vocab, self._is_always_valid = np.array([0, len(self.tokens)]), vocab, vocab is None
