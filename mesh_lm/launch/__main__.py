"""python -m mesh_lm.launch --per-node=2 --devices=4 train.py --config=configs/gpt_tiny.py"""

from mesh_lm.commands.launch import leave, main

if __name__ == "__main__":
    leave(main())
