"""`python -m mesh_lm.launch --per-node=2 --devices=4 train.py --config=configs/gpt_tiny.py`: the
same as `mesh-lm launch ...`.
"""

from mesh_lm.commands.main import door

if __name__ == "__main__":
    door("launch")
