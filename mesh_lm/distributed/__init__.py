"""What the processes of a run do together: start JAX, agree, share errors, and end.

The launcher, which needs no JAX, is `mesh_lm.launch`.
"""

from mesh_lm.distributed.processes import FewerNodes as FewerNodes
from mesh_lm.distributed.processes import StopOnSigterm as StopOnSigterm
from mesh_lm.distributed.processes import agree as agree
from mesh_lm.distributed.processes import first_before_others as first_before_others
from mesh_lm.distributed.processes import from_all as from_all
from mesh_lm.distributed.processes import from_first as from_first
from mesh_lm.distributed.processes import join as join
from mesh_lm.distributed.processes import prefix as prefix
from mesh_lm.distributed.processes import require_shared as require_shared
from mesh_lm.distributed.processes import run as run
from mesh_lm.distributed.processes import say as say
from mesh_lm.distributed.processes import start as start
from mesh_lm.distributed.processes import together as together
