"""python -m mesh_lm.checkpoint ls|verify|diff"""

import sys

from mesh_lm import distributed
from mesh_lm.commands.checkpoint import main

if __name__ == "__main__":
    sys.exit(distributed.run(main, sys.argv[1:]))
