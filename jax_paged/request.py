"""What a caller asks for, what comes back, and a sequence on its way between the two. No jax here."""

import math
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

__all__ = ["CompletionOutput", "Request", "RequestOutput", "RequestTimes", "SamplingParams", "Sequence"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    Args:
      n: samples a prompt.
      temperature: 0 takes the likeliest token; higher is more random.
      max_tokens: at most this many tokens; None: up to the model's length.
      seed: makes the samples a function of the request alone; None: the engine draws one.
      stop_token_ids: tokens that end the text, besides the model's own end tokens.
      ignore_eos: go on after the model's end token.
      logprobs: 0 reports the log-probability of each chosen token, None nothing.

    Raises:
      ValueError: for a value out of its range.
      NotImplementedError: for an option that is not supported yet.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: AnySequence[str] = ()
    stop_token_ids: AnySequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    _SUPPORTED = frozenset({"temperature", "max_tokens", "seed", "stop_token_ids", "ignore_eos", "logprobs"})

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be >= 0; use 0 for greedy")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be >= 1, or None for up to the model's length")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in [0, 2**32)")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={list(self.stop_token_ids)} must not be negative")
        if self.logprobs not in (None, 0):
            raise NotImplementedError(f"logprobs={self.logprobs} is not supported; 0 gives the chosen token's")
        for option in fields(self):
            default = {} if option.name == "logit_bias" else option.default
            if option.name not in self._SUPPORTED and getattr(self, option.name) != default:
                raise NotImplementedError(
                    f"{option.name}={getattr(self, option.name)!r} is not supported; leave it at {default!r}"
                )


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on the engine's clock; None for what has not happened."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `finish_reason`: None while it runs, then "stop", "length", "abort" or "error:<why>"."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    cumulative_logprob: float | None
    finish_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """A request as it stands after a step."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # prompt tokens that were not computed, since their pages were found in the tree
    finished: bool
    times: RequestTimes


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
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.arrival = request.request_id
        self.num_overtaken = 0  # by later ones, while it waited
        self.was_set_aside = False
        self.num_cached_tokens = 0  # at its first admission
        # Only while it has a slot:
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
        return self.tokens[self.num_prompt :].tolist()

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """1 when decoding; more while its prompt, or what preemption took from it, is being computed."""
        return self.num_tokens - self.num_computed

    def append(self, token: int, logprob: float | None) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self.num_tokens + 16)
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if logprob is not None:
            self.logprobs.append(logprob)

    def why_finished(self) -> str | None:
        """The finish reason that its last token gives it, if any."""
        if int(self.tokens[-1]) in self.request.stop_token_ids:
            return "stop"
        return "length" if self.num_outputs >= self.request.max_new_tokens else None


class Request:
    """A prompt and what to do with it."""

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
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.stop_token_ids = stop_token_ids
        self.namespace = namespace
        self.priority = priority
        self.times = RequestTimes(arrival_s)
        self.sequences = [Sequence(self, i) for i in range(params.n)]

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason for seq in self.sequences)
