"""python -m mesh_lm.generate --checkpoint=runs/gpt_tiny --prompt=..."""

import sys

from mesh_lm import distributed
from mesh_lm.commands.generate import main

if __name__ == "__main__":
    sys.exit(distributed.run(main, sys.argv[1:]))
