"""Trains a language model.

python train.py --config=configs/gpt_tiny.py [--config.model.n_layers=6 ...]

With --plan [--target=h100 --devices=1024] it shows what the run would do on GPUs that you do not
have, and does not train.

The command is also `mesh-lm train`, and in Python `mesh_lm.train(config)`. Read on in
mesh_lm/training/loop.py: there the training loop is in sight, and everything that a run is made of
is made in order.
"""

from collections.abc import Sequence

from mesh_lm.commands.main import door


def main(argv: Sequence[str]) -> int:
    """The exit status of a run with these arguments. Raises ConfigError."""
    # here, so that Ctrl-C while it imports JAX is answered by `door`
    from mesh_lm.commands import train

    return train.main(argv)


if __name__ == "__main__":
    door("train")
