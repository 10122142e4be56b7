"""Checkpoints: one Orbax composite {state, data, metadata} per step, written in the background,
restored onto any mesh and verified.

The tree on disk is plain dicts keyed by parameter names, layers in model order, so that the format
does not depend on Flax, optax, the mesh or pipeline stages. Orbax silently restores flipped bits,
so the metadata has a digest of every leaf, which a restore compares.

`python -m mesh_lm.checkpoint ls|verify|diff` inspects checkpoints.
"""

from mesh_lm.checkpoint.manager import Checkpoints as Checkpoints
from mesh_lm.checkpoint.reader import DamagedCheckpoint as DamagedCheckpoint
from mesh_lm.checkpoint.reader import SavedCheckpoint as SavedCheckpoint
from mesh_lm.checkpoint.reader import config_in as config_in
from mesh_lm.checkpoint.reader import find as find
from mesh_lm.checkpoint.reader import output_of as output_of
