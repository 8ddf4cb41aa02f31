"""From a request's `SamplingConfig` to the one that is executed: seed drawn, schema translated."""

from __future__ import annotations

import os
from dataclasses import replace

from pyspec.config import SamplingConfig
from pyspec.grammar import schema_grammar


def resolve(config: SamplingConfig) -> SamplingConfig:
    """`config` with a concrete seed, and its JSON schema as a grammar.

    Raises:
        SamplerError: The schema uses something that cannot become a grammar.
    """
    if config.json_schema is not None:
        config = replace(config, grammar=schema_grammar(config.json_schema), json_schema=None)
    if config.seed is None:
        config = replace(config, seed=int.from_bytes(os.urandom(4), "little"))
    return config
