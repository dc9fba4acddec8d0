"""Whole engines driven by any program of calls: books checked after each, and every output what it is alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import hypothesis
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st
from tiny import alone, assert_baseline, beams, engine, greedy, likeliest, prompt

import jax_paged as jp

ALL_SIZES = [tiny.PAGES_OF_1, tiny.SIZES, tiny.PAGES_OF_16]  # each pool holds one longest sequence, or one and a half

# How each sample of a request is found alone: with the most tokens, of which shorter ones have the first.
IS_LONG = hypothesis.settings.default.max_examples > 100
MOST_TOKENS = 20 if IS_LONG else 12
KINDS = [
    greedy(MOST_TOKENS, logprobs=1),
    greedy(MOST_TOKENS, n=2, repetition_penalty=5.0),
    jp.SamplingParams(temperature=1, seed=1, max_tokens=MOST_TOKENS),
    jp.SamplingParams(temperature=1, seed=2, max_tokens=MOST_TOKENS, n=3, logprobs=0),
    jp.SamplingParams(temperature=0.8, seed=3, max_tokens=MOST_TOKENS, top_k=9, stop_token_ids=[*range(0, 60, 5)]),
    jp.SamplingParams(
        temperature=1, seed=4, max_tokens=MOST_TOKENS, n=2, stop_token_ids=[*range(0, 60, 7)], min_tokens=2
    ),
    greedy(MOST_TOKENS, prompt_logprobs=0, presence_penalty=0.5),
    jp.SamplingParams(temperature=1, seed=5, max_tokens=MOST_TOKENS, top_p=0.8, logit_bias={3: 2.0, 4: -np.inf}),
]

# Few, since each is run alone with each kind, and most of them share a prefix: in whole pages, in part, or all.
_LONG, _OTHER = prompt(9) + likeliest(prompt(9), 34), prompt(29, seed=1)
PROMPTS = st.sampled_from(
    [
        tuple(tokens)
        for tokens in (
            _LONG,
            _OTHER,
            _LONG[:32],
            _LONG[:17] + _OTHER[:11],
            _LONG[:8] + _OTHER[:5],
            _LONG[:7],
            _OTHER[:1],
        )
    ]
)
MORE = st.builds(lambda length, seed: prompt(length, seed), st.sampled_from([0, 1, 2, 5, 9]), st.sampled_from([3, 4]))
PLACES = st.integers(0, 4)  # in a list, of so many that are there
NAMESPACES = st.sampled_from([None, None, None, "other"])
REQUESTS = st.tuples(
    PROMPTS,
    st.integers(0, len(KINDS) - 1),
    st.sampled_from([MOST_TOKENS, 5, MOST_TOKENS, 2]),
    NAMESPACES,
    st.sampled_from([0, 0, 0, -1, 1]),
)


@cache
def all_alone(tokens: tuple[int, ...], kind: int) -> jp.RequestOutput:
    """A request by itself on a fresh engine that caches nothing, whose pool holds its longest."""
    return engine(prefix_cache=False, **tiny.ROOMY if IS_LONG else {}).generate(tokens, KINDS[kind])[0]


@cache
def scores(tokens: tuple[int, ...]) -> np.ndarray:
    return tiny.logprobs(tokens)


def assert_scores(tokens: Sequence[int], prompt_logprobs: Sequence[float | None] | None) -> None:
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    expected = scores(tuple(tokens))[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(np.array(prompt_logprobs[1:], float), expected, atol=1e-4)


@dataclass
class Running:
    """A request on its way, and what it must come to."""

    tokens: tuple[int, ...]
    kind: int
    max_tokens: int
    is_aborted: bool = False
    is_done: bool = False

    def see(self, output: jp.RequestOutput) -> None:
        """Holds an output against the request's run alone."""
        assert not self.is_done, "an output after the last"
        self.is_done = output.finished
        assert output.prompt_token_ids == list(self.tokens)
        whole = all_alone(self.tokens, self.kind)
        for sample, expected in zip(output.outputs, whole.outputs, strict=True):
            num_tokens = len(sample.token_ids)
            end = min(self.max_tokens, len(expected.token_ids))
            assert sample.token_ids == expected.token_ids[:num_tokens]
            assert num_tokens <= end
            if sample.logprobs is not None:
                np.testing.assert_allclose(sample.logprobs, (expected.logprobs or ())[:num_tokens], atol=1e-4)
            if sample.finish_reason == "abort":
                assert self.is_aborted
            elif sample.finish_reason is not None:
                assert num_tokens == end
                is_cut = end < len(expected.token_ids)
                assert sample.finish_reason == ("length" if is_cut else expected.finish_reason)
        assert output.finished == all(sample.finish_reason for sample in output.outputs)
        if output.finished and output.prompt_logprobs is not None and not self.is_aborted:
            assert_scores(self.tokens, output.prompt_logprobs)


