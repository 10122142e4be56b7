"""`python -m mesh_lm.pipeline --stages=4 --microbatches=8`: the same as `mesh-lm pipeline`."""

from mesh_lm.commands.main import door

if __name__ == "__main__":
    door("pipeline")
