"""Draft tokens of a text, from what followed the same tokens before."""

from text2sql_grpo.rollout.drafts import Drafts


def test_guesses_what_followed_the_same_two_tokens_last() -> None:
    drafts = Drafts([1, 2, 3, 4, 1, 2, 5, 6, 7])
    text: list[int] = []
    drafts.extend(text, [9, 1, 2])

    assert drafts.after(text, 3) == [5, 6, 7]
    assert drafts.after(text, 1) == [5]


def test_guesses_from_the_text_of_another_member() -> None:
    drafts, one, other = Drafts([1]), list[int](), list[int]()
    drafts.extend(one, [1, 20, 21, 22, 23])
    drafts.extend(other, [1, 8, 20, 21])

    assert drafts.after(other, 10) == [22, 23]


def test_guesses_nothing_after_what_is_new() -> None:
    drafts = Drafts([1, 2, 3])

    assert drafts.after([2, 2], 4) == []
    assert drafts.after([2, 3], 4) == []  # nothing has followed yet
    assert Drafts([]).after([], 4) == []


def test_a_text_that_repeats_itself_is_guessed_to_go_on() -> None:
    drafts, text = Drafts([1]), list[int]()
    drafts.extend(text, [1, 5, 6, 7, 5, 6])

    assert drafts.after(text, 7) == [7, 5, 6, 7, 5, 6, 7]
