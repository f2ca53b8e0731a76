"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """It is "unknown" if it runs from a checkout that was not installed."""
    try:
        return version("gapless")
    except PackageNotFoundError:
        return "unknown"
