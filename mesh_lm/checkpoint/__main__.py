"""`python -m mesh_lm.checkpoint ls|verify|diff`: the same as `mesh-lm checkpoint`."""

from mesh_lm.commands.main import door

if __name__ == "__main__":
    door("checkpoint")
