"""Files that start a run on Slurm or Kubernetes, and containers for it. Read them before use:
paths, names and accounts are yours.
"""

from __future__ import annotations

import json
import shlex

from mesh_lm.launch.job import Job, Options
from mesh_lm.network.exit_status import EXIT_CANNOT, EXIT_PREEMPTED, EXIT_USAGE

_DEFAULT = ["train.py", "--config=configs/llama3_8b.py", "--config.data.blend=data/web"]
_SLURM = """\
#!/bin/bash
#SBATCH --job-name=mesh_lm
{spares}#SBATCH --nodes={nodes}
# One launcher per node; each starts {per_node} processes.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --mem=0
# If preempted, the job is requeued and continues, and appends to the same log.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mesh_lm-%j.log
# {warning} seconds before its time limit the run saves, and exits with status {preempted}.
# scancel, preemption without GraceTime and scontrol requeue leave it only KillWait, which is 30 s
# unless slurm.conf sets more.
#SBATCH --signal=TERM@{warning}
{no_kill_job}
# Known to the tasks of this job only: srun hands it on in their environment, and the launchers
# refuse whoever does not know it.
MESH_LM_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')
export MESH_LM_SECRET

# Activate the environment that has mesh_lm here, unless your shell has it already:
# source .venv/bin/activate

# A launcher that ends must not end the others: the controller on node 0 decides that.
srun --kill-on-bad-exit=0 --wait=0 {no_kill}{launch}
status=$?

# After a save (status {preempted}) or a crash the same command continues the run. After a save the
# job is requeued without a limit; after a crash only while SLURM_RESTART_COUNT, which counts
# requeues of both kinds, is below 20.
case $status in
    {cannot}|{usage}|0) ;;
    *)
        if [ "$status" -eq {preempted} ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt 20 ]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        ;;
esac
exit "$status"
"""
_NO_KILL = """\
# A node that dies does not end the job: {instead}.
#SBATCH --no-kill
"""
_SPARES = """\
# {size} of these nodes compute. Spares, {spares} here, stand by and replace nodes that are lost or
# unhealthy.
"""
_JOBSET = """\
# Needs JobSet (https://jobset.sigs.k8s.io) in the cluster. It makes the headless service through
# which the pods find node 0.
# Needs a secret that the pods share, and without which none of them starts. Make it once:
#   kubectl create secret generic mesh-lm --from-literal=secret="$(openssl rand -hex 32)"
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: mesh-lm
spec:
  network:
    enableDNSHostnames: true           # node 0 is mesh-lm-node-0-0.mesh-lm
    subdomain: mesh-lm
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: 3                     # of all pods, in addition to the launchers' own restarts
    rules:
      - name: mistake                  # status {cannot} or {usage}: a restart would not help
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: {nodes}{spare_pods}
          completions: {nodes}
          completionMode: Indexed
          # Pods that may be lost and replaced; their launchers reconnect.
          backoffLimit: {backoff}
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {{containerName: mesh-lm, operator: In, values: [{cannot}, {usage}]}}
              - action: Ignore         # preempted: the run has saved, and a new pod continues
                onExitCodes: {{containerName: mesh-lm, operator: In, values: [{preempted}]}}
              - action: Ignore
                onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
          template:
            spec:
              restartPolicy: Never
              # Evict pods of an unreachable node after 30 s instead of 5 minutes.
              tolerations:
                - key: node.kubernetes.io/unreachable
                  operator: Exists
                  effect: NoExecute
                  tolerationSeconds: 30
                - key: node.kubernetes.io/not-ready
                  operator: Exists
                  effect: NoExecute
                  tolerationSeconds: 30
              terminationGracePeriodSeconds: {patience}
              containers:
                - name: mesh-lm
                  image: registry.example.com/mesh-lm:latest   # from --template=dockerfile
                  command: {command}
                  env:
                    - name: MESH_LM_NODES
                      value: "{nodes}"
                    - name: MESH_LM_NODE
                      valueFrom:
                        fieldRef:
                          fieldPath: >-
                            metadata.annotations['batch.kubernetes.io/job-completion-index']
                    - name: MESH_LM_RENDEZVOUS
                      value: mesh-lm-node-0-0.mesh-lm:9876
                    - name: MESH_LM_SECRET     # pods without it are refused
                      valueFrom:
                        secretKeyRef: {{name: mesh-lm, key: secret}}
                  resources:
                    limits:
                      nvidia.com/gpu: {gpus}
                  volumeMounts:
                    - {{name: shm, mountPath: /dev/shm}}
                    - {{name: runs, mountPath: /workspace/runs}}
              volumes:
                - name: shm            # NCCL's buffers; the default of 64 MiB is too small
                  emptyDir: {{medium: Memory, sizeLimit: 64Gi}}
                - name: runs           # checkpoints, on a disk that all pods share
                  persistentVolumeClaim: {{claimName: mesh-lm-runs}}
"""
_DOCKERFILE = """\
# NVIDIA's nightly image. Fixed versions: ghcr.io/nvidia/jax:jax-YYYY-MM-DD, or
# nvcr.io/nvidia/jax:YY.MM-py3.
FROM ghcr.io/nvidia/jax:jax
WORKDIR /workspace
COPY . .
# The image's own builds of JAX are kept.
RUN version() {{ python -c "from importlib import metadata; print(metadata.version('$1'))"; }} \\
    && echo "jax==$(version jax)" > /tmp/jax.txt \\
    && echo "jaxlib==$(version jaxlib)" >> /tmp/jax.txt \\
    && pip install --no-cache-dir -c /tmp/jax.txt -e '.[data]'
ENTRYPOINT ["python", "-m", "mesh_lm.launch"]
CMD {command}
"""
_DOCKERFILE_PIP = """\
# The CUDA libraries come from pip: the host needs NVIDIA's driver and container toolkit only.
FROM python:3.11-slim
WORKDIR /workspace
COPY . .
RUN pip install --no-cache-dir -e '.[data,cuda13]'
ENTRYPOINT ["python", "-m", "mesh_lm.launch"]
CMD {command}
"""
_TEMPLATES = {
    "slurm": _SLURM,
    "jobset": _JOBSET,
    "dockerfile": _DOCKERFILE,
    "dockerfile-pip": _DOCKERFILE_PIP,
}
NAMES = tuple(_TEMPLATES)
_KILL_MARGIN = 30
"""Seconds on top of --grace before Kubernetes kills a pod."""
_WARNING_MARGIN = 60
"""Seconds on top of --grace of Slurm's warning before the time limit."""
_COPIED = (
    "per_node",
    "spares",
    "min_nodes",
    "restarts",
    "heartbeat",
    "start",
    "grace",
    "rejoin",
    "health",
    "health_command",
)
"""Options that the command in the template has, too, if they differ from their defaults."""
_SLOW = {"start": 1800.0, "rejoin": 1800.0}
"""Kubernetes needs time to find a node for a pod and to pull its image."""
_DEFAULT_NODES = 8


