from __future__ import annotations

import random

from detokenizer_proc.stop import StopFinder


def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The whole text at once: the match that starts first wins, of two the shorter."""
    matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    start, length, stop = min(matches)
    return text[: start + (length if include else 0)], stop


def random_case(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    alphabet = rng.choice(["ab", "abc", "a", "\n#<é🙂"])
    text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
    stops = tuple("".join(rng.choices(alphabet, k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 5)))
    return text, stops


def test_any_borders_give_what_the_whole_text_gives(rng: random.Random) -> None:
    for _ in range(20_000):
        text, stops = random_case(rng)
        include = rng.random() < 0.3
        expected, expected_stop = reference(text, stops, include)
        finder, out, at = StopFinder(stops, include), "", 0
        while at < len(text) and finder.stop is None:
            end = at + rng.randrange(4)
            out += finder.push(text[at:end])
            at = end
            assert expected.startswith(out), (text, stops, include)  # none leaked, at any time
        assert (out + finder.flush(), finder.stop) == (expected, expected_stop), (text, stops, include)


def test_nothing_is_held_without_need(rng: random.Random) -> None:
    """What is held back is the beginning of a stop string, and the longest one that the text ends with."""
    for _ in range(5_000):
        text, stops = random_case(rng)
        finder, out = StopFinder(stops), ""
        for char in text:
            out += finder.push(char)
            if finder.stop is not None or any(stop in text for stop in stops):
                break
            seen = len(out) + len(finder._held)
            longest = max(k for stop in stops for k in range(len(stop)) if text[:seen].endswith(stop[:k]))
            assert len(finder._held) == longest


def test_matches_that_end_too_early_do_not_count(rng: random.Random) -> None:
    for _ in range(5_000):
        text, stops = random_case(rng)
        early = rng.randrange(len(text) + 1)
        ends = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > early
        ]
        expected = text[: min(ends)[0]] if ends else text
        finder, out = StopFinder(stops), ""
        for at, char in enumerate(text):
            out += finder.push(char, may_stop=at >= early)
            if finder.stop is not None:
                break
        out += finder.flush()
        # Text before the limit may be out already where a match that counts begins in it: never, it was held.
        assert (out, finder.stop) == (expected, min(ends)[2] if ends else None), (text, stops, early)


def test_text_up_to_the_stop_comes_with_the_match() -> None:
    finder = StopFinder(("END",))
    assert [finder.push(piece) for piece in ("one E", "N two E", "ND three")] == ["one ", "EN two ", ""]
    assert finder.stop == "END"
    assert finder.push("more") == finder.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    finder = StopFinder(("\n\n",), include_in_output=True)
    assert finder.push("a\n") + "|" + finder.flush() == "a|\n"
    assert finder.stop is None


def test_adversarial_stop_strings_stay_linear() -> None:
    """Counted in automaton steps: a character costs at most two steps per stop string over the whole text."""
    stops = tuple("a" * length + "b" for length in range(4000, 4064))
    finder = StopFinder(stops)
    for _ in range(50):
        finder.push("aaaa")
    assert all(len(pattern.failure) <= 201 for pattern in finder._patterns)  # grown only as far as it matched
    assert len(finder.flush()) == 200
