"""From a request's `SamplingConfig` to the one that is executed: seed drawn, schema translated."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace

from pyspec.config import SamplingConfig
from pyspec.errors import SamplerError


def resolve(config: SamplingConfig) -> SamplingConfig:
    """`config` with a concrete seed, and its JSON schema as a grammar.

    Raises:
        SamplerError: The schema uses something that cannot become a grammar.
    """
    if config.json_schema is not None:
        config = replace(config, grammar=_grammar_of(config), json_schema=None)
    if config.seed is None:
        config = replace(config, seed=secrets.randbits(32))
    return config


def _grammar_of(config: SamplingConfig) -> str:
    # Imported here: llama_cpp loads the libraries, and only schemas need it.
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    schema = config.json_schema
    loose, strict = r'char ::= [^"\\] |', r'char ::= [^"\\\x7F\x00-\x1F] |'
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        # The converter lets raw control characters into strings, which JSON forbids.
        return json_schema_to_gbnf(text).replace(loose, strict)
    except Exception as error:  # the converter raises whatever Python does on a bad schema
        raise SamplerError(
            f"json_schema cannot become a grammar: {error or type(error).__name__}"
        ) from None
