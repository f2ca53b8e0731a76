from __future__ import annotations

from typing import Any

import pytest

from ipc.codec import encode
from ipc.sampling import BoundError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", float("nan"), "a number between 0 and 100"),
        ("n", True, "an integer between 1 and 128"),
        ("stop", "text", "a list of strings"),
        ("stop", ("ok", "a\ud800b"), "Unicode"),
        ("stop", ("",), "1 to 4096"),
        ("logit_bias", {5: float("inf")}, "between -100 and 100"),
    ],
)
def test_a_bad_value_names_field_value_and_bound(field: str, value: Any, words: str) -> None:
    with pytest.raises(BoundError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field)
    assert words in caught.value.bound
    assert str(caught.value).startswith(f"{caught.value.field} must be {caught.value.bound}, got ")


def test_any_stop_string_that_is_accepted_can_be_sent() -> None:
    assert encode(SamplingParams(stop=("\0", "\ud7ff", "\ue000", "🙂", "\U0010ffff")))
