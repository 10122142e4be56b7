"""Cooperation between the processes of a run: starting JAX, exchanging values and errors, stopping.

The launcher, which needs no JAX, is `mesh_lm.launch`.
"""

from mesh_lm.distributed.prefix import log_prefix as log_prefix
from mesh_lm.distributed.processes import FewerNodes as FewerNodes
from mesh_lm.distributed.processes import (
    assert_equal_across_processes as assert_equal_across_processes,
)
from mesh_lm.distributed.processes import broadcast_from_process0 as broadcast_from_process0
from mesh_lm.distributed.processes import collective_errors as collective_errors
from mesh_lm.distributed.processes import expected_devices as expected_devices
from mesh_lm.distributed.processes import gather_from_all as gather_from_all
from mesh_lm.distributed.processes import join as join
from mesh_lm.distributed.processes import print_on_process0 as print_on_process0
from mesh_lm.distributed.processes import process0_first as process0_first
from mesh_lm.distributed.processes import require_shared as require_shared
from mesh_lm.distributed.processes import run as run
from mesh_lm.distributed.processes import start as start
from mesh_lm.distributed.stop import StopOnSignal as StopOnSignal