@dataclass
class Watched:
    """An open stream."""

    request: Running
    stream: Iterator[jp.StreamEvent]
    tokens: list[int | None] = field(default_factory=list)


class Program:
    """Calls of all kinds on one engine, each a method here."""

    def __init__(self, **options: Any) -> None:
        # Programs without sampling options in some, to have fewer to compile in all.
        self.llm = engine(plain=options["page_size"] == 16, **options)
        self.requests: dict[int, Running] = {}
        self.branches: list[tuple[jp.Branch, list[int]]] = []
        self.streams: list[Watched] = []

    # --- Requests ---

    def add(self, requests: list[tuple[Any, ...]]) -> None:
        for tokens, kind, max_tokens, namespace, priority in requests:
            params = replace(KINDS[kind], max_tokens=max_tokens)
            request_id = self.llm.add_request(tokens, params, namespace=namespace, priority=priority)
            assert request_id not in self.requests
            self.requests[request_id] = Running(tokens, kind, max_tokens)

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.llm.step():
                self.requests[output.request_id].see(output)

    def abort(self, place: int) -> None:
        if self.requests:
            request_id = list(self.requests)[place % len(self.requests)]
            self.llm.abort(request_id)
            self.requests[request_id].is_aborted = True
            self.llm.check()

    def interrupt(self, is_after: bool) -> None:
        dispatch = self.llm._dispatch

        def interrupted(*arguments: Any) -> Any:
            if is_after:
                dispatch(*arguments)
            raise KeyboardInterrupt

        if self.llm._scheduler.has_work():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.llm, "_dispatch", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    self.llm.step()
            self.llm.check()

    # --- Streams ---

    def open_stream(self, tokens: tuple[int, ...], kind: int, max_tokens: int, count: int) -> None:
        if len(self.streams) == 2:
            self.close_stream(0)
        stream = self.llm.stream(tokens, replace(KINDS[kind], max_tokens=max_tokens))
        self.streams.append(Watched(Running(tokens, kind, max_tokens), stream))
        self.watch(count, len(self.streams) - 1)

    def watch(self, count: int, place: int) -> None:
        if not self.streams:
            return
        watched = self.streams[place % len(self.streams)]
        for _ in range(count):
            event = next(watched.stream, None)
            if event is None:
                assert watched.request.is_done
                self.streams.remove(watched)
                break
            watched.request.see(event.output)
            watched.tokens.append(event.token_id)
            assert event.output.outputs[0].token_ids == watched.tokens

    def close_stream(self, place: int) -> None:
        if self.streams:
            self.streams.pop(place % len(self.streams)).stream.close()
        self.llm.check()

    # --- Branches ---

    def branch(self, place: int) -> tuple[jp.Branch, list[int]]:
        if not self.branches:
            self.prefill(_LONG[:17])
        branch, tokens = self.branches[place % len(self.branches)]
        assert branch.token_ids == tokens
        return branch, tokens

    def fits(self, tokens: list[int], num_more: int) -> bool:
        return len(tokens) + num_more <= self.llm.max_model_len

    def prefill(self, tokens: Sequence[int], namespace: str | None = None) -> None:
        if len(self.branches) == 5:
            self.close(0)
        self.branches.append((self.llm.prefill(tokens, namespace=namespace), list(tokens)))

    def fork(self, place: int) -> None:
        branch, tokens = self.branch(place)
        if len(self.branches) < 5:
            self.branches.append((branch.fork(), list(tokens)))
        self.llm.check()

    def extend(self, place: int, more: list[int]) -> None:
        branch, tokens = self.branch(place)
        if self.fits(tokens, len(more)):
            branch.extend(more)
            tokens += more
        else:
            with pytest.raises(jp.RequestError, match="max_model_len"):
                branch.extend(more)
        self.llm.check()

    def generate(self, place: int, max_tokens: int, kind: str) -> None:
        branch, tokens = self.branch(place)
        if not self.fits(tokens, max_tokens):
            return
        if kind == "seeded":
            params = jp.SamplingParams(temperature=1, seed=6, max_tokens=max_tokens)
            expected = alone(tokens, params)
        else:
            params = greedy(max_tokens, prompt_logprobs=0 if kind == "scored" else None)
            expected = likeliest(tokens, max_tokens)
        if kind == "stop":
            params = replace(params, stop_token_ids=expected[-1:])
            expected = expected[: expected.index(expected[-1]) + 1]
        output = branch.generate(params)
        if kind == "scored":
            assert_scores(tokens, output.prompt_logprobs)
        sample = output.outputs[0]
        assert sample.token_ids == expected
        assert sample.finish_reason == ("stop" if kind == "stop" else "length")
        tokens += expected[:-1] if kind == "stop" else expected

    def score(self, place: int, more: list[int]) -> None:
        branch, tokens = self.branch(place)
        if self.fits(tokens, len(more)):
            expected = scores((*tokens, *more))[len(tokens) - 1 :][np.arange(len(more)), more]
            np.testing.assert_allclose(branch.logprobs(more), expected, atol=1e-4)

    def close(self, place: int) -> None:
        branch, tokens = self.branch(place)
        branch.close()
        self.branches = [other for other in self.branches if other[0] is not branch]
        assert branch.token_ids == tokens
        self.llm.check()

    def beam_search(self, tokens: tuple[int, ...], width: int, max_tokens: int) -> None:
        (output,) = self.llm.beam_search(tokens, beam_width=width, max_tokens=max_tokens)
        expected = beams(tokens, width, max_tokens)
        assert [sample.token_ids for sample in output.outputs] == [beam for beam, _ in expected]
        found = [sample.cumulative_logprob for sample in output.outputs]
        np.testing.assert_allclose(np.array(found, float), [score for _, score in expected], atol=1e-3)

    # --- The whole ---

    def reset(self) -> None:
        in_use = any(seq.pages for seq in (*self.llm._scheduler.running, *self.llm._scheduler.held))
        before = self.llm.stats()
        assert self.llm.reset_prefix_cache() is not in_use
        if in_use:
            assert self.llm.stats() == before
        else:
            assert self.llm.stats()["free_pages"] == before["num_pages"]
        self.llm.check()

    def end(self) -> None:
        """Runs what still runs to its end."""
        while self.streams:
            self.watch(MOST_TOKENS + 1, 0)
        for _ in range(1000):
            if self.llm.has_unfinished():
                self.step(1)
        assert not self.llm.has_unfinished(), "requests that never end"
        assert all(request.is_done for request in self.requests.values())
        for branch, tokens in self.branches:
            if self.fits(tokens, 2):
                assert branch.generate(greedy(2)).outputs[0].token_ids == likeliest(tokens, 2)
            branch.close()
        assert_baseline(self.llm)


