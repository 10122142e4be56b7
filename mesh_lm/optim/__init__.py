"""Optimizers: one update rule per file, and what they share."""

from mesh_lm.optim.adafactor import Adafactor as Adafactor
from mesh_lm.optim.adamw import AdamW as AdamW
from mesh_lm.optim.adamw8 import AdamW8 as AdamW8
from mesh_lm.optim.config import DilocoConfig as DilocoConfig
from mesh_lm.optim.config import OptimizerConfig as OptimizerConfig
from mesh_lm.optim.contract import ArraySpec as ArraySpec
from mesh_lm.optim.contract import ArraySpecs as ArraySpecs
from mesh_lm.optim.contract import Params as Params
from mesh_lm.optim.contract import Rule as Rule
from mesh_lm.optim.contract import Slots as Slots
from mesh_lm.optim.contract import decayed as decayed
from mesh_lm.optim.contract import is_matrix as is_matrix
from mesh_lm.optim.lion import Lion as Lion
from mesh_lm.optim.muon import Muon as Muon
from mesh_lm.optim.optimizer import Optimizer as Optimizer
from mesh_lm.optim.rules import RULES as RULES
from mesh_lm.optim.rules import make_rule as make_rule
from mesh_lm.optim.rules import rule_name as rule_name
