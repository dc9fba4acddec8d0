"""Beam search over branches: beams share the pages of all they have in common."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jax_paged.arguments import integers
from jax_paged.branch import Branch
from jax_paged.errors import RequestError
from jax_paged.request import MAX_LOGPROBS, CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jax_paged.engine import LLM

__all__ = ["beam_search"]

_MAX_LENGTH_PENALTY = 100


@dataclass
class _Beam:
    """One way on. `branch` is None once it has ended."""

    branch: Branch | None
    token_ids: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        return sum(self.logprobs)


def beam_search(
    llm: "LLM",
    prompts: Sequence[Sequence[int]],
    *,
    beam_width: int = 4,
    max_tokens: int = 32,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
    namespace: Hashable = None,
) -> list[RequestOutput]:
    """Finds likely continuations: in each step the `beam_width` likeliest of all one-token extensions of the beams.

    An extension by an end token is set aside as finished, and does not take a beam's place. In the end, the finished
    and the unfinished ones are ranked together by log-probability / length ** length_penalty, the length being that of
    the continuation, its end token included. A beam ends where the model gives NaN; if none is left, the only output
    has the finish reason "error:<why>".

    Args:
      llm: the engine.
      prompts: token ids.
      beam_width: beams, and outputs, a prompt.
      max_tokens: of a continuation.
      length_penalty: above 0 favours longer ones, below 0 shorter ones.
      ignore_eos: treat the model's end tokens as any other.
      namespace: as in `LLM.generate`.

    Returns:
      An output a prompt, its `outputs` the best first.

    Raises:
      ValueError: a width or length that cannot be.
      RequestError: a prompt with which this cannot run.
    """
    ends: frozenset[int] = frozenset() if ignore_eos else frozenset(llm._intake.end_tokens())
    beam_width, max_tokens = integers(1, beam_width=beam_width, max_tokens=max_tokens)
    if not isinstance(length_penalty, int | float) or not abs(length_penalty) <= _MAX_LENGTH_PENALTY:
        raise ValueError(f"{length_penalty=} must be a number of at most {_MAX_LENGTH_PENALTY} in size")
    num_candidates = max(2 * beam_width, beam_width + len(ends))
    if num_candidates > MAX_LOGPROBS:
        raise ValueError(f"{beam_width=} must be from 1 to {min(MAX_LOGPROBS // 2, MAX_LOGPROBS - len(ends))}")
    for prompt in prompts:
        if len(prompt) + max_tokens > llm.max_model_len:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens={max_tokens} are more than "
                f"max_model_len={llm.max_model_len}; shorten one, or raise max_model_len"
            )
    num_candidates = min(num_candidates, llm.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=num_candidates, ignore_eos=True)
    searches: list[_Search] = []
    try:
        for prompt in prompts:
            root = Branch(llm, prompt, namespace)
            assert root.computed is not None
            searches.append(_Search([_Beam(root, [], [])], [], root.computed))
        for _ in range(max_tokens):
            _step(llm, searches, params, beam_width, ends)
    finally:
        for search in searches:
            search.close()
    return [_output(llm, search, beam_width, length_penalty, ends) for search in searches]


@dataclass
class _Search:
    """The beams of one prompt."""

    beams: list[_Beam]
    finished: list[_Beam]
    prefill: RequestOutput
    error: str | None = None  # why a beam could not go on

    def close(self) -> None:
        for beam in self.beams:
            if beam.branch is not None:
                beam.branch.close()


def _step(llm: "LLM", searches: list[_Search], params: SamplingParams, beam_width: int, ends: frozenset[int]) -> None:
    """One token more for the beams of all prompts, in one batch."""
    branches = [beam.branch for search in searches for beam in search.beams if beam.branch is not None]
    requests = [branch.start(params) for branch in branches]
    outputs = dict(zip(branches, llm._run(requests)))
    for branch, request in zip(branches, requests):
        branch.take(request)
    for search in searches:
        candidates = []  # beam, token, its log-probability
        for beam in search.beams:
            assert beam.branch is not None
            (sample,) = outputs[beam.branch].outputs
            if not sample.top_logprobs:
                search.error = sample.finish_reason
                continue
            candidates += [(beam, token, logprob) for token, logprob in sample.top_logprobs[0].items()]
        candidates.sort(key=lambda c: -(c[0].logprob + c[2]))  # stable: among equals the better beam first
        old, search.beams = search.beams, []
        for beam, token, logprob in candidates:
            if len(search.beams) == beam_width:
                break
            longer = _Beam(None, [*beam.token_ids, token], [*beam.logprobs, logprob])
            if token in ends:
                search.finished.append(longer)
            else:
                assert beam.branch is not None
                longer.branch = beam.branch.fork_with(token)
                search.beams.append(longer)
        for beam in old:
            assert beam.branch is not None
            beam.branch.close()


def _output(
    llm: "LLM",
    search: _Search,
    beam_width: int,
    length_penalty: float,
    ends: frozenset[int],
) -> RequestOutput:
    beams = sorted(
        [*search.finished, *search.beams], key=lambda beam: -beam.logprob / len(beam.token_ids) ** length_penalty
    )
    prompt = search.prefill.prompt_token_ids
    outputs = [] if beams else [CompletionOutput(0, "", [], [], 0.0, search.error)]
    for i, beam in enumerate(beams[:beam_width]):
        is_end = beam.token_ids[-1] in ends
        text_ids = beam.token_ids[:-1] if is_end else beam.token_ids
        outputs.append(
            CompletionOutput(
                index=i,
                text="" if llm.tokenizer is None else llm.tokenizer.decode(text_ids, after=prompt),
                token_ids=beam.token_ids,
                logprobs=beam.logprobs,
                cumulative_logprob=beam.logprob,
                finish_reason="stop" if is_end else "length",
            )
        )
    return replace(search.prefill, outputs=outputs, times=replace(search.prefill.times, finished_s=llm._clock()))
