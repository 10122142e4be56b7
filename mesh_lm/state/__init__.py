"""The training state: its declaration (`parts`), initialization, form on disk, and digests."""

from mesh_lm.state.loss_statistics import initial_statistics as initial_statistics
from mesh_lm.state.parts import COUNTERS as COUNTERS
from mesh_lm.state.parts import FEEDBACK as FEEDBACK
from mesh_lm.state.parts import MASTER as MASTER
from mesh_lm.state.parts import State as State
from mesh_lm.state.parts import StatePart as StatePart
from mesh_lm.state.parts import abstract_state as abstract_state
from mesh_lm.state.parts import counters as counters
from mesh_lm.state.parts import masters as masters
from mesh_lm.state.parts import parts as parts
from mesh_lm.state.parts import state_shardings as state_shardings
from mesh_lm.state.parts import weights_of as weights_of
