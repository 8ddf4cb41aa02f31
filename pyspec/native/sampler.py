"""`NativeSampler`: a request's sampler chain."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self

from pyspec.config import SamplingConfig
from pyspec.errors import ArgumentError
from pyspec.native.binding import Handle, check, ffi, lib


def _release(handle: Handle) -> None:
    handle.free(lib.pyspec_sampler_close)


class NativeSampler:
    """Draws tokens from the target's logits; made by `NativeEngine.sampler`.

    Its state (random numbers, penalties, grammar) advances by exactly one token per draw. It keeps
    what it needs of the model, so it may outlive its engine.
    """

    def __init__(self, pointer: Any, has_grammar: bool = False) -> None:
        self.has_grammar = has_grammar
        self.handle = Handle(pointer, "sampler")
        #: Every token it draws is the one with the greatest logit, whatever came before.
        self.greedy = bool(lib.pyspec_sampler_greedy(pointer))
        self._finalizer = weakref.finalize(self, _release, self.handle)

    @classmethod
    def create(cls, engine: Any, config: SamplingConfig) -> Self:
        """A sampler for the model of `engine` (a `pyspec_engine *`)."""
        if config.json_schema is not None:
            raise ArgumentError("json_schema must be turned into a grammar first")
        bias = {int(token): float(value) for token, value in config.logit_bias.items()}
        grammar = ffi.new("char[]", config.grammar.encode()) if config.grammar else ffi.NULL
        tokens = ffi.new("int32_t[]", list(bias)) if bias else ffi.NULL
        values = ffi.new("float[]", list(bias.values())) if bias else ffi.NULL
        params = ffi.new(
            "pyspec_sampler_params *",
            {
                "seed": config.seed if config.seed is not None else 0xFFFFFFFF,
                "temp": config.temperature,
                "top_k": config.top_k,
                "top_p": config.top_p,
                "min_p": config.min_p,
                "typical_p": config.typical_p,
                "penalty_last_n": config.penalty_last_n,
                "penalty_repeat": config.repeat_penalty,
                "penalty_freq": config.frequency_penalty,
                "penalty_present": config.presence_penalty,
                "grammar": grammar,
                "n_logit_bias": len(bias),
                "logit_bias_tokens": tokens,
                "logit_bias_values": values,
            },
        )
        out = ffi.new("pyspec_sampler **")
        check(lib.pyspec_sampler_create(engine, params, out))
        return cls(out[0], bool(config.grammar))

    def clone(self) -> NativeSampler:
        """An independent copy that will draw what this one would."""
        out = ffi.new("pyspec_sampler **")
        with self.handle.lock:
            check(lib.pyspec_sampler_clone(self.handle.pointer, out))
        return NativeSampler(out[0], self.has_grammar)

    def reset(self) -> None:
        """Back to the state it was created in, random numbers included."""
        with self.handle.lock:
            lib.pyspec_sampler_reset(self.handle.pointer)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Shows the prompt to the penalties; the grammar starts after it."""
        buffer = ffi.new("int32_t[]", list(tokens))
        with self.handle.lock:
            check(lib.pyspec_sampler_accept_prompt(self.handle.pointer, buffer, len(tokens)))

    def close(self) -> None:
        """Frees it. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
