"""Every error that pyspec raises on purpose.

All of them derive from `PyspecError`, so one `except` catches what this package refuses, and carry
a single line that names the offender and the rule it breaks. `pyspec.native` raises the class that
belongs to libpyspec's status code; everything else raises them directly.
"""

from __future__ import annotations


class PyspecError(Exception):
    """Base of all errors that pyspec raises on purpose."""


class ArgumentError(PyspecError, ValueError):
    """A parameter breaks a stated rule."""


class ModelError(PyspecError):
    """A model file cannot be loaded: missing, truncated, not GGUF, unknown architecture."""


class TreeError(PyspecError, ValueError):
    """A draft tree is no tree, or has more nodes than the engine was opened for."""


class ContextError(PyspecError):
    """A sequence would outgrow its context."""


class DraftError(PyspecError):
    """A draft source does not exist, or does not fit the target model."""


class StateError(PyspecError, RuntimeError):
    """A call out of order: commit without verify, use after close."""


class QueueFullError(PyspecError):
    """More requests are waiting than may."""


class DeadlineError(PyspecError):
    """A request took longer than it was given."""


class SamplerError(PyspecError):
    """A grammar or JSON schema does not parse, or the sampler rejects every token."""


class AllocationError(PyspecError, MemoryError):
    """Memory for weights, caches or buffers cannot be had."""


class AbortedError(PyspecError):
    """The running call was stopped by `abort()`."""


class ComputeError(PyspecError, RuntimeError):
    """llama.cpp reported a failure during a forward pass."""


class LibraryError(PyspecError, ImportError):
    """The patched libraries are missing, or others were loaded first."""


class EncodingError(PyspecError, ValueError):
    """Text is not valid UTF-8."""


class TemplateError(PyspecError, ValueError):
    """The model has no chat template, or the template refuses the messages."""
