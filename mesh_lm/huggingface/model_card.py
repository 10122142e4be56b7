"""README.md of an exported directory: the model card that the Hub shows."""

from __future__ import annotations

from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.model import DecoderConfig

FILE = "README.md"
_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A `{architecture}` with {n_params:,} parameters in {dtype}, trained with mesh_lm.

| | |
|---|---|
| layers | {config.n_layers} |
| width | {config.d_model} |
| heads | {config.n_heads}, {config.kv_heads} of keys and values |
{experts}| longest text | {config.seq_len:,} tokens |
| vocabulary | {config.vocab_size:,} tokens |

{use}
Not stated here: what the model was trained on, how it was evaluated, and its license.
"""
_USE = """\
```python
from transformers import {classes}

{lines}
```
"""
_EXPERTS = "| experts | {number} in a layer, {active} of them for each token |\n"
_NO_TOKENIZER = """
transformers cannot load the tokenizer. `mesh_lm.data.tokenizer.load_tokenizer("{name}")` can.
"""


def model_card(
    name: str, architecture: str, config: DecoderConfig, dtype: str, tokenizer: Tokenizer | None
) -> str:
    """Returns the text of a model card. name: of the directory; architecture: the class of
    transformers.
    """
    classes = ["AutoModelForCausalLM"]
    lines = [f'model = AutoModelForCausalLM.from_pretrained("{name}")']
    if tokenizer and tokenizer.is_in_transformers:
        classes.append("AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    use = _USE.format(classes=", ".join(classes), lines="\n".join(lines))
    if tokenizer and not tokenizer.is_in_transformers:
        use += _NO_TOKENIZER.format(name=name)
    experts = ""
    if config.has_experts:
        experts = _EXPERTS.format(number=config.experts.number, active=config.experts.active)
    return _TEMPLATE.format(
        name=name,
        architecture=architecture,
        n_params=config.n_params(),
        dtype=dtype,
        config=config,
        experts=experts,
        use=use,
    )
