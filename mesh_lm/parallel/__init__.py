"""A model on a mesh: its layout, the microbatch engine, and pipeline stages with the ring between
them.
"""
