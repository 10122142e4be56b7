"""Inference with a trained model, on the mesh and with the rules of training, or others.

`Generator` continues texts, `Engine` continues token ids, `Scorer` returns log-probabilities of
given ids.

The command is `python -m mesh_lm.generate`.
"""

from mesh_lm.inference.engine import Engine, Session
from mesh_lm.inference.sampling import Sampling
from mesh_lm.inference.scoring import Score, Scorer
from mesh_lm.inference.text import Completion, Generator

__all__ = ["Completion", "Engine", "Generator", "Sampling", "Score", "Scorer", "Session"]
