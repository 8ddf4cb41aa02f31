"""The registry that built-in and third-party drafters share.

Built-in drafters are the modules of `pyspec.drafts`. Another package adds its own with an entry
point of the group ``pyspec.drafters`` that names a `Drafter` subclass:

    [project.entry-points."pyspec.drafters"]
    mine = "my_package:MyDrafter"
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache

import pyspec.drafts
from pyspec.config import DraftConfig
from pyspec.drafter import Drafter, PlainDecoding
from pyspec.errors import DraftError
from pyspec.model_file import ModelFile

ENTRY_POINT_GROUP = "pyspec.drafters"

AUTO = "auto"
"""Stands for all drafters that a file offers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Whether a file can be decoded with a drafter, as `offers` finds it."""

    name: str
    missing: str | None


@cache
def built_in() -> dict[str, type[Drafter]]:
    """The drafters of `pyspec.drafts` and plain decoding, by name."""
    found: dict[str, type[Drafter]] = {PlainDecoding.name: PlainDecoding}
    for module in pkgutil.iter_modules(pyspec.drafts.__path__):
        for value in vars(importlib.import_module(f"pyspec.drafts.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Drafter) and hasattr(value, "name"):
                found.setdefault(value.name, value)
    return found


@cache
def registry() -> dict[str, type[Drafter]]:
    """All known drafters by name: the built-in ones, then the entry points."""
    from importlib.metadata import entry_points

    found = dict(built_in())
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            value = point.load()
        except Exception as error:
            raise DraftError(
                f"drafter {point.name!r} ({point.value}) cannot be loaded: {error}"
            ) from error
        if not (isinstance(value, type) and issubclass(value, Drafter)):
            raise DraftError(
                f"drafter {point.name!r} ({point.value}) is not a pyspec.Drafter subclass"
            )
        found.setdefault(point.name, value)
    return found


def offers(file: ModelFile, config: DraftConfig | None = None) -> list[Offer]:
    """For every drafter, what is lacking for it on `file`."""
    config = config or DraftConfig()
    return [Offer(name, drafter.missing(file, config)) for name, drafter in registry().items()]


def choose(config: DraftConfig, file: ModelFile) -> list[type[Drafter]]:
    """The drafters that `config` names: one, or for ``auto`` all that the file offers.

    Raises:
        DraftError: There is no such drafter, or something is lacking for it.
    """
    known = built_in() if config.name in built_in() else registry()
    if config.name == AUTO:
        able = [kind for kind in known.values() if kind.auto and not kind.missing(file, config)]
        return able or [PlainDecoding]
    if config.name not in known:
        raise DraftError(
            f"no drafter is called {config.name!r}, there are: {AUTO}, {', '.join(known)}"
        )
    if lacking := known[config.name].missing(file, config):
        raise DraftError(f"{file.path} cannot be drafted with {config.name!r}: {lacking}")
    return [known[config.name]]
