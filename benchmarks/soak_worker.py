"""train.py with steps of at least MESH_LM_PACE seconds, so that a small run is long enough for
faults."""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from mesh_lm import distributed
from mesh_lm.training import session


class Slow(session.Monitor):
    def step(self, step: int, metrics: Any) -> Any:
        time.sleep(float(os.environ["MESH_LM_PACE"]))
        return super().step(step, metrics)


if __name__ == "__main__":
    session.Monitor = Slow
    sys.exit(distributed.run(train.main, sys.argv[1:]))
