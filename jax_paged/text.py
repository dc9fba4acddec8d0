"""The text of a sequence as its tokens come, and the strings that end it."""

from collections.abc import Iterable, Sequence

from jax_paged.tokenizer import Detokenizer, Tokenizer

__all__ = ["GrowingText"]


class GrowingText:
    """Text that grows token by token until it holds a stop string.

    Args:
      tokenizer: None leaves the text empty.
      stops: strings that end the text; neither they nor what follows are part of it.
      after: token ids that the text goes on from, see `Detokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), after: Iterable[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, after) if tokenizer is not None else None
        self._stops = stops
        self._text = ""
        self._searched = 0  # characters in which no stop string begins any more
        self._ended = False

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Takes a token in. Returns whether the text has ended; `may_stop` says whether a stop string ends it."""
        if self._detokenizer is not None and not self._ended:
            self._text += self._detokenizer.add(token)
            self._end_at_stop(may_stop)
        return self._ended

    def text(self, final: bool) -> str:
        """The text so far. Until it is final, without what may turn out to be the start of a stop string."""
        if final and self._detokenizer is not None and not self._ended:
            self._text += self._detokenizer.flush()
            self._end_at_stop(may_stop=True)
            self._ended = True
        return self._text if self._ended else self._text[: len(self._text) - self._num_held_back()]

    def _end_at_stop(self, may_stop: bool) -> None:
        found = [place for stop in self._stops if (place := self._text.find(stop, self._searched)) >= 0]
        if found and may_stop:
            self._text = self._text[: min(found)]
            self._ended = True
        elif found:  # it does not count, and neither does what it is a part of
            self._searched = len(self._text)
        else:
            longest = max(map(len, self._stops), default=1)
            self._searched = max(self._searched, len(self._text) - longest + 1)

    def _num_held_back(self) -> int:
        """Characters at the end that a stop string may begin with."""
        tail = self._text[self._searched :]
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(tail) + 1)) if tail.endswith(stop[:n])),
            default=0,
        )
