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
from importlib.metadata import entry_points

import pyspec.drafts
from pyspec.drafter import Drafter, PlainDecoding
from pyspec.errors import DraftError
from pyspec.model_file import ModelFile

ENTRY_POINT_GROUP = "pyspec.drafters"

AUTO = "auto"
"""Stands for the best drafter that a file offers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Whether a file can be decoded with a drafter, as `offers` finds it."""

    name: str
    missing: str | None


@cache
def registry() -> dict[str, type[Drafter]]:
    """All known drafters by name: `pyspec.drafts`, then the entry points."""
    found: dict[str, type[Drafter]] = {PlainDecoding.name: PlainDecoding}
    for module in pkgutil.iter_modules(pyspec.drafts.__path__):
        for value in vars(importlib.import_module(f"pyspec.drafts.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Drafter) and hasattr(value, "name"):
                found.setdefault(value.name, value)
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


def offers(file: ModelFile) -> list[Offer]:
    """For every drafter, what the file lacks for it."""
    return [Offer(name, drafter.missing(file)) for name, drafter in registry().items()]


def choose(name: str, file: ModelFile) -> type[Drafter]:
    """The drafter called `name`, or for ``auto`` the best one that the file offers.

    Raises:
        DraftError: There is no such drafter, or the file lacks what it needs.
    """
    known = registry()
    if name == AUTO:
        able = [drafter for drafter in known.values() if drafter.missing(file) is None]
        return max(able, key=lambda drafter: drafter.auto_rank)
    if name not in known:
        raise DraftError(f"no drafter is called {name!r}, there are: {AUTO}, {', '.join(known)}")
    if lacking := known[name].missing(file):
        raise DraftError(f"{file.path} cannot be drafted with {name!r}: {lacking}")
    return known[name]
