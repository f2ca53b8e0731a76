"""POST /profile/start and /profile/stop."""

from __future__ import annotations

import httpx
import pytest

from tests.frontend.fake import Fake, FakeServer


@pytest.fixture(autouse=True)
def with_profiler(fake: Fake) -> None:
    fake.has_profiler = True
    fake.profiled.clear()


def test_the_engine_is_told_and_its_answer_awaited(http: httpx.Client, fake: Fake) -> None:
    assert http.post("/profile/start").json() == {"status": "started"}
    assert http.post("/profile/stop").json() == {"status": "stopped"}
    assert fake.profiled == [True, False]


@pytest.mark.parametrize("word", ["start", "stop"])
def test_without_a_device_it_is_an_error_that_says_so(http: httpx.Client, fake: Fake, word: str) -> None:
    fake.has_profiler = False
    response = http.post(f"/profile/{word}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "not_supported"
    assert "no CUDA device" in error["message"]


def test_get_is_refused(http: httpx.Client, server: FakeServer) -> None:
    response = http.get("/profile/start")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