def call(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


ADD = call("add", requests=st.lists(REQUESTS, min_size=1, max_size=4))
STEP = call("step", count=st.integers(1, 9))
WATCH = call("watch", count=st.integers(1, 5), place=PLACES)
GENERATE = call(
    "generate",
    place=PLACES,
    max_tokens=st.sampled_from([1, 3, 6]),
    kind=st.sampled_from(["greedy", "seeded", "stop", "scored"]),
)
STREAM = call(
    "open_stream",
    tokens=PROMPTS,
    kind=st.sampled_from([0, 2, 4, 7]),
    max_tokens=st.sampled_from([MOST_TOKENS, 2]),
    count=st.integers(0, 3),
)
BEAMS = call("beam_search", tokens=PROMPTS, width=st.sampled_from([1, 3]), max_tokens=st.sampled_from([1, 3]))
CALLS = st.sampled_from(
    [
        *[ADD, ADD, ADD, STEP, STEP, STEP, WATCH, WATCH, GENERATE, GENERATE, STREAM, BEAMS],
        call("abort", place=PLACES),
        call("interrupt", is_after=st.booleans()),
        call("close_stream", place=PLACES),
        call("prefill", tokens=PROMPTS, namespace=NAMESPACES),
        call("fork", place=PLACES),
        call("extend", place=PLACES, more=MORE),
        call("score", place=PLACES, more=MORE),
        call("close", place=PLACES),
        call("reset"),
    ]
).flatmap(lambda calls: calls)


@hypothesis.settings(max_examples=2000 if IS_LONG else 300)
@hypothesis.given(
    sizes=st.sampled_from(ALL_SIZES),
    schedule=st.sampled_from(["lpm", "fcfs", "dfs"]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    partial_hits=st.booleans(),
    wait_for_prefix=st.booleans(),
    decode_steps_per_call=st.sampled_from([None, 8]),
    prefill=st.sampled_from([True, True, False]),
    calls=st.lists(CALLS, min_size=3, max_size=12 if IS_LONG else 6),
)
def test_any_program_gives_each_request_what_it_gives_alone(
    sizes: dict[str, Any], calls: list[tuple[str, dict[str, Any]]], **options: Any
):
    program = Program(**sizes, **options)
    for name, arguments in calls:
        getattr(program, name)(**arguments)
    program.end()
