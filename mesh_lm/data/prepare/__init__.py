"""`python -m mesh_lm.data.prepare` tokenizes text of any size to Megatron's .bin/.idx on all cores;
a killed run can be resumed.

plan (files > fixed shards) > worker (shard > tokens, in a separate process) > unfinished (appends
in order, with a journal) > run.
"""
