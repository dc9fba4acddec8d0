"""Text that grows token by token: stop strings across the borders of tokens, and what is held back because of them."""

from collections.abc import Sequence

import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from jax_paged.text import GrowingText

E_ACUTE = tiny.tokenizer().encode("é")
GRIN = tiny.tokenizer().encode("😀")
SPECIAL = tiny.CONFIG.vocab_size - 1  # adds nothing


def token(piece: str) -> int:
    return next(i for i in range(SPECIAL) if tiny.tokenizer().token_bytes(i) == piece.encode())


def tokens(*pieces: str) -> list[int]:
    return [token(piece) for piece in pieces]


def grow(token_ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> tuple[list[str], str, int | None]:
    """What was shown after each token, the final text, and after how many tokens a stop string ended it, if any."""
    text = GrowingText(tiny.tokenizer(), stops)
    shown = []
    for i, token_id in enumerate(token_ids, 1):
        has_ended = text.add(token_id, i >= min_tokens)
        shown.append(text.text(final=has_ended))
        if has_ended:
            return shown, text.text(final=True), i
    return shown, text.text(final=True), None


def test_text_is_shown_as_it_comes():
    assert grow(tokens("the", " a", "b"), []) == (["the", "the a", "the ab"], "the ab", None)


def test_a_stop_string_and_what_follows_it_are_cut_off():
    assert grow(tokens("x", "cab", "y"), ["ab"]) == (["x", "xc"], "xc", 2)


def test_a_stop_string_at_the_very_start_leaves_nothing():
    assert grow(tokens("ab", "x"), ["a"]) == ([""], "", 1)


def test_what_a_stop_string_may_begin_with_is_held_back_until_it_turns_out_not_to_be_one():
    shown, final, end = grow(tokens("x", "a", "b", "a", "b", "c", "z"), ["abcd"])
    assert shown == ["x", "x", "x", "xab", "xab", "xab", "xababcz"]
    assert (final, end) == ("xababcz", None)


def test_a_stop_string_over_many_tokens_is_never_shown_in_part():
    shown, final, end = grow(tokens("x", "th", "e", " the", " ", "o", "n"), ["the the on"])
    assert shown == ["x"] * 7
    assert (final, end) == ("x", 7)


def test_what_was_held_back_comes_with_the_end():
    shown, final, end = grow(tokens("x", "a", "b"), ["abc"])
    assert shown == ["x", "x", "x"]
    assert (final, end) == ("xab", None)


def test_a_stop_string_that_begins_inside_another_ones_false_start_is_found():
    # "aab" of "aabaac" looks like the start of "aabaad"; the real one begins at its fourth letter.
    _, final, end = grow(tokens(*"xaabaabaac"), ["aabaac"])
    assert (final, end) == ("xaab", 10)


def test_of_several_stop_strings_in_one_token_the_first_counts():
    assert grow(tokens("x", "the"), ["e", "h"]) == (["x", "xt"], "xt", 2)


def test_the_stop_string_that_is_complete_first_ends_the_text():
    shown, final, end = grow(tokens(*"xabcd"), ["abcd", "b"])
    assert shown == ["x", "x", "xa"]
    assert (final, end) == ("xa", 3)


def test_nothing_more_is_taken_in_after_the_end():
    text = GrowingText(tiny.tokenizer(), ["b"])
    assert [text.add(token_id) for token_id in tokens("a", "b", "c")] == [False, True, True]
    assert (text.text(final=False), text.text(final=True)) == ("a", "a")


def test_a_character_is_shown_when_its_last_byte_is_there():
    shown, final, _ = grow([*GRIN, *tokens("a")], [])
    assert shown == ["", "", "", "😀", "😀a"]
    assert final == "😀a"


def test_a_stop_string_may_have_characters_of_several_tokens():
    assert grow([*tokens("a"), *E_ACUTE, *tokens("b")], ["é"]) == (["a", "a", "a"], "a", 3)
    assert grow([*tokens("a"), *GRIN, *tokens("b")], ["a😀b"])[1:] == ("", 6)


def test_a_character_that_was_never_completed_ends_the_text_as_a_replacement():
    assert grow([*tokens("a"), *GRIN[:3]], []) == (["a"] * 4, "a\N{REPLACEMENT CHARACTER}", None)


def test_a_stop_string_that_only_the_last_bytes_complete_is_cut_off_too():
    _, final, _ = grow([*tokens("a", "b"), *GRIN[:2]], ["b\N{REPLACEMENT CHARACTER}"])
    assert final == "a"


def test_special_tokens_add_nothing_and_do_not_part_a_stop_string():
    shown, final, end = grow([token("x"), token("a"), SPECIAL, token("b")], ["ab"])
    assert shown == ["x"] * 4
    assert (final, end) == ("x", 4)


def test_the_final_text_can_be_asked_for_again():
    text = GrowingText(tiny.tokenizer(), ["abc"])
    for token_id in [*tokens("a", "b"), *GRIN[:1]]:
        text.add(token_id)
    assert [text.text(final=True) for _ in range(2)] == ["ab\N{REPLACEMENT CHARACTER}"] * 2


def test_without_a_tokenizer_the_text_is_empty():
    text = GrowingText(None)
    assert [text.add(token_id) for token_id in (1, 2)] == [False, False]
    assert (text.text(final=False), text.text(final=True)) == ("", "")


@pytest.mark.parametrize(
    ("min_tokens", "final", "end"),
    [(2, "x", 2), (3, "xabcd", 6), (6, "xabcd", 6), (7, "xabcdab", None)],
)
def test_stop_strings_before_the_least_number_of_tokens_do_not_count(min_tokens: int, final: str, end: int | None):
    assert grow([*tokens("x", "ab", "c", "d", "a", "b")], ["ab"], min_tokens)[1:] == (final, end)


def test_a_stop_string_of_which_only_the_end_comes_late_enough_counts():
    shown, final, end = grow(tokens("x", "a", "b", "c", "d"), ["abc"], min_tokens=4)
    assert shown == ["x"] * 4
    assert (final, end) == ("x", 4)


STOPS = st.lists(st.sampled_from(["a", "ab", "abc", "bca", "aab", "cab", "é", "éa", "a a", "b", "the", "abab", "��"]))
SOME_TOKENS = st.lists(
    st.sampled_from([*tokens("a", "b", "c", "ab", "abc", "bc", "cab", " ", "the"), *E_ACUTE, GRIN[0], SPECIAL]),
    max_size=20,
)


@given(token_ids=SOME_TOKENS, stops=STOPS)
@example(tokens(*"aabaab"), ["aabaac"])
def test_any_text_ends_at_its_first_stop_string_and_holds_back_no_more_than_it_must(
    token_ids: list[int], stops: list[str]
):
    shown, final, end = grow(token_ids, stops)
    decoded = tiny.tokenizer().decode
    for i, text in enumerate(shown, 1):
        whole = certain(token_ids[:i])
        places = [place for stop in stops if (place := whole.find(stop)) >= 0]
        if places:
            assert (i, text) == (end, whole[: min(places)])
        else:
            starts = [n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])]
            assert text == whole[: len(whole) - max(starts, default=0)]
    if end is None:
        everything = decoded(token_ids)
        places = [place for stop in stops if (place := everything.find(stop)) >= 0]
        assert final == everything[: min(places, default=len(everything))]
    else:
        assert final == shown[-1]


@given(token_ids=SOME_TOKENS, stops=STOPS, min_tokens=st.integers(0, 20))
def test_what_is_shown_is_only_ever_added_to(token_ids: list[int], stops: list[str], min_tokens: int):
    shown, final, end = grow(token_ids, stops, min_tokens)
    for before, after in zip(shown, [*shown[1:], final]):
        assert after.startswith(before)
    if end is not None:
        assert end >= min_tokens
        assert tiny.tokenizer().decode(token_ids).startswith(final)


def certain(token_ids: Sequence[int]) -> str:
    """The text of which every character is complete, or broken for good."""
    text = b"".join(map(tiny.tokenizer().token_bytes, token_ids))
    for cut in range(1, 4):  # a character has up to three bytes before its last
        try:
            text[len(text) - cut :].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return text[: len(text) - cut].decode(errors="replace")
    return text.decode(errors="replace")
