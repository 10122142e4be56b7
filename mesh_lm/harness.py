"""python -m mesh_lm.harness run --model=mesh_lm --model_args=checkpoint=runs/gpt_tiny:
lm-evaluation-harness's own command.
"""

import sys

from mesh_lm.errors import ConfigError
from mesh_lm.inference.harness import command

if __name__ == "__main__":
    try:
        command()
    except ConfigError as error:
        sys.exit(f"error: {error}")
