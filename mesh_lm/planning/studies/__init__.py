"""Studies: the figures of a paper on parallel training, without a cluster.

A study is rows of plain data: `replica_bytes` (what data parallelism sends), `strategies` (all of
them side by side, on paper), `scaling` (compiled at each number of GPUs). `charts` draws rows,
`figures` says what they show, and `output` writes them as CSV, pictures and one page. `guide` says
which strategy to use where.
"""
