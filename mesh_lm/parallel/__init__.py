"""How a model lies on a mesh and how a step runs on it: layout, microbatch engine, pipeline stages and their ring."""
