"""Sharding rules as data, the mesh that they map to, and `Shard`, which binds the two.

    shard = Shard(preset("fsdp+megatron"), make_mesh(MeshConfig(fsdp=2, tensor=4)))
    x = shard(x, "batch", "seq", "embed")

Nothing else of this project is imported.
"""

from sharding_rules.mesh import AXES as AXES
from sharding_rules.mesh import ISLAND as ISLAND
from sharding_rules.mesh import MANUAL as MANUAL
from sharding_rules.mesh import MeshConfig as MeshConfig
from sharding_rules.mesh import MeshError as MeshError
from sharding_rules.mesh import make_mesh as make_mesh
from sharding_rules.mesh import setting as setting
from sharding_rules.mesh import would_fit as would_fit
from sharding_rules.presets import PRESETS as PRESETS
from sharding_rules.presets import REDUCTIONS as REDUCTIONS
from sharding_rules.presets import preset as preset
from sharding_rules.presets import product as product
from sharding_rules.rules import TABLES as TABLES
from sharding_rules.rules import Rules as Rules
from sharding_rules.rules import ShardingRuleError as ShardingRuleError
from sharding_rules.rules import axes_of as axes_of
from sharding_rules.rules import did_you_mean as did_you_mean
from sharding_rules.rules import row_of as row_of
from sharding_rules.rules import unknown_scopes as unknown_scopes
from sharding_rules.scopes import EXPERTS as EXPERTS
from sharding_rules.scopes import EXTRA_ROUND as EXTRA_ROUND
from sharding_rules.shard import Shard as Shard
from sharding_rules.token_order import token_order as token_order