def fill(options: Options, command: list[str]) -> str:
    """Returns the file that --template names, filled in from the options and the command.

    Default: Llama 3 8B on 8 nodes.
    """
    n_nodes = options.nodes or _DEFAULT_NODES + options.spares
    words = [*_launcher_words(options), *(command or _DEFAULT)]
    launch = ["python", "-m", "mesh_lm.launch", *words]
    # The entry point of a container has the first words.
    in_container = options.template.startswith("dockerfile")
    return _TEMPLATES[options.template].format(
        nodes=n_nodes,
        per_node=options.per_node,
        gpus=options.gpus,
        warning=int(options.grace) + _WARNING_MARGIN,
        patience=int(options.grace) + _KILL_MARGIN,
        backoff=4 * n_nodes,
        preempted=EXIT_PREEMPTED,
        cannot=EXIT_CANNOT,
        usage=EXIT_USAGE,
        launch=shlex.join(launch),
        command=json.dumps(words if in_container else launch),
        **_phrases_about_lost_nodes(options, n_nodes),
    )


def _launcher_words(options: Options) -> list[str]:
    """Returns the options of the command in the template."""
    values = _SLOW.copy() if options.template == "jobset" else {}
    for name in _COPIED:
        value = getattr(options, name)
        if value != getattr(Job, name):
            values[name] = value
    words = []
    for name, value in values.items():
        text = value if isinstance(value, int | str) else f"{value:g}"
        words.append(f"--{name.replace('_', '-')}={text}")
    return words


def _phrases_about_lost_nodes(options: Options, n_nodes: int) -> dict[str, str]:
    """Returns the fields that depend on --spares and --min-nodes."""
    remedies = []
    fields = {"spares": "", "spare_pods": "", "no_kill": "", "no_kill_job": ""}
    if options.spares:
        remedies.append("a spare replaces it")
        stand = "stands" if options.spares == 1 else "stand"
        fields["spares"] = _SPARES.format(size=n_nodes - options.spares, spares=options.spares)
        fields["spare_pods"] = f"           # {options.spares} of them {stand} by"
    if options.min_nodes:
        remedies.append(f"it continues with the remaining nodes, at least {options.min_nodes}")
    if remedies:
        fields["no_kill"] = "--no-kill "
        fields["no_kill_job"] = _NO_KILL.format(instead="; else ".join(remedies))
    return fields
