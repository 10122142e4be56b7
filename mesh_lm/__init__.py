"""The trainer. Start reading at train.py, one folder up. Importing this package loads nothing: each part costs only what it needs."""


def __getattr__(name: str) -> str:
    """`__version__`, from the installed package's metadata."""
    if name == "__version__":
        from importlib.metadata import version

        return version("mesh_lm")
    raise AttributeError(f"module 'mesh_lm' has no attribute {name!r}")
