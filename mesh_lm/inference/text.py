"""Continues texts: encoding and decoding, stop strings and streaming."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Literal

from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference.engine import Engine
from mesh_lm.inference.sampling import Sampling
from mesh_lm.parallel.layout import ModelLayout, Params

_CHECK_EVERY = 16
"""Tokens between checks for a stop string, when text is not streamed."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of a prompt."""

    text: str
    """Without the stop string or the stop token."""
    tokens: list[int]
    """Up to and including the token that ends it."""
    logprobs: list[float]
    """Log-probability of each token in nats, before temperature, top_k and top_p."""
    reason: Literal["stop", "length"]
    """Why it ends: a stop string or token, or the maximum number of tokens."""


class Generator:
    """Continues texts on the mesh of the layout. Random draws depend only on a text's index in the
    list and on the seed.
    """

    def __init__(
        self,
        layout: ModelLayout,
        params: Params,
        tokenizer: Tokenizer,
        sampling: Sampling = Sampling(),
        batch: int = 16,
        start: int | None = None,
    ) -> None:
        """Checks that the model can generate.

        Args:
          batch: texts at once.
          start: a token to put before every prompt, for models that were trained with one.

        Raises:
          ConfigError: the model has no logits, or fewer ids than the tokenizer.
        """
        if tokenizer.vocab_size > layout.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model "
                f"{layout.config.vocab_size}: the model was trained with another tokenizer"
            )
        self.engine = Engine(layout, params, sampling)
        self.tokenizer = tokenizer
        self.batch = batch
        self._start = [] if start is None else [start]

    def prompt(self, text: str | Sequence[int]) -> list[int]:
        """Returns the ids of a prompt; an empty one becomes the end-of-document token, which starts
        a new document.
        """
        if isinstance(text, str):
            if not _is_text(text):
                raise ConfigError(
                    f"the prompt {text[:40]!a} is not text: it has a lone surrogate, or bytes that "
                    "are not UTF-8"
                )
            ids = self.tokenizer.encode_batch([text])[0].tolist()
        else:
            ids = text
        return [*self._start, *ids] or [self.tokenizer.eod]

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_at_eod: bool = True,
    ) -> list[Completion]:
        """Continues each text (or token ids) by at most `max_new_tokens`, up to the first stop
        string or the end of the document.

        Raises ConfigError as `Engine.start` does.
        """
        prompt_ids = [self.prompt(prompt) for prompt in prompts]
        if not prompt_ids:
            return []
        # Checks all first, so that a mistake in the last does not waste work on the others.
        self.engine.check(prompt_ids, max_new_tokens, seed)
        stop_ids = [self.tokenizer.eod] if stop_at_eod else []
        completions: list[Completion] = []
        for first in range(0, len(prompt_ids), self.batch):
            group = prompt_ids[first : first + self.batch]
            writers = [CompletionWriter(self.tokenizer, ids, stop, stop_ids) for ids in group]
            session = self.engine.start(
                group,
                max_new_tokens,
                seed=seed,
                rows=range(first, first + len(group)),
                stop_ids=stop_ids,
                batch=min(self.batch, len(prompt_ids)),
            )
            while not session.done:
                new_tokens = session.advance(_CHECK_EVERY if stop else None)
                for row, tokens in enumerate(new_tokens):
                    writers[row].push(tokens)
                    if writers[row].reason == "stop":
                        session.end(row)
            completions += [writer.completion() for writer in writers]
        return completions

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_at_eod: bool = True,
    ) -> Iterator[str]:
        """Yields the same text as `complete([prompt], ...)`, in pieces as it is generated."""
        ids = self.prompt(prompt)
        stop_ids = [self.tokenizer.eod] if stop_at_eod else []
        writer = CompletionWriter(self.tokenizer, ids, stop, stop_ids)
        session = self.engine.start([ids], max_new_tokens, seed=seed, stop_ids=stop_ids)
        while not session.done and writer.reason != "stop":
            tokens = session.advance(1)[0]
            piece = writer.push(tokens)
            if piece:
                yield piece
        piece = writer.finish()
        if piece:
            yield piece


def as_typed(argument: str) -> str:
    """Returns a word of the command line as UTF-8, also if Python has decoded it as another
    encoding, as with LC_ALL=C.
    """
    if _is_text(argument):
        return argument
    with contextlib.suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class CompletionWriter:
    """Decodes one row's tokens up to a stop string, which may span tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Raises ConfigError for an empty stop string."""
        if "" in stop:
            raise ConfigError("an empty stop string ends every text before it starts; leave it out")
        self.reason: Literal["stop", "length"] = "length"
        self._stop = stop
        self._stop_ids = stop_ids
        self._stream = tokenizer.stream()
        self._stream.push(*prompt)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._text: list[str] = []
        self._unreleased = ""  # may be the start of a stop string
        self._ended_by_string = False

    def push(self, tokens: Sequence[tuple[int, float]]) -> str:
        """Returns the text that has become final. Tokens after the end are ignored.

        tokens: with their log-probabilities.
        """
        released = []
        for token, logprob in tokens:
            if self.reason == "stop":
                break
            self._tokens.append(token)
            self._logprobs.append(logprob)
            if token in self._stop_ids:
                self.reason = "stop"
            else:
                released.append(self._release(self._stream.push(token)))
        return "".join(released)

    def finish(self) -> str:
        """Returns the text that was not final, as no token follows."""
        if self._ended_by_string:
            return ""
        released = self._release(self._stream.flush())
        unreleased = self._unreleased
        self._unreleased = ""
        self._text.append(unreleased)
        return released + unreleased

    def completion(self) -> Completion:
        """Returns all text so far as a Completion."""
        self.finish()
        return Completion(
            "".join(self._text), list(self._tokens), list(self._logprobs), self.reason
        )

    def _release(self, piece: str) -> str:
        """Adds a piece of text. Returns the text up to a stop string, or to the start of one at the
        end.
        """
        text = self._unreleased + piece
        positions = [text.find(stop) for stop in self._stop if stop in text]
        if positions:
            end = min(positions)
            self._unreleased = ""
            self._ended_by_string = True
            self.reason = "stop"
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
            self._unreleased = text[end:]
        self._text.append(text[:end])
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of the text may start the stop string."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def document_start(tokenizer: Tokenizer, name: str) -> int:
    """Returns the id of the special token `name`, or of the end-of-document token. Raises
    ConfigError if there is no such token.
    """
    start = tokenizer.special(as_typed(name)) if name else tokenizer.eod
    if start is None:
        raise ConfigError(f"--start={name}: the tokenizer has no such special token")
    return start
