"""`python -m mesh_lm.generate --checkpoint=runs/gpt_tiny --prompt=...`: the same as `mesh-lm
generate`.
"""

from mesh_lm.commands.main import door

if __name__ == "__main__":
    door("generate")
