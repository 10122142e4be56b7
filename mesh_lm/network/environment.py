"""The environment variables that the launcher sets for its workers, and those that hold the secret
of a job.
"""

HEARTBEAT = "MESH_LM_HEARTBEAT"
"""File descriptor of the pipe to which a worker writes its heartbeats."""
NODES = "MESH_LM_NODES"
"""Number of nodes on which the workers run; for a launcher, the number of launchers (--nodes)."""
ELASTIC = "MESH_LM_ELASTIC"
"""Number of nodes of the full job, set if it may continue with fewer
(`mesh_lm.training.elastic`)."""
LEAST = "MESH_LM_LEAST"
"""The fewest nodes with which the job may continue (--min-nodes)."""
GENERATION = "MESH_LM_GENERATION"
"""How often the workers have been started, this time included."""
BEGUN = "MESH_LM_BEGUN"
"""How many of the earlier starts came as far as the run's checkpoints."""
SECRET = "MESH_LM_SECRET"
"""The secret of the job (`mesh_lm.network.secret`). Workers get one of their own, derived from it
for each start."""
SECRET_FILE = "MESH_LM_SECRET_FILE"
"""A file that holds it, readable by its owner only."""
