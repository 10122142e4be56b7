"""Token streams in memory."""

from __future__ import annotations

import numpy as np

from mesh_lm.data.indexed import InMemory, TokenStream


class Tokens(TokenStream):
    """One document of the given ids; ids outside the uint16 range wrap around."""

    def __init__(self, tokens, vocab: int | None = None) -> None:
        super().__init__(InMemory(np.asarray(tokens, np.uint16)), vocab=vocab)
