"""Import and export of Hugging Face models: GPT-2, Llama 3, Mixtral, Qwen3 and Qwen3-MoE. The
command is `python -m mesh_lm.huggingface`.
"""

from mesh_lm.huggingface.configs import config_of as config_of
from mesh_lm.huggingface.configs import is_huggingface as is_huggingface
from mesh_lm.huggingface.export_weights import save as save
from mesh_lm.huggingface.import_weights import load as load
from mesh_lm.huggingface.import_weights import reader as reader
