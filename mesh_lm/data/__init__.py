"""Data pipeline from text to sharded batches: corpus > indexed (.bin/.idx) > sequences > loader.

Only `tokenizer` imports tokenizer libraries and only `loader` imports `grain`. This package imports
nothing, so that the rest works without them.
"""
