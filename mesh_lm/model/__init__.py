"""Models. `Model` is the interface that the trainer requires; `DecoderConfig` describes the decoder
of this project.

The decoder module itself is imported where it is built (`DecoderConfig.make`), so that reading a
config does not import Flax.
"""

from mesh_lm.model.config import DecoderConfig as DecoderConfig
from mesh_lm.model.config import SegmentConfig as SegmentConfig
from mesh_lm.model.contract import Batch as Batch
from mesh_lm.model.contract import Context as Context
from mesh_lm.model.contract import Generative as Generative
from mesh_lm.model.contract import Layer as Layer
from mesh_lm.model.contract import Model as Model
from mesh_lm.model.contract import Sums as Sums
from mesh_lm.model.contract import positions_of as positions_of
from mesh_lm.model.contract import token_batch as token_batch
from mesh_lm.model.experts_config import ExpertsConfig as ExpertsConfig
