"""Drafting strategies, one per module, installed as `pyspec.drafts`."""

if __name__ != "pyspec.drafts":  # a second copy would not be the one in the registry
    raise ImportError(f"import pyspec.drafts instead of {__name__}")
