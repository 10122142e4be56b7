"""lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness, 0.4.13) on a trained model. The only file that imports it.

`python -m mesh_lm.evaluate --tasks=...` runs it here. Its own command line, with the model "mesh_lm" in its registry, is
`python -m mesh_lm.harness run --model mesh_lm --model_args checkpoint=DIR --tasks NAME`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh_lm.errors import ConfigError
from mesh_lm.inference import Generator, Sampling, Scorer
from mesh_lm.inference.perplexity import windows
from mesh_lm.inference.trained import TrainedModel
from sharding_rules.rules import did_you_mean

_MAX_NEW = 256
"""Tokens of an answer where the task names no number: the harness's own default."""
_BOOTSTRAP = 1000
"""Resamples behind a standard error. The harness's 100,000 take minutes for metrics of few documents."""


class Requests:
    """What the harness asks of a model, in terms of token ids and texts. Knows nothing of the harness."""

    def __init__(self, trained: TrainedModel, batch: int, start: int) -> None:
        """start: the token that stands before a text of which nothing else is given."""
        self.trained, self.batch, self.start = trained, batch, start
        self.seq_len = trained.config.model.seq_len
        self.scorer = Scorer(trained.layout, trained.params, batch)
        self.generator = functools.cache(lambda sampling: Generator(trained.layout, trained.params, trained.tokenizer, sampling, batch))

    def encode(self, text: str) -> list[int]:
        return self.trained.tokenizer.encode_batch([text])[0].tolist()

    def continuations(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(context, continuation) -> the continuation's log-probability, and whether greedy decoding would write it.

        A context that is too long loses its beginning. Raises ConfigError for a continuation that is too long by itself.
        """
        if longest := max((len(continuation) for _, continuation in pairs if len(continuation) > self.seq_len), default=0):
            raise ConfigError(f"a task asks for a continuation of {longest} tokens, more than the model's seq_len={self.seq_len}")
        asked = [((context or [self.start]) + continuation)[-self.seq_len - 1 :] for context, continuation in pairs if continuation]
        scores = iter(self.scorer(asked))
        answers = []
        for _, continuation in pairs:
            if n := len(continuation):
                score = next(scores)
                answers.append((float(score.logprobs[-n:].sum(dtype="float64")), bool(score.greedy[-n:].all())))
            else:
                answers.append((0.0, True))
        return answers

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each text after `start`; further windows are as full as they can be."""
        cut = [list(windows([self.start, *self.encode(text)], self.seq_len, self.seq_len)) for text in texts]
        scores = iter(self.scorer([ids for each in cut for ids, _ in each]))
        return [float(sum(next(scores).logprobs[-scored:].sum(dtype="float64") for _, scored in each)) for each in cut]

    def answers(self, prompts: Sequence[str], sampling: Sampling, stop: Sequence[str], max_new_tokens: int) -> list[str]:
        """Continuations up to a stop string. At most half of seq_len is for the answer; a prompt that is too long loses its beginning."""
        new = min(max_new_tokens, max(1, self.seq_len // 2))
        ids = [self.encode(prompt)[-(self.seq_len - new) :] for prompt in prompts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        made = self.generator(sampling).complete([ids[i] for i in order], new, stop=[s for s in stop if s])
        found = dict(zip(order, made, strict=True))
        return [found[i].text for i in range(len(ids))]


def adapter(trained: TrainedModel, *, batch: int, start: int) -> Any:
    """The trained model as an lm_eval.api.model.LM."""
    return register()(requests=Requests(trained, batch, start))


def find_tasks(names: Sequence[str], include_path: str = "") -> Any:
    """A TaskManager that knows the tasks. Raises ConfigError for a name that it does not know, or a directory that is not there.

    Nothing is downloaded, unless HF_DATASETS_OFFLINE=0 is in the environment.
    """
    _imported()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    if include_path and not Path(include_path).expanduser().is_dir():
        raise ConfigError(f"--include-path={include_path}: no such directory; give one with the .yaml files of tasks")
    manager = TaskManager(include_path=str(Path(include_path).expanduser()) if include_path else None, include_defaults=not include_path)
    known = manager.all_tasks
    if not names:
        raise ConfigError(f"--tasks names no task; known: {_few(known)}")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"--tasks: no task {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {_few(known)}"))
    return manager


def run(model: Any, tasks: Any, names: Sequence[str], limit: int = 0) -> tuple[dict[str, Any], str]:
    """Results as the harness gives them (what is of use of them), and as a table. limit: documents of each task; 0: all."""
    _imported()
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

    try:
        found: Any = simple_evaluate(
            model=model, tasks=list(names), task_manager=tasks, limit=limit or None, log_samples=False, bootstrap_iters=_BOOTSTRAP
        )
    except ConnectionError as error:
        fix = "put it into the cache of `datasets`, or set HF_DATASETS_OFFLINE=0 to download it"
        raise ConfigError(f"the data of a task is not on this machine ({error}); {fix}") from error
    kept = ("results", "groups", "n-samples", "n-shot", "versions", "higher_is_better")
    return {name: found[name] for name in kept if name in found}, make_table(found)


@functools.cache
def register() -> type:
    """The harness's view of `Requests`, in its registry as "mesh_lm"."""
    _imported()
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

    @register_model("mesh_lm")
    class MeshLM(TemplateLM):
        """Arguments are those of `mesh_lm.inference.model_arguments.load`, and `batch_size`."""

        def __init__(
            self, checkpoint: str = "", batch_size: Any = 8, start: str = "", requests: Requests | None = None,
            device: Any = None, max_batch_size: Any = None, **options: Any,
        ) -> None:  # fmt: skip
            super().__init__()
            if requests is None:
                from mesh_lm.inference.model_arguments import load
                from mesh_lm.inference.text import document_start

                known = [*(name for name in inspect.signature(load).parameters if name != "command"), "start", "batch_size"]
                if unknown := [name for name in options if name not in known]:
                    hint = did_you_mean(unknown[0], known)
                    raise ConfigError(f"--model_args {unknown[0]}={options[unknown[0]]}: there is no such argument{hint}")
                size = int(batch_size) if str(batch_size).isdigit() else 8
                if size < 1:
                    raise ConfigError(f"batch_size={batch_size} must be at least 1")
                trained = load(checkpoint, **options)
                requests = Requests(trained, size, document_start(trained.tokenizer, start))
            self.requests = requests

        @property
        def eot_token_id(self) -> int:
            return self.requests.trained.tokenizer.eod

        @property
        def prefix_token_id(self) -> int:
            return self.requests.start

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return self.requests.encode(string)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **kwargs: Any) -> list[tuple[float, bool]]:
            return self.requests.continuations([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return self.requests.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            alike = defaultdict(list)
            for i, request in enumerate(requests):
                alike[_settings(request.args[1])].append(i)
            answers: dict[int, str] = {}
            for (sampling, stop, new), places in alike.items():
                made = self.requests.answers([requests[i].args[0] for i in places], sampling, stop, new)
                answers.update(zip(places, made, strict=True))
            return [answers[i] for i in range(len(requests))]

    return MeshLM


def _settings(asked: dict[str, Any]) -> tuple[Sampling, tuple[str, ...], int]:
    """A task's generation_kwargs: greedy, unless it says do_sample and a temperature."""
    until = asked.get("until") or []
    stop = (until,) if isinstance(until, str) else tuple(until)
    asked = {name: value for name, value in asked.items() if value is not None}
    temperature = float(asked.get("temperature", 1.0)) if asked.get("do_sample", False) else 0.0
    new = next((int(asked[name]) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if asked.get(name)), _MAX_NEW)
    return Sampling(temperature, int(asked.get("top_k", 0)), float(asked.get("top_p", 1.0))), stop, new


def _imported() -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ.setdefault(name, "1")
    try:
        import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"--tasks needs lm-evaluation-harness ({error}): pip install 'mesh_lm[eval]'") from error


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def command() -> None:
    """Runs lm-evaluation-harness's own command, which finds this project's models under the name mesh_lm."""
    register()
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
