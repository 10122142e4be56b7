"""python -m mesh_lm.data.prepare --input=books.jsonl.zst --output=data/books --tokenizer=tokenizer.json"""

import sys

from mesh_lm.commands.prepare import main
from mesh_lm.errors import ConfigError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
