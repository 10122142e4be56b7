"""lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness, 0.4.13) on a trained model.
The only file that imports it.

`python -m mesh_lm.evaluate --tasks=...` runs it here. Its own command line, with the model
"mesh_lm" in its registry, is `python -m mesh_lm.harness run --model mesh_lm --model_args
checkpoint=DIR --tasks NAME`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_lm import distributed
from mesh_lm.data import lost_bytes
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Generator, Sampling, Scorer
from mesh_lm.inference.perplexity import windows
from mesh_lm.inference.trained import TrainedModel
from sharding_rules.rules import did_you_mean

_MAX_NEW_TOKENS = 256
"""Maximum tokens of an answer if the task sets no limit; the harness's default."""
_BOOTSTRAP_SAMPLES = 1000
"""Resamples for standard errors. The harness's default of 100,000 takes minutes even for few
documents."""
_RESULTS = ("results", "groups", "n-samples", "n-shot", "versions", "higher_is_better")
"""Entries of the harness's results that are returned."""
_MAX_NAMES = 8
"""Names of tasks in a message."""
_DEFAULT_BATCH = 8


class _Request(NamedTuple):
    """The ids of a context and of its continuation."""

    context: list[int]
    continuation: list[int]
    is_joined: bool
    """Whether a token spans the two, so that the continuation had to be encoded by itself."""


class _AnswerSettings(NamedTuple):
    """The settings of a task for the answers to its prompts."""

    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int


