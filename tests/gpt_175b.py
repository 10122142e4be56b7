"""Sizes of gpt_175b on one of 1,024 devices, from its config: what a kernel of ours has to be good
at."""

from configs.gpt_175b import get_config

_CONFIG = get_config()
_MODEL, _TENSOR, _STAGES = _CONFIG.model, _CONFIG.mesh.tensor, _CONFIG.mesh.pipeline
_WIDE, _FF = _MODEL.d_model // _TENSOR, _MODEL.d_mlp // _TENSOR
MATRICES = {
    "qkv": (_MODEL.d_model, 3 * _WIDE), "out": (_WIDE, _MODEL.d_model), "up": (_MODEL.d_model, _FF),
    "down": (_FF, _MODEL.d_model)
}  # fmt: skip
"""Name -> K and N."""
LAYERS = _MODEL.n_layers // _STAGES
"""Rows of a stack."""
TOKENS = (
    _MODEL.seq_len
    * _CONFIG.train.global_batch
    // _CONFIG.train.microbatches
    // (1024 // (_TENSOR * _STAGES))
)
"""Of one microbatch."""
