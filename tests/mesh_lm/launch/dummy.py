"""A dummy worker: it sends heartbeats like a real one, and on each carries out one action of a
script that is given as arguments.

python dummy.py DIRECTORY ACTION ...: one action per beat (0.1 s); "2:kill" is for process 2 only,
"1@kill" for the first life only, "1@2:kill" for both. saved=N and step=N are reported from then on;
wait: forever; deaf: forever, ignoring SIGTERM; exit=N; kill; abrt; bus; stop; fewer=N; child. It
writes DIRECTORY/life-G-PROCESS with its pid, that of its launcher, and the values from its
environment.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

directory, *actions = sys.argv[1:]
process = int(os.environ["MESH_LM_PROCESS_INDEX"])
life = int(os.environ["MESH_LM_GENERATION"])
pipe = int(os.environ["MESH_LM_HEARTBEAT"])
state = {
    "step": 0,
    "phase": "step",
    "since": 0.1,
    "saved": -1,
    "seconds": {"step": 1.0, "batch": 0.0},
}
note = Path(directory) / f"life-{life}-{process}"
variables = {
    name: value for name, value in os.environ.items() if name.startswith(("MESH_LM_", "JAX_"))
}
signals: list[int] = []


def beat(**message: object) -> None:
    try:
        os.write(pipe, json.dumps(message or state).encode() + b"\n")
    except BrokenPipeError:
        os._exit(71)


def act(action: str) -> None:
    name, _, value = action.partition("=")
    if name in ("saved", "step"):
        state[name] = int(value)
    elif name == "phase":
        state[name] = value
    elif name == "fewer":
        beat(nodes=int(value))
    elif name == "exit":
        sys.exit(int(value))
    elif name in ("kill", "abrt", "bus", "stop"):
        os.kill(os.getpid(), getattr(signal, f"SIG{name.upper()}"))
    elif name == "child":
        child = subprocess.Popen(
            ["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        (Path(directory) / "child").write_text(str(child.pid), encoding="utf-8")
    elif name == "wait":
        while not signals:
            beat()
            time.sleep(0.1)
        sys.exit(99)
    elif name == "deaf":
        while True:
            beat()
            time.sleep(0.1)
    else:
        raise ValueError(action)


signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
note.parent.mkdir(exist_ok=True)
note.with_suffix(".new").write_text(
    json.dumps(variables | {"pid": os.getpid(), "launcher": os.getppid(), "at": time.time()}),
    encoding="utf-8",
)
note.with_suffix(".new").rename(note)
for action in actions:
    only_life, _, action = action.rpartition("@")
    only_process, _, action = action.rpartition(":")
    beat()
    if only_life in ("", str(life)) and only_process in ("", str(process)):
        act(action)
    time.sleep(0.1)