class Requests:
    """The requests of the harness, in terms of token ids and texts; independent of its classes."""

    def __init__(
        self, trained: TrainedModel, batch: int, start: int, starts_context: bool | None = None
    ) -> None:
        """Compiles nothing: the first requests do.

        Args:
          batch: sequences at once.
          start: the token before a text without context.
          starts_context: whether it also comes before every context and prompt; None: unless it is
            the end-of-document token, which is not needed before text.
        """
        self.trained = trained
        self.batch = batch
        self.start = start
        if starts_context is None:
            starts_context = start != trained.tokenizer.eod
        self.starts_context = starts_context
        self.seq_len = trained.config.model.seq_len
        self.n_joined = 0
        self.scorer = Scorer(trained.layout, trained.params, batch)
        self.generator = functools.cache(
            lambda sampling: Generator(
                trained.layout, trained.params, trained.tokenizer, sampling, batch
            )
        )

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text."""
        return self.trained.tokenizer.encode_batch([text])[0].tolist()

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns, for each (context, continuation), the continuation's log-probability and whether
        greedy decoding would produce it.

        Continuations that were encoded by themselves, because a token spans the end of their
        context, are added to `n_joined`.

        Raises ConfigError as `continuations`, and for a continuation without any token.
        """
        requests = [self._divide(context, continuation) for context, continuation in pairs]
        n_joined = sum(request.is_joined for request in requests)
        if n_joined:
            self.n_joined += n_joined
            distributed.print_on_process0(
                f"{n_joined:,} of {len(pairs):,} continuations were encoded by themselves, because "
                "a token spans the end of their context"
            )
        return self.continuations([(request.context, request.continuation) for request in requests])

    def _divide(self, context: str, continuation: str) -> _Request:
        """Returns the ids of a request, divided as `TemplateLM` of the harness divides them.

        White space at the end of the context goes to the continuation. If the context by itself has
        n ids, the continuation has those of the whole text after the first n. That leaves none if a
        token spans the two, such as " town" in (" t", "own"). The harness does not define that
        case, and a log-probability of 0 would be wrong.
        """
        stripped_context = context.rstrip()
        continuation_text = context[len(stripped_context) :] + continuation
        context_ids = self.encode(stripped_context)
        all_ids = self.encode(stripped_context + continuation_text)
        continuation_ids = all_ids[len(context_ids) :]
        if continuation_ids or not continuation:
            return _Request(context_ids, continuation_ids, is_joined=False)
        continuation_ids = self.encode(continuation_text)
        if not continuation_ids:
            raise ConfigError(
                f"a task asks for the continuation {continuation_text[:40]!r}, for which the "
                "tokenizer has no token"
            )
        return _Request(context_ids, continuation_ids, is_joined=True)

    def continuations(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[float, bool]]:
        """Returns, for each (context, continuation), the continuation's log-probability and whether
        greedy decoding would produce it.

        Contexts are truncated as by `_context`. Raises ConfigError for a continuation that is too
        long by itself.
        """
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > self.seq_len:
            raise ConfigError(
                f"a task asks for a continuation of {longest} tokens, more than the model's "
                f"seq_len={self.seq_len}"
            )
        sequences = [
            self._context(context, self.seq_len + 1 - len(continuation)) + continuation
            for context, continuation in pairs
            if continuation
        ]
        scores = iter(self.scorer(sequences))
        answers = []
        for _, continuation in pairs:
            if not continuation:
                answers.append((0.0, True))
                continue
            score = next(scores)
            n = len(continuation)
            logprob = float(score.logprobs[-n:].sum(dtype="float64"))
            answers.append((logprob, bool(score.greedy[-n:].all())))
        return answers

    def _context(self, context: list[int], room: int) -> list[int]:
        """Returns the last `room` tokens of a context. The first of them is `start` if that starts
        contexts, or the context is empty.
        """
        if context and not self.starts_context:
            return context[-room:]
        n_kept = min(room - 1, len(context))
        return [self.start, *context[len(context) - n_kept :]]

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-probability of each text after `start`; windows after the first are
        filled with context.
        """
        windows_by_text = []
        n_lost = 0
        for text in texts:
            ids = self.encode(text)
            n_lost += self.trained.tokenizer.lost_bytes(text, np.array(ids, np.int32))
            text_windows = windows([self.start, *ids], self.seq_len, self.seq_len)
            windows_by_text.append(list(text_windows))
        n_bytes = sum(len(text.encode()) for text in texts)
        lost_bytes.refuse(n_lost, n_bytes, lost_bytes.TOLERATED)

        all_windows = itertools.chain.from_iterable(windows_by_text)
        scores = iter(self.scorer([tokens for tokens, _ in all_windows]))
        logprobs = []
        for text_windows in windows_by_text:
            logprob = 0.0
            for _, n_scored in text_windows:
                logprob += next(scores).logprobs[-n_scored:].sum(dtype="float64")
            logprobs.append(float(logprob))
        return logprobs

    def answers(
        self, prompts: Sequence[str], sampling: Sampling, stop: Sequence[str], max_new_tokens: int
    ) -> list[str]:
        """Returns continuations up to a stop string. Answers take at most half of seq_len; prompts
        are truncated as by `_context`.
        """
        max_new_tokens = min(max_new_tokens, max(1, self.seq_len // 2))
        room = self.seq_len - max_new_tokens
        prompt_ids = [self._context(self.encode(prompt), room) for prompt in prompts]
        # Prompts of similar lengths are batched together.
        order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
        completions = self.generator(sampling).complete(
            [prompt_ids[i] for i in order], max_new_tokens, stop=[s for s in stop if s]
        )
        answers = [""] * len(prompt_ids)
        for i, completion in zip(order, completions, strict=True):
            answers[i] = self._answer(completion.tokens, stop)
        return answers

    def _answer(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Returns the text of new tokens up to the first stop string, as the harness's other models
        do.

        Special tokens, and ids that only the padded vocabulary of the model has, stand for no text.
        """
        tokenizer = self.trained.tokenizer
        text = tokenizer.decode(
            token
            for token in tokens
            if token < tokenizer.vocab_size and token not in tokenizer.special_ids
        )
        for string in stop:
            if string:
                text = text.partition(string)[0]
        return text


def adapter(
    trained: TrainedModel, *, batch: int, start: int, starts_context: bool | None = None
) -> Any:
    """Returns the trained model as an lm_eval.api.model.LM. The arguments are those of
    `Requests`.
    """
    return register()(requests=Requests(trained, batch, start, starts_context))


