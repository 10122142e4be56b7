"""Metrics to Weights & Biases as well, on request. The only file that imports `wandb`.

Account, mode (WANDB_MODE=offline) and all else are set by W&B's own variables (https://docs.wandb.ai/guides/track/environment-variables).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_lm.errors import ConfigError


def require_login(project: str) -> None:
    """Raises ConfigError where the package is missing, or where nobody is logged in and W&B is not offline. Asks nothing, and no server."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"wandb={project} needs the package wandb: pip install 'mesh_lm[wandb]'") from error
    try:
        logged_in = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
    except TypeError:  # a version that cannot tell without asking; it answers when the run begins
        return
    if not logged_in:
        raise ConfigError(f"wandb={project}: you are not logged in to Weights & Biases; run `wandb login`, or set WANDB_MODE=offline")


class WeightsAndBiases:
    """One run of a project, the same one each time the output directory is continued: its id is kept there."""

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]) -> None:
        """Raises ConfigError where the package is missing or refuses to start a run."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
            from wandb.errors import Error  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(f"wandb={project} needs the package wandb: pip install 'mesh_lm[wandb]'") from error
        kept = directory / "wandb_run"
        if not kept.exists():
            directory.mkdir(parents=True, exist_ok=True)
            kept.write_text(uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=project, id=kept.read_text().strip(), name=directory.name, resume="allow", dir=str(directory), config=dict(config),
                settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except Error as error:
            raise ConfigError(f"wandb={project}: {error}; log in (wandb login), or set WANDB_MODE=offline") from error
        # Our own axis: a run continued from a checkpoint goes back, which W&B's step counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
