"""Optimizers: one update rule per file, and what they share."""

from mesh_lm.optim.contract import ArraySpec as ArraySpec
from mesh_lm.optim.contract import ArraySpecs as ArraySpecs
from mesh_lm.optim.contract import Params as Params
from mesh_lm.optim.contract import Rule as Rule
from mesh_lm.optim.contract import Slots as Slots
from mesh_lm.optim.contract import decayed as decayed
from mesh_lm.optim.contract import is_matrix as is_matrix
from mesh_lm.optim.optimizer import RULES as RULES
from mesh_lm.optim.optimizer import Optimizer as Optimizer
from mesh_lm.optim.optimizer import make_rule as make_rule
from mesh_lm.optim.optimizer import own_rule as own_rule
