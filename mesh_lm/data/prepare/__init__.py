"""`python -m mesh_lm.data.prepare`: text of any size to Megatron's .bin/.idx, on all cores, and again from where it was killed.

plan (files > fixed shards) > worker (a shard > its tokens, in a process of its own) > unfinished (appended in order, with a journal) > run.
"""
