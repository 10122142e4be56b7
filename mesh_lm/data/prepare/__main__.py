"""`python -m mesh_lm.data.prepare --input=books.jsonl --output=data/books --tokenizer=...`: the
same as `mesh-lm prepare`.
"""

from mesh_lm.commands.main import door

if __name__ == "__main__":
    door("prepare")
