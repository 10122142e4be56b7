"""python -m mesh_lm.evaluate --checkpoint=runs/gpt_tiny --text=FILE, or --tasks=NAME,..."""

import sys

from mesh_lm import distributed
from mesh_lm.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(distributed.run(main, sys.argv[1:]))
