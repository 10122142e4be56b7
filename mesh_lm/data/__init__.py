"""From text to sharded batches: corpus > indexed (.bin/.idx) > sequences > loader.

Only `tokenizer` imports `tokenizers` and its like and only `loader` imports `grain`; nothing is imported here, so that the rest works
without them.
"""
