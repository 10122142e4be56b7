"""Sends metrics to Weights & Biases as well, on request. Only this file imports `wandb`.

Account, mode (WANDB_MODE=offline) etc. are set by W&B's own variables
(https://docs.wandb.ai/guides/track/environment-variables).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_lm.errors import ConfigError


def require_login(project: str) -> None:
    """Raises ConfigError if the package is missing, or there is no login and W&B is not offline. It
    neither prompts nor connects.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _package_missing(project) from error
    try:
        is_online = wandb.setup().settings.mode == "online"
        has_login = not is_online or wandb.login(prompt=False, verify=False)
    except TypeError:
        # a version that cannot check without a prompt; it reports the problem when the run begins
        return
    if not has_login:
        raise ConfigError(
            f"wandb={project}: you are not logged in to Weights & Biases; run `wandb login`, or "
            "set WANDB_MODE=offline"
        )


def _package_missing(project: str) -> ConfigError:
    return ConfigError(f"wandb={project} needs the package wandb: pip install -e '.[wandb]'")


class WeightsAndBiases:
    """One run of a project. Its id is kept in the output directory, so that a resumed run has the
    same one.
    """

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]) -> None:
        """Raises ConfigError if the package is missing or fails to start a run."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
            from wandb.errors import Error  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _package_missing(project) from error
        id_file = directory / "wandb_run"
        if not id_file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                id=id_file.read_text(encoding="utf-8").strip(),
                name=directory.name,
                resume="allow",
                dir=str(directory),
                config=dict(config),
                settings=wandb.Settings(silent=True),
            )
        except Error as error:
            raise ConfigError(
                f"wandb={project}: {error}; log in (wandb login), or set WANDB_MODE=offline"
            ) from error
        # An axis of our own: a run resumed from a checkpoint repeats steps, which W&B's step
        # counter does not accept.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Ends the W&B run; its remaining metrics are uploaded."""
        self._run.finish()
