"""`python -m mesh_lm COMMAND ...`: the same as `mesh-lm COMMAND ...`."""

from mesh_lm.commands.main import script

if __name__ == "__main__":
    script()
