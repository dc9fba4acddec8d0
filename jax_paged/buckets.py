"""Which compiled program a step runs through: the sizes that steps are padded to, few enough to be compiled soon."""

from collections.abc import Callable

from jax_paged.cache import CacheSpec
from jax_paged.ledger import StepPlan
from jax_paged.step import Bucket, is_plain

__all__ = ["Buckets"]

# A product of fewer rows than this runs off a cliff in XLA's CPU code, and costs no less on a TPU or GPU.
_MIN_ROWS = 8

# Tokens of KV that a prefill may read by way of decode's program, one query at a time.
_MAX_REREAD = 8192
# Prompt tokens for which no prefill program is compiled.
_MAX_SMALL_PREFILL = 128


class Buckets:
    """The sizes of one engine's steps, and which of their programs have been used.

    Decode has a token a row, twice as many from one size to the next, up to `max_seqs`. Prefill, and both mixed, have
    all rows, and four times as many tokens from one size to the next: their programs take longest to compile. Exact
    mode has a single program, decode's of `max_seqs` rows.

    Args:
      spec: of the pool.
      max_batch_tokens: tokens a step.
      decode_steps: that decode's programs can go through in one call.
      exact: as in `LLM`.
    """

    def __init__(self, spec: CacheSpec, max_batch_tokens: int, *, decode_steps: int, exact: bool) -> None:
        def bucket(num_tokens: int, num_rows: int, one_token_rows: bool) -> Bucket:
            most_pages = min(num_tokens, num_tokens // spec.page_size + 2 * num_rows, spec.num_pages)
            return Bucket(num_tokens, num_rows, most_pages, one_token_rows, decode_steps if one_token_rows else 1)

        max_rows = _power_of_two(spec.max_seqs)
        decode = [bucket(n, n, True) for n in _doubling(_MIN_ROWS, max_rows)]
        sizes = _doubling(max_rows, _power_of_two(max_batch_tokens))
        prefill = [bucket(n, max_rows, False) for n in sizes[(len(sizes) - 1) % 2 :: 2]]
        self.sizes = [decode[-1]._replace(exact=True)] if exact else decode + prefill  # cheapest first
        self.most_tokens = min(max_batch_tokens, self.sizes[-1].num_tokens)
        self._exact = exact
        self._used: set[Bucket] = set()
        self.has_prefilled = False  # whether a program for it is there

    def all(self) -> list[Bucket]:
        """Every program there can be."""
        variants = (False,) if self._exact else (True, False)
        return [size._replace(plain=plain) for size in self.sizes for plain in variants]

    def note_use(self, bucket: Bucket) -> None:
        self._used.add(bucket)
        self.has_prefilled |= not bucket.one_token_rows

    def tokens_of_next(self, num_pending: Callable[[], int], num_running: int) -> int:
        """How many tokens the next step may have.

        While no prefill program has been compiled and little is to be prefilled, decode's does it, some tokens a
        step: that is sooner done than the compilation.

        Args:
          num_pending: tells the prompt tokens that are still to be computed; asked only where they matter, since it
            goes through all that wait.
          num_running: sequences that are on their way.
        """
        if self._exact or self.has_prefilled or num_pending() > _MAX_SMALL_PREFILL:
            return self.most_tokens
        return min(_power_of_two(num_running + 1), self.most_tokens)

    def choose(self, plan: StepPlan) -> Bucket:
        """The cheapest program for a plan.

        Decode's reads a sequence's pages once for each of its tokens, which pays for decode and for short prompts. It
        tells nothing of the prompt's own tokens.
        """
        if self._exact:
            return self.sizes[0]
        is_scored = any(row.seq.next_score < row.seq.num_prompt for row in plan.rows)
        prefills = [row for row in plan.rows if row.num_tokens > 1]
        tokens_read = sum(row.num_tokens * (row.start + row.num_tokens) for row in prefills)
        size = next(
            size
            for size in self.sizes
            if size.num_tokens >= plan.num_tokens
            and size.num_rows >= len(plan.rows)
            and not (size.one_token_rows and (tokens_read > _MAX_REREAD or is_scored))
        )
        return self._variant(size, plan)

    def _variant(self, size: Bucket, plan: StepPlan) -> Bucket:
        """The program without sampling options, where no row has any; the other one can do all that it does, and is
        taken if it is there already."""
        plain = size._replace(plain=True)
        is_wanted = all(is_plain(row.seq) for row in plan.rows)
        return plain if is_wanted and (plain in self._used or size not in self._used) else size


def _doubling(first: int, last: int) -> list[int]:
    return [first << i for i in range((last // first).bit_length())]


def _power_of_two(number: int) -> int:
    """The next one, not below the smallest bucket."""
    return max(_MIN_ROWS, 1 << (number - 1).bit_length())
