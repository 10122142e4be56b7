"""Trains language models: `mesh_lm.train(config)`, `mesh_lm.plan(config, target, devices)`,
`mesh_lm.load(path)`.

Nothing is imported before it is used, not even JAX, so that each part costs only what it needs. The
command line is `mesh-lm`; to read the trainer, start with mesh_lm/training/loop.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_lm.api import Run as Run
    from mesh_lm.api import load as load
    from mesh_lm.api import plan as plan
    from mesh_lm.api import train as train

__version__ = "0.2.0"
__all__ = ["Run", "__version__", "load", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'mesh_lm' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    from mesh_lm import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
