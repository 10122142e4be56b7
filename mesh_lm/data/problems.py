"""Problems of a config's data that are known before any of it is read."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import DataConfig
from mesh_lm.data import blend
from mesh_lm.data.gpt_dataset import split_ranges
from mesh_lm.errors import ConfigError


def data_problems(data: DataConfig) -> Iterator[str]:
    """Yields contradictions and wrong values of the settings of `data`."""
    prefixes: list[set[str]] = []
    for field, words in (("data.blend", data.blend), ("data.valid_blend", data.valid_blend)):
        try:
            prefixes.append({*blend.parse(words, field)[0]})
        except ConfigError as error:
            yield str(error)
    try:
        split_ranges(data.split, 1)
    except ConfigError as error:
        yield str(error)
    if data.valid_blend and not data.blend:
        yield (
            f"data.valid_blend={' '.join(data.valid_blend)} is the held-out text of a data.blend; "
            "set that, too, or leave it out"
        )
    if data.valid_blend and data.split != DataConfig.split:
        yield (
            f"data.split={data.split} has no effect with data.valid_blend, which holds out "
            "complete prefixes; leave one of them out"
        )
    if len(prefixes) == 2:
        in_both = prefixes[0] & prefixes[1]
        if in_both:
            yield (
                f"data.valid_blend: {min(in_both)} is in data.blend, too, so that it would be "
                "trained on; leave it out of one of them"
            )
    no_extra_token = "no_extra_token" in data.megatron
    if no_extra_token and (not data.blend or data.documents == "packed" or data.fim_rate):
        yield (
            "data.megatron=no_extra_token is for a data.blend without packed documents and without "
            "data.fim_rate; leave it out"
        )
    for name in ("fim_rate", "fim_spm_rate", "max_lost_bytes"):
        value = getattr(data, name)
        if not 0 <= value <= 1:
            yield f"data.{name}={value} must be a fraction in [0, 1]"
    if data.fim_rate and data.documents == "packed":
        yield (
            f"data.fim_rate={data.fim_rate} makes documents longer, but packed ones have no room; "
            "set data.documents=separate"
        )
