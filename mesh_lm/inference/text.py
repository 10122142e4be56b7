"""Continues texts: tokens in and out, stop strings, and text as it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference.engine import Engine
from mesh_lm.inference.sampling import Sampling
from mesh_lm.parallel.layout import ModelLayout, Params

_LOOK = 16
"""Tokens between two looks for a stop string where nobody reads along."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What follows a prompt."""

    text: str
    """Without the stop string or the stop token."""
    tokens: list[int]
    """Up to and with the token that ended it."""
    logprobs: list[float]
    """Of each token, in nats, under the model itself: before temperature, top_k and top_p."""
    reason: Literal["stop", "length"]
    """Why it ends: a stop string or token, or all tokens made that were asked for."""


class Generator:
    """Continues texts on the mesh of the layout. A text's continuation depends on its place in the list and on the seed only."""

    def __init__(
        self, layout: ModelLayout, params: Params, tokenizer: Tokenizer, sampling: Sampling = Sampling(), batch: int = 16,
        start: int | None = None,
    ) -> None:  # fmt: skip
        """batch: texts at once. start: a token that stands before every prompt, for models that were trained so.

        Raises ConfigError for a model that gives no logits, or has fewer ids than the tokenizer.
        """
        if tokenizer.vocab_size > layout.config.vocab_size:
            raise ConfigError(
                f"the tokenizer makes {tokenizer.vocab_size} ids and the model knows {layout.config.vocab_size}: "
                "they do not belong together"
            )
        self.engine, self.tokenizer, self.batch = Engine(layout, params, sampling), tokenizer, batch
        self._start = [] if start is None else [start]

    def prompt(self, text: str | Sequence[int]) -> list[int]:
        """The ids of a prompt; an empty one is the end-of-document token, after which a new document starts."""
        if isinstance(text, str) and not _is_text(text):
            raise ConfigError(f"the prompt {text[:40]!a} is not text: it has half a UTF-16 pair, or bytes that are not UTF-8")
        ids = self.tokenizer.encode_batch([text])[0].tolist() if isinstance(text, str) else list(text)
        return [*self._start, *ids] or [self.tokenizer.eod]

    def complete(
        self, prompts: Sequence[str | Sequence[int]], max_new_tokens: int, *, seed: int = 0, stop: Sequence[str] = (),
        stop_at_eod: bool = True,
    ) -> list[Completion]:  # fmt: skip
        """Continues each text (or token ids) by at most `max_new_tokens`, up to the first of the `stop` strings or a document's end.

        Raises ConfigError as `Engine.start` does.
        """
        ids = [self.prompt(prompt) for prompt in prompts]
        if ids:  # all of them: a mistake in the last must not cost the work on the others
            self.engine.check(ids, max_new_tokens, seed)
        done: list[Completion] = []
        for first in range(0, len(ids), self.batch):
            group = ids[first : first + self.batch]
            rows = range(first, first + len(group))
            stop_ids = [self.tokenizer.eod] if stop_at_eod else []
            writers = [CompletionWriter(self.tokenizer, prompt, stop, stop_ids) for prompt in group]
            batch = min(self.batch, len(ids))
            session = self.engine.start(group, max_new_tokens, seed=seed, rows=rows, stop_ids=stop_ids, batch=batch)
            while not session.done:
                for row, tokens in enumerate(session.advance(_LOOK if stop else None)):
                    writers[row].push(tokens)
                    if writers[row].reason == "stop":
                        session.end(row)
            done += [writer.completion() for writer in writers]
        return done

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int, *, seed: int = 0, stop: Sequence[str] = (), stop_at_eod: bool = True
    ) -> Iterator[str]:
        """The same text as `complete([prompt], ...)`, in the pieces in which it is made."""
        ids = self.prompt(prompt)
        stop_ids = [self.tokenizer.eod] if stop_at_eod else []
        writer = CompletionWriter(self.tokenizer, ids, stop, stop_ids)
        session = self.engine.start([ids], max_new_tokens, seed=seed, stop_ids=stop_ids)
        while not session.done and writer.reason != "stop":
            if piece := writer.push(session.advance(1)[0]):
                yield piece
        if rest := writer.finish():
            yield rest


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class CompletionWriter:
    """Tokens of one row to its text, up to a stop string, which may begin in one token and end in another."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), stop_ids: Sequence[int] = ()) -> None:
        """Raises ConfigError for an empty stop string."""
        if "" in stop:
            raise ConfigError("an empty stop string ends every text before it starts; leave it out")
        self._stop, self._stop_ids = stop, stop_ids
        self._stream = tokenizer.stream()
        self._stream.push(*prompt)
        self._held = ""  # may be the start of a stop string
        self._text: list[str] = []
        self._made: list[tuple[int, float]] = []
        self._cut = False
        self.reason: Literal["stop", "length"] = "length"

    def push(self, tokens: Sequence[tuple[int, float]]) -> str:
        """Text that is certain now. Tokens after the end are ignored."""
        released = []
        for token, logprob in tokens:
            if self.reason == "stop":
                break
            self._made.append((token, logprob))
            if token in self._stop_ids:
                self.reason = "stop"
            else:
                released.append(self._release(self._stream.push(token)))
        return "".join(released)

    def finish(self) -> str:
        """What was held back."""
        if self._cut:
            return ""
        rest = self._release(self._stream.flush())
        if self._held:
            self._text.append(self._held)
            rest, self._held = rest + self._held, ""
        return rest

    def completion(self) -> Completion:
        self.finish()
        return Completion("".join(self._text), [t for t, _ in self._made], [p for _, p in self._made], self.reason)

    def _release(self, piece: str) -> str:
        self._held += piece
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            ready, self._held = self._held[: min(ends)], ""
            self._cut, self.reason = True, "stop"
        else:
            cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
            ready, self._held = self._held[:cut], self._held[cut:]
        self._text.append(ready)
        return ready


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that may be the start of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def document_start(tokenizer: Tokenizer, name: str) -> int:
    """The id of the special token `name`, or of the end-of-document token. Raises ConfigError where the tokenizer has no such token."""
    start = tokenizer.special(name) if name else tokenizer.eod
    if start is None:
        raise ConfigError(f"--start={name}: the tokenizer has no such special token")
    return start
