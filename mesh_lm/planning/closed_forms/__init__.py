"""Closed forms: what one train step must send, on paper.

Every collective of a decoder under a preset is derived from the design, not from a compiler. The
forms follow `mesh_lm/parallel/engine.py` (manual over data, one fp32 sum a step), `mesh_lm/model/`
(what a block gathers and reduces, what remat runs again), `mesh_lm/model/loss.py` and
`TableSharding` (tables). Pure arithmetic: no JAX, and nothing of the compiler. Compiled programs
are held to them, and docs/closed_forms.md is made from here.

`step.expected` returns the terms of a decoder and a strategy, and `config.expected_of` those of a
config. A module has the forms of one kind of parallelism.
"""