def find_tasks(names: Sequence[str], include_path: str = "") -> Any:
    """Returns a TaskManager with the tasks. Raises ConfigError for an unknown task or a missing
    directory.

    Nothing is downloaded unless the environment has HF_DATASETS_OFFLINE=0.
    """
    _require_harness()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    if include_path and not Path(include_path).expanduser().is_dir():
        raise ConfigError(
            f"--include-path={include_path}: no such directory; give one with the .yaml files of "
            "tasks"
        )
    manager = TaskManager(
        include_path=str(Path(include_path).expanduser()) if include_path else None,
        include_defaults=not include_path,
    )
    all_names = manager.all_tasks
    if not names:
        raise ConfigError(f"--tasks names no task; known: {_first_names(all_names)}")
    for name in names:
        if name in all_names:
            continue
        near = difflib.get_close_matches(name, all_names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {_first_names(all_names)}"
        raise ConfigError(f"--tasks: there is no task {name!r}; {hint}")
    return manager


def run(model: Any, tasks: Any, names: Sequence[str], limit: int = 0) -> tuple[dict[str, Any], str]:
    """Returns the harness's results (the useful entries), and a table. limit: documents per task;
    0: all.
    """
    _require_harness()
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

    try:
        results: Any = simple_evaluate(
            model=model,
            tasks=list(names),
            task_manager=tasks,
            limit=limit or None,
            log_samples=False,
            bootstrap_iters=_BOOTSTRAP_SAMPLES,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"the data of a task is not on this machine ({error}); put it into the cache of "
            "`datasets`, or set HF_DATASETS_OFFLINE=0 to download it"
        ) from error
    entries = {name: results[name] for name in _RESULTS if name in results}
    return entries, make_table(results)


@functools.cache
def register() -> type:
    """Returns the harness's model class for `Requests`, registered as "mesh_lm"."""
    _require_harness()
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

    @register_model("mesh_lm")
    class MeshLM(LM):
        """Arguments are those of `mesh_lm.inference.model_arguments.load`, and `batch_size`."""

        def __init__(
            self,
            checkpoint: str = "",
            batch_size: Any = _DEFAULT_BATCH,
            start: str = "",
            requests: Requests | None = None,
            device: Any = None,
            max_batch_size: Any = None,
            **options: Any,
        ) -> None:
            super().__init__()
            if requests is None:
                requests = _requests(checkpoint, batch_size, start, options)
            self.requests = requests

        def loglikelihood(
            self, requests: Any, disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            return self.requests.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return self.requests.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            indices_by_settings = defaultdict(list)
            for i, request in enumerate(requests):
                indices_by_settings[_settings(request.args[1])].append(i)
            answers = [""] * len(requests)
            for settings, indices in indices_by_settings.items():
                prompts = [requests[i].args[0] for i in indices]
                texts = self.requests.answers(prompts, *settings)
                for i, text in zip(indices, texts, strict=True):
                    answers[i] = text
            return answers

    return MeshLM


def command() -> None:
    """Runs lm-evaluation-harness's own command with mesh_lm registered as a model."""
    register()
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()


def _requests(checkpoint: str, batch_size: Any, start: str, options: dict[str, Any]) -> Requests:
    """Loads the model that --model_args name. Raises ConfigError as `TrainedModel.load`."""
    from mesh_lm.inference.model_arguments import load
    from mesh_lm.inference.text import document_start

    parameters = [name for name in inspect.signature(load).parameters if name != "command"]
    names = [*parameters, "start", "batch_size"]
    for name, value in options.items():
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"--model_args {name}={value}: there is no such argument{hint}")
    # The harness also takes "auto".
    batch = int(batch_size) if str(batch_size).isdigit() else _DEFAULT_BATCH
    if batch < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1 request")
    trained = load(checkpoint, **options)
    start_id = document_start(trained.tokenizer, start)
    return Requests(trained, batch, start_id, starts_context=bool(start))


def _settings(kwargs: dict[str, Any]) -> _AnswerSettings:
    """Converts a task's generation_kwargs: greedy unless they have do_sample and a temperature."""
    until = kwargs.get("until") or []
    stop = (until,) if isinstance(until, str) else tuple(until)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    temperature = float(kwargs.get("temperature", 1.0)) if kwargs.get("do_sample", False) else 0.0
    top_k = int(kwargs.get("top_k", 0))
    top_p = float(kwargs.get("top_p", 1.0))
    max_new_tokens = _MAX_NEW_TOKENS
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        if kwargs.get(name):
            max_new_tokens = int(kwargs[name])
            break
    return _AnswerSettings(Sampling(temperature, top_k, top_p), stop, max_new_tokens)


def _require_harness() -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ.setdefault(name, "1")
    try:
        import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-evaluation-harness ({error}): pip install -e '.[eval]'"
        ) from error


def _first_names(names: Sequence[str]) -> str:
    if not names:
        return "none"
    remainder = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + remainder
