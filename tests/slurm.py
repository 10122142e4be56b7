"""A Slurm cluster of two nodes on this machine, in one directory; nothing outside of it is changed.

Debian's slurm-wlm allows several slurmd on a host. The nodes are called 127.0.0.1 and 127.0.0.2, so
that their names resolve.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from mesh_lm.network.wire import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue")

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/%n
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort={ports[0]}
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=1 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """The reason why no cluster can be started here; empty if one can."""
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=_path())]:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """The environment in which srun and sbatch reach the cluster, which lives as long as the
    context."""
    for name in ("state", "127.0.0.1", "127.0.0.2"):
        (directory / name).mkdir()
    low = _two_free_ports()
    config = _CONFIG.format(
        host=socket.gethostname().split(".")[0], dir=directory, ports=(free_port(), low, low + 1)
    )
    (directory / "slurm.conf").write_text(config, encoding="utf-8")
    (key := directory / "munge.key").write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _path()}
    munge = [
        f"--{name}={directory}/munge.{name.removesuffix('-file')}"
        for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    daemons = [
        ["munged", "--force", "--foreground", f"--key-file={key}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "127.0.0.1"],
        ["slurmd", "-D", "-N", "127.0.0.2"],
    ]
    running = []
    try:
        for daemon in daemons:
            running.append(
                subprocess.Popen(
                    daemon, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
            time.sleep(1)
        deadline = time.monotonic() + 60
        while _output(["sinfo", "-h", "-o", "%D %t"], environment) != "2 idle":
            assert time.monotonic() < deadline, (directory / "ctld.log").read_text(
                encoding="utf-8"
            )[-2000:]
            time.sleep(0.5)
        yield environment
    finally:
        _output(["scancel", "--user=root", "--signal=KILL"], environment)
        for daemon in reversed(running):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _two_free_ports() -> int:
    while True:
        low = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", low + 1)):
            return low


def _output(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()
