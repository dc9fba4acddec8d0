"""What comes in: prompts become token ids and requests, and what can never run is refused, with the numbers."""

import operator
from collections.abc import Callable, Hashable
from collections.abc import Sequence as AnySequence
from typing import Any

import numpy as np

from jax_paged.branch import Branch
from jax_paged.cache import CacheSpec
from jax_paged.errors import RequestError
from jax_paged.request import Request, SamplingParams
from jax_paged.sampling import MAX_BIASES
from jax_paged.tokenizer import Tokenizer

__all__ = ["Intake", "Prompt", "prompt_list"]

type Prompt = str | AnySequence[int] | np.ndarray


class Intake:
    """Makes the requests of one engine, and numbers them.

    Args:
      config: the model's, with vocab_size, and eos_token_ids if it has any.
      tokenizer: for text; None if there is none.
      spec: of the pool.
      max_model_len: tokens of the longest sequence.
      exact: as in `LLM`.
      seed: for requests that bring none.
      clock: seconds.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Tokenizer | None,
        spec: CacheSpec,
        max_model_len: int,
        *,
        exact: bool,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_model_len = max_model_len
        self._exact = exact
        self._seed = seed
        self._clock = clock
        self._next_id = 0

    def request(
        self, prompt: Prompt, params: SamplingParams | None, namespace: Hashable, priority: int = 0, **options: Any
    ) -> Request:
        """A request that can run, or an error that says why not."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"{params=} must be SamplingParams, or None for its defaults")
        ids = self.encode(prompt)
        stop = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self.end_tokens()
        self._check_length(ids, computes_only=options.get("max_new_tokens") == 0)
        self._check_token_ids(params, stop)
        self._check_place(namespace, priority)
        if self._exact and (params.prompt_logprobs is not None or "score_from" in options):
            raise RequestError(
                "log-probabilities of a prompt's tokens are not to be had with exact=True; ask for those of generated "
                "tokens, or make an LLM without it"
            )
        limit = self._max_model_len
        request_id = self._next_id
        self._next_id += 1
        max_tokens = limit if params.max_tokens is None else params.max_tokens
        if params.prompt_logprobs is not None:
            options = {"score_from": 1} | options
        return Request(
            request_id,
            ids,
            params,
            seed=params.seed if params.seed is not None else (self._seed * 1_000_003 + request_id) % 2**32,
            stop_token_ids=frozenset(stop),
            namespace=namespace,
            priority=priority,
            arrival_s=self._clock(),
            **({"max_new_tokens": min(max_tokens, limit - len(ids))} | options),
        )

    def _check_length(self, ids: list[int], computes_only: bool) -> None:
        limit = self._max_model_len
        if len(ids) >= limit + computes_only:
            raise RequestError(
                f"a prompt of {len(ids)} tokens leaves no room to generate: sequences have at most "
                f"max_model_len={limit} tokens here ({-(-limit // self._spec.page_size)} of the pool's "
                f"{self._spec.num_pages} pages of {self._spec.page_size}); shorten it, or raise max_model_len or "
                "num_pages"
            )

    def _check_place(self, namespace: Hashable, priority: int) -> None:
        try:
            hash(namespace)
        except TypeError:
            raise RequestError(f"{namespace=} cannot be hashed; give a name, a number or a tuple of them") from None
        try:
            operator.index(priority)
        except TypeError:
            raise RequestError(f"{priority=} must be an integer; lower goes first") from None

    def _check_token_ids(self, params: SamplingParams, stop: set[int]) -> None:
        size = self._config.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                if token >= size:
                    raise RequestError(f"{name}: {token} is not a token id of this model: 0 <= id < {size}")
        if params.min_tokens and len(set(params.logit_bias) | stop) > MAX_BIASES:
            raise RequestError(
                f"logit_bias and stop tokens are {len(set(params.logit_bias) | stop)} token ids together; with "
                f"min_tokens at most {MAX_BIASES}"
            )
        if params.stop and self._tokenizer is None:
            raise RequestError(
                f"stop={list(params.stop)} needs a tokenizer, and this model has none; give stop_token_ids, or "
                "LLM(tokenizer=...)"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, at least one."""
        ids = self.tokens(prompt)
        if not ids:
            raise RequestError(f"the prompt {prompt!r} has no tokens; give at least one")
        return ids

    def tokens(self, text_or_ids: Prompt, *, after: AnySequence[int] = ()) -> list[int]:
        """Token ids, of a text (that goes on `after` others) or as they are, of this model's vocabulary."""
        if isinstance(text_or_ids, str):
            ids = self.need_tokenizer("text").encode(text_or_ids, after=after)
            # Tokens may have been added to a vocabulary that the model has no embedding for.
            if max(ids, default=0) >= self._config.vocab_size:
                raise RequestError(
                    f"the text has token {max(ids)} in it, which is not a token id of this model: 0 <= id < "
                    f"{self._config.vocab_size}; leave it out"
                )
            return ids
        ids = _listed(text_or_ids)
        if any(isinstance(token, Branch) for token in ids):
            raise RequestError("branches and token ids in one list; give branches and whole prompts side by side")
        for token in ids:
            is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < self._config.vocab_size:
                several = "; this takes one prompt: for several, use generate" if isinstance(token, str) else ""
                raise RequestError(
                    f"{token!r} is not a token id of this model: 0 <= id < {self._config.vocab_size}{several}"
                )
        return [int(token) for token in ids]

    def end_tokens(self) -> set[int]:
        """Those with which the model, by itself or by its tokenizer, says that it is done."""
        of_tokenizer = () if self._tokenizer is None else self._tokenizer.eos_token_ids
        return {*getattr(self._config, "eos_token_ids", ()), *of_tokenizer}

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this model has none; give token ids, or LLM(tokenizer=...)"
            )
        return self._tokenizer


def prompt_list[P: (Prompt, Prompt | Branch)](prompts: P | AnySequence[P]) -> list[P]:
    """Tells one prompt from several: token ids are numbers, prompts are not."""
    if isinstance(prompts, str | Branch):
        return [prompts]
    each = _listed(prompts)
    is_one = bool(each) and not isinstance(each[0], str | Branch) and np.ndim(each[0]) == 0
    return [each] if is_one else each


def _listed(values: Any) -> list[Any]:
    """An array or an iterable with an order as a list, arrays of one number in it as numbers."""
    if isinstance(values, Branch):
        raise RequestError("a branch is no prompt here; give its token_ids")
    try:
        if isinstance(values, bytes | bytearray | set | frozenset | dict):
            raise TypeError
        values = list(np.asarray(values) if hasattr(values, "__array__") else values)
    except TypeError:
        raise RequestError(f"{values!r} is neither text nor a list of token ids") from None
    return [value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value for value in values]
