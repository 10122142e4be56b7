"""`python -m mesh_lm.evaluate --checkpoint=runs/gpt_tiny --text=FILE, or --tasks=NAME,...`: the
same as `mesh-lm evaluate`.
"""

from mesh_lm.commands.main import door

if __name__ == "__main__":
    door("evaluate")
