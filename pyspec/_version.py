"""The one place that states the version; pyproject.toml and CMake read it from here."""

__version__ = "0.1.0"
