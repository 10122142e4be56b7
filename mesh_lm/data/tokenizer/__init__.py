"""Tokenizers: `load_tokenizer(spec)` loads one, `train_tokenizer` trains one. Each library is
imported in one file.

Four kinds share one interface (`base.Tokenizer`): Hugging Face's tokenizer.json (`hugging_face`),
SentencePiece models (`sentence_piece`), tiktoken rank files (`ranks`), and plain bytes
(`plain_bytes`).
"""

from mesh_lm.data.tokenizer.base import (
    EOD,
    FORMER,
    MIN_VOCAB,
    DecodeStream,
    Tokenizer,
    smaller_than_asked,
)
from mesh_lm.data.tokenizer.load import load_tokenizer, train_tokenizer

__all__ = [
    "EOD",
    "FORMER",
    "MIN_VOCAB",
    "DecodeStream",
    "Tokenizer",
    "load_tokenizer",
    "smaller_than_asked",
    "train_tokenizer",
]
