"""A checkout that was not installed works, and says that it has no version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from frontend import version
from frontend.cli.catalog import version_text


def test_a_checkout_that_was_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    assert version.package_version() == "unknown"
    assert version_text() == "gapless unknown"
