"""`python -m mesh_lm.huggingface import|export ...`: the same as `mesh-lm import ...` and `mesh-lm
export ...`.
"""

import sys

from mesh_lm import distributed
from mesh_lm.commands.huggingface import main

if __name__ == "__main__":
    sys.exit(distributed.run(main, sys.argv[1:]))
