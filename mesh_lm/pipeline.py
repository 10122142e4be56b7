"""python -m mesh_lm.pipeline --stages=4 --microbatches=8: draws and compares pipeline schedules"""

import sys

from mesh_lm.commands.pipeline import main
from mesh_lm.errors import ConfigError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
