"""What a caller asks for, what comes back, and a sequence on its way between the two. No jax here."""

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "CompletionOutput",
    "Request",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "Sequence",
]

MAX_LOGPROBS = 32  # most alternatives that are reported for a token
MAX_LOGIT_BIAS = 300  # most entries of a logit_bias, as in OpenAI's API

_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_LARGEST = 1e9  # of what is added to logits: far above any, and still far from float32's end after all that follows


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    Args:
      n: samples a prompt; they share the prompt's pages.
      temperature: 0 takes the likeliest token; higher is more random.
      top_k: only the k likeliest tokens; 0: all.
      top_p: only the fewest of the likeliest tokens whose probabilities add up to this; 1: all.
      min_p: only tokens at least this many times as likely as the likeliest; 0: all.
      max_tokens: at most this many tokens; None: up to the model's length.
      min_tokens: no stop token or string ends the text before this many tokens.
      seed: makes the samples a function of the request alone; None: the engine draws one.
      stop: strings that end the text; they are not part of it.
      stop_token_ids: tokens that end the text, besides the model's own end tokens.
      ignore_eos: go on after the model's end token.
      logprobs: report the log-probability of each chosen token, and so many alternatives (up to 32); None: nothing.
        They are the model's own, before any of the options here.
      prompt_logprobs: the same for the prompt's tokens, which are then all computed, whatever is cached.
      presence_penalty, frequency_penalty: taken off the logit of a token that has been generated, once, and once for
        each time.
      repetition_penalty: divides the positive logits of tokens in prompt or text, and multiplies the negative ones.
      logit_bias: added to the logits of these token ids; -inf forbids one. At most 300.

    Raises:
      ValueError: for a value out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | AnySequence[str] = ()  # None, as others have it here and below, becomes none of them
    stop_token_ids: AnySequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_numbers()
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be >= 1, or None for up to the model's length")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not be above max_tokens={self.max_tokens}")
        if not all(self.stop):
            raise ValueError(f"stop={list(self.stop)!r} has an empty string, which every text ends with; leave it out")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={list(self.stop_token_ids)} must not be negative")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are supported")
        for token, bias in self.logit_bias.items():
            if token < 0 or not (abs(bias) <= _LARGEST or bias == -math.inf):
                raise ValueError(
                    f"logit_bias[{token}]={bias} must be at most {_LARGEST:g} in size, or -inf, of a token id >= 0"
                )

    def _check_types(self) -> None:
        """Makes each option what its type says, or tells which one cannot be."""

        def integers(values: Any) -> tuple[int, ...]:
            return () if values is None else tuple(map(operator.index, values))

        def strings(values: Any) -> tuple[str, ...]:
            values = (values,) if isinstance(values, str) else () if values is None else tuple(values)
            if not all(isinstance(value, str) for value in values):
                raise TypeError
            return values

        def biases(values: Any) -> dict[int, float]:
            values = {} if values is None else dict(values)
            return {operator.index(token): float(bias) for token, bias in values.items()}

        kinds: list[tuple[str, Callable[[Any], Any], tuple[str, ...]]] = [
            ("an integer", operator.index, ("n", "top_k", "min_tokens")),
            ("an integer or None", operator.index, ("max_tokens", "seed", "logprobs", "prompt_logprobs")),
            ("a number", float, ("temperature", "top_p", "min_p", *_PENALTIES)),
            ("True or False", lambda value: {True: True, False: False}[value], ("ignore_eos",)),
            ("a string or a list of strings", strings, ("stop",)),
            ("a list of token ids", integers, ("stop_token_ids",)),
            ("a dictionary from token ids to numbers", biases, ("logit_bias",)),
        ]
        for kind, convert, names in kinds:
            for name in names:
                value = getattr(self, name)
                if value is None and kind.endswith("None"):
                    continue
                try:
                    if isinstance(value, str) and convert is float:
                        raise TypeError
                    object.__setattr__(self, name, convert(value))
                except (TypeError, ValueError, KeyError, OverflowError):
                    raise ValueError(f"{name}={value!r} must be {kind}") from None

    def _check_numbers(self) -> None:
        """Each option alone against its range."""
        finite = math.isfinite
        for name, is_good, rule in (
            ("n", self.n >= 1, ">= 1"),
            ("temperature", self.temperature >= 0 and finite(self.temperature), ">= 0; use 0 for greedy"),
            ("top_k", self.top_k >= 0, ">= 0; 0 takes all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("min_tokens", self.min_tokens >= 0, ">= 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**32, "in [0, 2**32)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"from 0 to {MAX_LOGPROBS}",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= _LARGEST, f"at most {_LARGEST:g} in size"),
            ("frequency_penalty", abs(self.frequency_penalty) <= _LARGEST, f"at most {_LARGEST:g} in size"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "from 1e-6 to 1e6; 1 changes nothing"),
        ):
            if not is_good:
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on the engine's clock; None for what has not happened."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `text` goes on from the prompt's, its first space included, if it has one.

    `finish_reason`: None while it runs, then "stop", "length", "abort", or "error:<why>" where the model gave NaN for
    the next token.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None  # of each token
    cumulative_logprob: float | None
    finish_reason: str | None
    top_logprobs: list[dict[int, float]] | None = None  # for each token, the likeliest ones, if any were asked for


@dataclass(frozen=True)
class RequestOutput:
    """A request as it stands after a step, which later steps leave alone.

    All outputs of a request share one `prompt_token_ids`: copy it before you change it.
    """

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # prompt tokens that were not computed, since their pages were found in the tree
    finished: bool
    times: RequestTimes
    why_not_cached: str | None = None  # where nothing was found, the reason
    prompt_logprobs: list[float | None] | None = None  # of each prompt token; None for the first, which follows nothing
    prompt_top_logprobs: list[dict[int, float] | None] | None = None


class Sequence:
    """One sample of a request: its tokens, and where it stands on the way through the scheduler.

    tokens:  [ prompt ................ | sampled so far ... ]
             [ computed: KV in the pool ........... | next ]
             [ in the tree ......... |
    """

    def __init__(self, request: "Request", sample_index: int) -> None:
        self.request = request
        self.sample_index = sample_index
        self._tokens = np.array(request.prompt_token_ids, np.int32)
        self.num_tokens = self.num_prompt = len(self._tokens)
        self._outputs: list[int] = []  # the sampled tokens once more, as those who ask want them
        self.logprobs: list[float] = []
        self.cumulative_logprob = 0.0  # their sum, kept as they come
        self.top_logprobs: list[dict[int, float]] = []
        self.scores: list[float] = []  # log-probabilities of the prompt's tokens from request.score_from on
        self.top_scores: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self.arrival = request.request_id
        self.num_overtaken = 0  # by later ones, while it waited near the front
        self.was_set_aside = False
        self.num_cached_tokens = 0  # at its first admission
        self.why_not_cached: str | None = None
        # Told each token of the text, and whether a stop string in it would count; says whether there is one.
        self.add_text: Callable[[int, bool], bool] = lambda token, may_stop: False
        # Only while it has a slot, or is held without one:
        self.slot: int | None = None
        self.pages: list[int] = []
        self.num_computed = 0
        self.node: Any = None  # the tree node it locks
        self.partial_node: Any = None  # the same for a page it is about to copy from

    @property
    def tokens(self) -> np.ndarray:
        """i32[num_tokens], a view."""
        return self._tokens[: self.num_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return list(self._outputs)

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one is sampled, or before all is done if none will be."""
        return self.num_tokens - self.num_computed - (not self.request.samples)

    @property
    def is_prefilling(self) -> bool:
        """Whether it has a prompt to compute, or what preemption took from it. If not, it is decoding."""
        return self.num_uncomputed > 1 or not self.request.samples

    @property
    def num_left(self) -> int:
        """Tokens that it may still sample."""
        return self.request.max_new_tokens - self.num_outputs

    @property
    def next_score(self) -> int:
        """The next prompt token to be scored; past the prompt if there is none."""
        start = self.request.score_from
        return self.num_prompt if start is None or self.sample_index > 0 else start + len(self.scores)

    def append(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self.num_tokens + 16)
        self._tokens[self.num_tokens] = token
        self._outputs.append(token)
        self.num_tokens += 1

    def why_finished(self) -> str | None:
        """The finish reason that its last token, to be asked about once, gives it, if any."""
        token = int(self.tokens[-1])
        may_stop = self.num_outputs >= self.request.params.min_tokens
        if (may_stop and token in self.request.stop_token_ids) or self.add_text(token, may_stop):
            return "stop"
        return "length" if self.num_left <= 0 else None


class Request:
    """A prompt and what to do with it.

    Args:
      request_id: also its place in line.
      prompt_token_ids: at least one.
      params: how to sample.
      seed: of its random numbers.
      max_new_tokens: 0 only computes: the KV of all its tokens but the last.
      stop_token_ids: end the text.
      namespace: only requests of the same one share cached prefixes.
      priority: lower goes first.
      arrival_s: on the engine's clock.
      score_from: report the log-probabilities of prompt tokens from this one on; None: of none.
      held: keep the pages at the end, for what comes after.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: AnySequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        max_new_tokens: int,
        stop_token_ids: frozenset[int],
        namespace: Hashable = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        score_from: int | None = None,
        held: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)  # for all its outputs
        self.params = params
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.stop_token_ids = stop_token_ids
        self.namespace = namespace
        self.priority = priority
        self.times = RequestTimes(arrival_s)
        self.score_from = score_from
        self.held = held
        self.sequences = [Sequence(self, i) for i in range(params.n)]

    @property
    def samples(self) -> bool:
        """Whether it samples at all."""
        return self.max_new_tokens > 0

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason for seq in self.sequences)
