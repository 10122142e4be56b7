"""Text from a model, on the mesh and by the rules it was trained with.

`Generator` continues texts, `Engine` token ids, `Scorer` says how likely given ids are. The command is `python -m mesh_lm.generate`.
"""

from mesh_lm.inference.engine import Engine, Session
from mesh_lm.inference.sampling import Sampling
from mesh_lm.inference.scoring import Score, Scorer
from mesh_lm.inference.text import Completion, Generator

__all__ = ["Completion", "Engine", "Generator", "Sampling", "Score", "Scorer", "Session"]
