"""Sampling options through the whole engine: ends, texts, log-probabilities, penalties, several steps a call."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import alone, assert_baseline, drive, engine, greedy, likeliest, prompt

import jax_paged as jp

decode = tiny.tokenizer().decode


def chosen(tokens: Sequence[int], num_tokens: int, adjust: Any) -> list[int]:
    """The greedy continuation where `adjust` changes the logits: it gets them, all tokens, and those of the text."""
    longer = list(tokens)
    for _ in range(num_tokens):
        scores = adjust(tiny.logits(longer)[-1], longer, longer[len(tokens) :])
        longer.append(int(scores.argmax()))
    return longer[len(tokens) :]


def first_sample(llm: jp.LLM, tokens: Sequence[int], params: jp.SamplingParams) -> jp.CompletionOutput:
    return llm.generate(tokens, params)[0].outputs[0]


# --- Biases and penalties ---


@pytest.mark.parametrize("width", [1, 300])
def test_biases_are_added_to_the_logits(width: int):
    tokens = likeliest(prompt(9), 1)
    biases = {tokens[0]: -np.inf, 7: 1.5, 8: -2.0} | {i: -3.0 for i in range(9, 61) if width > 1 and i != tokens[0]}

    def adjust(scores: np.ndarray, *_: Any) -> np.ndarray:
        scores[list(biases)] += list(biases.values())
        return scores

    llm = engine()
    assert first_sample(llm, prompt(9), greedy(8, logit_bias=biases)).token_ids == chosen(prompt(9), 8, adjust)
    assert_baseline(llm)


@pytest.mark.parametrize("decode_steps_per_call", [1, None])
@pytest.mark.parametrize(
    "penalties", [(1.8, 0.0, 0.0), (0.6, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (1.4, -0.5, 0.9)]
)
def test_penalties_count_what_was_said(penalties: tuple[float, float, float], decode_steps_per_call: int | None):
    repetition, presence, frequency = penalties

    def adjust(scores: np.ndarray, everything: list[int], text: list[int]) -> np.ndarray:
        for token in set(everything):
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        for token in set(text):
            scores[token] -= presence + frequency * text.count(token)
        return scores

    params = greedy(14, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    tokens = prompt(9) + likeliest(prompt(9), 12)
    llm = engine(decode_steps_per_call=decode_steps_per_call)
    for _ in range(2):  # the second time from cached pages
        output = llm.generate([tokens, prompt(7, seed=1)], [params, greedy(14)])
        assert output[0].outputs[0].token_ids == chosen(tokens, 14, adjust)
        assert output[1].outputs[0].token_ids == likeliest(prompt(7, seed=1), 14)
    assert_baseline(llm)


def test_penalties_remember_the_text_of_a_preempted_request():
    llm = engine()
    params = jp.SamplingParams(temperature=0.7, seed=1, max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.2)
    outputs = llm.generate([prompt(12, seed) for seed in range(5)], params)
    assert llm.stats()["preemptions"] > 0
    for seed, output in enumerate(outputs):
        assert output.outputs[0].token_ids == alone(prompt(12, seed), params)
    assert_baseline(llm)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 1}])
def test_filters_leave_only_the_likely_tokens(options: dict[str, Any]):
    llm = engine()
    params = jp.SamplingParams(temperature=1.5, seed=2, max_tokens=40, **options)
    tokens = first_sample(llm, prompt(9), params).token_ids
    scores = tiny.logits(prompt(9) + tokens)[8:-1] / 1.5
    probabilities = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    ranks = (-probabilities).argsort().argsort()
    for place, token in enumerate(tokens):
        likelier = probabilities[place][ranks[place] < ranks[place][token]]
        if "top_k" in options:
            assert len(likelier) < options["top_k"]
        elif "top_p" in options:
            assert likelier.sum() < options["top_p"] + 1e-5
        else:
            assert probabilities[place][token] >= options["min_p"] * probabilities[place].max() - 1e-6
    assert len(set(tokens)) > 1
    assert_baseline(llm)


# --- Log-probabilities ---


@pytest.mark.parametrize("count", [0, 1, 5, 32])
def test_logprobs_are_the_models_own_whatever_the_options(count: int):
    llm = engine()
    params = jp.SamplingParams(
        temperature=1.3, seed=3, max_tokens=9, top_k=20, repetition_penalty=1.4, logit_bias={4: 2.0}, logprobs=count
    )
    sample = first_sample(llm, prompt(9), params)
    expected = tiny.logprobs(prompt(9) + sample.token_ids)[8:-1]
    np.testing.assert_allclose(sample.logprobs or (), expected[np.arange(9), sample.token_ids], atol=1e-4)
    assert sample.cumulative_logprob == pytest.approx(sum(sample.logprobs or ()))
    if count == 0:
        assert sample.top_logprobs is None
    else:
        assert sample.top_logprobs is not None
        for scores, tops in zip(expected, sample.top_logprobs, strict=True):
            assert list(tops) == np.argsort(-scores)[:count].tolist()
            np.testing.assert_allclose(list(tops.values()), np.sort(scores)[::-1][:count], atol=1e-4)
    assert_baseline(llm)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 50])
@pytest.mark.parametrize("count", [0, 3])
def test_i1_prompt_logprobs_are_the_models_with_a_cold_and_a_warm_cache(length: int, count: int):
    llm = engine()
    params = greedy(3, prompt_logprobs=count)
    cold = llm.generate(prompt(length), params)[0]
    llm.generate(prompt(length), greedy(3))
    warm = llm.generate(prompt(length), params)[0]
    expected = tiny.logprobs(prompt(length))
    for output in (cold, warm):
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == likeliest(prompt(length), 3)
        assert output.outputs[0].logprobs is None
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == length
        assert output.prompt_logprobs[0] is None
        found = np.array(output.prompt_logprobs[1:], float)
        np.testing.assert_allclose(found, expected[np.arange(length - 1), prompt(length)[1:]], atol=1e-4)
        if count == 0:
            assert output.prompt_top_logprobs is None
            continue
        assert output.prompt_top_logprobs is not None
        assert output.prompt_top_logprobs[0] is None
        for scores, tops in zip(expected[:-1], output.prompt_top_logprobs[1:], strict=True):
            assert tops is not None
            assert list(tops) == np.argsort(-scores)[:count].tolist()
            np.testing.assert_allclose(list(tops.values()), np.sort(scores)[::-1][:count], atol=1e-4)
    np.testing.assert_allclose(
        np.array(cold.prompt_logprobs[1:], float), np.array(warm.prompt_logprobs[1:], float), atol=1e-5
    )
    assert_baseline(llm)


def test_i1_prompt_logprobs_are_whole_after_preemption_and_beside_requests_without():
    llm = engine()
    params = [greedy(50, prompt_logprobs=1), greedy(50), greedy(50, prompt_logprobs=0, logprobs=2)] * 2
    prompts = [prompt(22, seed % 4) for seed in range(6)]
    outputs = llm.generate(prompts, params)
    assert llm.stats()["preemptions"] > 0
    for tokens, options, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == alone(tokens, greedy(50))
        if options.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            expected = tiny.logprobs(tokens)[np.arange(21), tokens[1:]]
            np.testing.assert_allclose(np.array((output.prompt_logprobs or ())[1:], float), expected, atol=1e-4)
    assert_baseline(llm)


def test_samples_and_prompt_logprobs_go_together():
    llm = engine()
    output = llm.generate(prompt(18), jp.SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=0, logprobs=0))[0]
    expected = tiny.logprobs(prompt(18))[np.arange(17), prompt(18)[1:]]
    np.testing.assert_allclose(np.array((output.prompt_logprobs or ())[1:], float), expected, atol=1e-4)
    for sample in output.outputs:
        expected = tiny.logprobs(prompt(18) + sample.token_ids)[17:-1]
        np.testing.assert_allclose(sample.logprobs or (), expected[np.arange(5), sample.token_ids], atol=1e-4)
    assert_baseline(llm)


# Of every kind, in an order that mixes them.
MANY_OPTIONS = [
    greedy(9, logprobs=2),
    jp.SamplingParams(temperature=1, seed=1, max_tokens=20, logprobs=0),
    greedy(7, repetition_penalty=2.0, logprobs=1, prompt_logprobs=2),
    jp.SamplingParams(
        temperature=0.8, seed=2, top_k=5, max_tokens=12, logprobs=3, min_tokens=6, stop_token_ids=[*range(30)]
    ),
    greedy(3, logit_bias={3: 9.0}, logprobs=0),
    jp.SamplingParams(temperature=1.2, seed=3, top_p=0.8, frequency_penalty=0.5, max_tokens=30, logprobs=4),
    greedy(1, logprobs=1),
    jp.SamplingParams(
        temperature=1, seed=4, min_p=0.1, presence_penalty=1.0, max_tokens=15, stop=["a", "the"], logprobs=1
    ),
    jp.SamplingParams(temperature=1, seed=5, n=3, max_tokens=11, logprobs=2),
    jp.SamplingParams(temperature=1, seed=6, max_tokens=25, stop=["in", "e"], min_tokens=8, logprobs=0),
]


@pytest.mark.parametrize("sizes", [{}, tiny.ROOMY], ids=["pressed", "roomy"])
def test_i2_rows_of_all_kinds_that_end_are_aborted_or_go_on_are_what_they_are_alone(sizes: dict[str, Any]):
    text = {"tokenizer": tiny.tokenizer()}
    prompts = [prompt(12, seed % 3) + prompt(seed, seed=9) for seed in range(len(MANY_OPTIONS))]
    solo = [
        engine(prefix_cache=False, **tiny.ROOMY, **text).generate(tokens, params)[0]
        for tokens, params in zip(prompts, MANY_OPTIONS, strict=True)
    ]
    llm = engine(**sizes, **text)
    ids = [llm.add_request(tokens, params) for tokens, params in zip(prompts, MANY_OPTIONS, strict=True)]
    aborted = {ids[1]: 5, ids[5]: 9, ids[8]: 14}
    last: dict[int, jp.RequestOutput] = {}
    for step in range(10_000):
        for request_id, when in aborted.items():
            if step == when:
                llm.abort(request_id)
        for output in llm.step():
            assert output.request_id not in last
            if output.finished:
                last[output.request_id] = output
        if not llm.has_unfinished():
            break
    for request_id, alone_, params in zip(ids, solo, MANY_OPTIONS, strict=True):
        for sample, expected in zip(last[request_id].outputs, alone_.outputs, strict=True):
            num_tokens = len(sample.token_ids)
            assert len(sample.logprobs or ()) == num_tokens
            assert sample.token_ids == expected.token_ids[:num_tokens]
            np.testing.assert_allclose(sample.logprobs or (), (expected.logprobs or ())[:num_tokens], atol=1e-4)
            if params.logprobs:
                assert len(sample.top_logprobs or ()) == num_tokens
            if sample.finish_reason == "abort":
                assert request_id in aborted
                assert expected.text.startswith(sample.text.rstrip("\N{REPLACEMENT CHARACTER}"))
            else:
                assert (sample.text, sample.finish_reason) == (expected.text, expected.finish_reason)
                assert num_tokens == len(expected.token_ids)
    assert any(sample.finish_reason == "abort" for output in last.values() for sample in output.outputs)
    assert_baseline(llm)


# --- Ends ---


@pytest.mark.parametrize("decode_steps_per_call", [1, None])
def test_end_tokens_of_the_model_end_the_text_unless_ignored(decode_steps_per_call: int | None):
    llm = engine(decode_steps_per_call=decode_steps_per_call)
    tokens = likeliest(prompt(9), 12)
    tiny.set_end_tokens(llm, tokens[6])
    end = tokens.index(tokens[6]) + 1
    sample = first_sample(llm, prompt(9), greedy(12))
    assert (sample.token_ids, sample.finish_reason) == (tokens[:end], "stop")
    sample = first_sample(llm, prompt(9), greedy(12, ignore_eos=True))
    assert (sample.token_ids, sample.finish_reason) == (tokens, "length")
    other = tokens[1]
    sample = first_sample(llm, prompt(9), greedy(12, ignore_eos=True, stop_token_ids=[other]))
    assert (sample.token_ids, sample.finish_reason) == (tokens[: tokens.index(other) + 1], "stop")
    assert_baseline(llm)


@pytest.mark.parametrize("min_tokens", [1, 3, 6])
def test_a_stop_token_is_not_chosen_among_the_first_min_tokens(min_tokens: int):
    stops = likeliest(prompt(9), 1)

    def adjust(scores: np.ndarray, _: list[int], text: list[int]) -> np.ndarray:
        if len(text) < min_tokens:
            scores[stops] = -np.inf
        return scores

    free_run = chosen(prompt(9), 20, adjust)
    end = next((i + 1 for i, token in enumerate(free_run) if token in stops), 20)
    llm = engine()
    sample = first_sample(llm, prompt(9), greedy(20, min_tokens=min_tokens, stop_token_ids=stops))
    assert sample.token_ids == free_run[:end]
    assert sample.finish_reason == ("stop" if end < 20 or free_run[-1] in stops else "length")
    assert len(sample.token_ids) > min_tokens
    assert_baseline(llm)


def test_more_stop_tokens_than_the_device_looks_for_end_the_text_all_the_same():
    tokens = likeliest(prompt(9), 12)
    stops = [token for token in range(61) if token not in tokens[:5]]
    end = next(i for i, token in enumerate(tokens, 1) if token in stops)
    llm = engine()
    sample = first_sample(llm, prompt(9), greedy(12, stop_token_ids=stops))
    assert (sample.token_ids, sample.finish_reason) == (tokens[:end], "stop")
    sample = first_sample(llm, prompt(9), greedy(12, stop_token_ids=stops, min_tokens=5))
    assert (sample.token_ids, sample.finish_reason) == (tokens[:end], "stop")
    assert_baseline(llm)


# --- Texts and stop strings ---

# A long sampled text of whole characters, to take stop strings from.
BYTES = [i for i in range(tiny.CONFIG.vocab_size) if tiny.tokenizer().token_bytes(i) >= b"\x80"]
WORDY = jp.SamplingParams(temperature=1, seed=11, max_tokens=40, logit_bias=dict.fromkeys(BYTES, -np.inf))


def text_of(tokens: Sequence[int], stop: str, min_tokens: int = 0) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason where a stop string ends a text: looked for in the whole after each token."""
    for end in range(1, len(tokens) + 1):
        place = decode(tokens[:end]).find(stop, max(0, len(decode(tokens[: end - 1])) - len(stop) + 1))
        if place >= 0 and end >= min_tokens:
            return list(tokens[:end]), decode(tokens[:end])[:place], "stop"
    return list(tokens), decode(tokens), "length"


@pytest.mark.parametrize("decode_steps_per_call", [1, None])
@pytest.mark.parametrize("place", [0, 3, 8, 14])
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_a_stop_string_ends_the_text_before_it(place: int, length: int, decode_steps_per_call: int | None):
    llm = engine(tokenizer=tiny.tokenizer(), decode_steps_per_call=decode_steps_per_call)
    tokens = alone(prompt(9), WORDY)
    stop = decode(tokens)[place : place + length]
    expected = text_of(tokens, stop)
    params = replace(WORDY, stop=["never there", stop])
    samples = [output.outputs[0] for output in llm.generate([prompt(9)] * 2, params)]
    for sample in samples:
        assert (sample.token_ids, sample.text, sample.finish_reason) == expected
        assert stop not in sample.text
    events = list(llm.stream(prompt(9), params))
    assert "".join(event.text for event in events) == expected[1]
    assert [event.token_id for event in events] == expected[0]
    for event in events:
        assert expected[1].startswith(event.output.outputs[0].text)
    assert_baseline(llm)


@pytest.mark.parametrize("min_tokens", [1, 4, 9, 20])
def test_a_stop_string_before_min_tokens_is_part_of_the_text(min_tokens: int):
    llm = engine(tokenizer=tiny.tokenizer())
    tokens = alone(prompt(9), WORDY)
    stop = decode(tokens)[2]
    expected = text_of(tokens, stop, min_tokens)
    sample = first_sample(llm, prompt(9), replace(WORDY, stop=stop, min_tokens=min_tokens))
    assert (sample.token_ids, sample.text, sample.finish_reason) == expected
    assert_baseline(llm)


def test_streamed_texts_add_up_to_the_final_one():
    llm = engine(tokenizer=tiny.tokenizer())
    for seed in range(6):
        params = jp.SamplingParams(temperature=1.2, seed=seed, max_tokens=30, stop=["zzzz", "the the", "  "])
        expected = llm.generate(prompt(9), params)[0].outputs[0]
        events = list(llm.stream(prompt(9), params))
        assert [event.token_id for event in events] == expected.token_ids
        assert "".join(event.text for event in events) == expected.text == events[-1].output.outputs[0].text
        assert events[-1].output.outputs[0].finish_reason == expected.finish_reason
    assert_baseline(llm)


def test_samples_have_each_its_own_text():
    llm = engine(tokenizer=tiny.tokenizer())
    free_run = llm.generate(prompt(9), replace(WORDY, n=4))[0].outputs
    stop = free_run[2].text[4:6]
    for free, sample in zip(free_run, llm.generate(prompt(9), replace(WORDY, n=4, stop=stop))[0].outputs, strict=True):
        assert free.text == decode(free.token_ids)
        assert (sample.token_ids, sample.text, sample.finish_reason) == text_of(free.token_ids, stop)
    assert_baseline(llm)


def test_without_a_tokenizer_there_is_no_text():
    assert first_sample(engine(), prompt(9), WORDY).text == ""


# --- Several steps in one call ---


def run_of(llm: jp.LLM, params: Sequence[jp.SamplingParams]) -> list[list[Any]]:
    outputs = llm.generate([prompt(6, seed) for seed in range(len(params))], params)
    return [
        [(s.token_ids, s.text, s.finish_reason, s.top_logprobs) for s in output.outputs] + [output.prompt_logprobs]
        for output in outputs
    ]


@pytest.mark.parametrize(("decode_steps_per_call", "is_roomy"), [(2, False), (8, False), (None, False), (None, True)])
def test_several_steps_a_call_are_the_same_as_one_at_a_time(decode_steps_per_call: int | None, is_roomy: bool):
    stop = alone(prompt(6), greedy(20))[10]
    params = [
        greedy(19, stop_token_ids=[stop], logprobs=2),
        greedy(13, logprobs=2),
        jp.SamplingParams(temperature=1, seed=1, max_tokens=26, repetition_penalty=1.4),
        jp.SamplingParams(temperature=1, seed=2, max_tokens=11, min_tokens=9, stop_token_ids=[*range(20)], logprobs=1),
        jp.SamplingParams(temperature=1, seed=3, max_tokens=21, n=2, top_p=0.7),
    ]
    sizes = tiny.ROOMY if is_roomy else {}
    one = engine(decode_steps_per_call=1, **sizes)
    several = engine(decode_steps_per_call=decode_steps_per_call, **sizes)
    expected, found = run_of(one, params), run_of(several, params)
    for left, right in zip(expected, found, strict=True):
        for a, b in zip(left[:-1], right[:-1], strict=True):
            assert a[:3] == b[:3]
            for scores, others in zip(a[3] or (), b[3] or (), strict=True):
                assert list(scores) == list(others)
                np.testing.assert_allclose(list(scores.values()), list(others.values()), atol=1e-5)
    before, after = one.stats(), several.stats()
    assert before["generated_tokens"] == after["generated_tokens"]
    if is_roomy:
        same = (
            "free_pages",
            "tree_pages",
            "private_pages",
            "computed_prefill_tokens",
            "query_tokens",
            "hit_tokens",
            "preemptions",
        )
        assert {name: before[name] for name in same} == {name: after[name] for name in same}
    assert_baseline(several)


def calls_of(llm: jp.LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each call that the engine makes from now on."""
    calls: list[int] = []
    dispatch = llm._dispatch

    def counted(plan: Any, bucket: Any) -> Any:
        calls.append(plan.num_steps)
        return dispatch(plan, bucket)

    monkeypatch.setattr(llm, "_dispatch", counted)
    return calls


def test_eight_tokens_a_call_while_all_decode_and_one_in_a_stream_or_by_step(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    calls = calls_of(llm, monkeypatch)
    llm.generate([prompt(5), prompt(6, seed=1)], [greedy(17), greedy(20)])
    assert calls == [1, 8, 8, 3]
    calls.clear()
    list(llm.stream(prompt(5), greedy(4)))
    assert calls == [1] * 4
    calls.clear()
    request_id = llm.add_request(prompt(5), greedy(4))
    outputs = drive(llm)[request_id]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]
    assert calls == [1] * 4
    assert_baseline(llm)


def test_several_tokens_a_step_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    llm = engine(decode_steps_per_call=8)
    calls = calls_of(llm, monkeypatch)
    request_id = llm.add_request(prompt(5), greedy(14))
    outputs = drive(llm)[request_id]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 9, 14]
    assert calls == [1, 8, 5]
    assert outputs[-1].outputs[0].token_ids == likeliest(prompt(5), 14)
    assert_baseline(llm)


@pytest.mark.parametrize("place", range(1, 10))
def test_a_stop_token_anywhere_in_a_call_ends_the_row_there(place: int):
    llm = engine()
    tokens = [likeliest(prompt(6, seed), 20) for seed in (0, 1)]
    stop = tokens[0][place]
    end = tokens[0].index(stop) + 1
    outputs = llm.generate([prompt(6), prompt(6, seed=1)], [greedy(20, stop_token_ids=[stop]), greedy(20)])
    sample = outputs[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason) == (tokens[0][:end], "stop")
    assert outputs[1].outputs[0].token_ids == tokens[1]
    assert llm.stats()["generated_tokens"] == end + 20
    # What was computed after the stop token is in no page that anyone keeps.
    kept = 6 + end - 1
    assert llm.stats()["private_pages"] == 0
    assert llm.generate([*prompt(6), *tokens[0][:end], 1], greedy(1))[0].num_cached_tokens == kept // 4 * 4
    assert_baseline(llm)


@pytest.mark.parametrize("decode_steps_per_call", [1, 8, None])
@pytest.mark.parametrize("other", ["generate", "step"])
def test_an_open_stream_gets_every_token_whoever_runs_the_steps(decode_steps_per_call: int | None, other: str):
    llm = engine(tokenizer=tiny.tokenizer(), decode_steps_per_call=decode_steps_per_call)
    stream = llm.stream(prompt(9), greedy(20))
    events = [next(stream)]
    if other == "generate":
        llm.generate(prompt(7, seed=1), greedy(12))
    else:
        for _ in range(3):
            llm.step()
    events += stream
    expected = likeliest(prompt(9), 20)
    assert [event.token_id for event in events] == expected
    assert "".join(event.text for event in events) == decode(expected)
    assert [len(event.output.outputs[0].token_ids) for event in events] == list(range(1, 21))
    assert_baseline(llm)


# --- What cannot be ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, r"n=0 must be >= 1"),
        ({"temperature": -0.1}, r"temperature=-0.1 must be >= 0; use 0 for greedy"),
        ({"temperature": float("nan")}, r"temperature=nan must be >= 0; use 0 for greedy"),
        ({"temperature": float("inf")}, r"temperature=inf must be >= 0"),
        ({"top_k": -1}, r"top_k=-1 must be >= 0; 0 takes all tokens"),
        ({"top_p": 0.0}, r"top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1.1 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, r"top_p=nan must be above 0 and at most 1"),
        ({"min_p": -0.1}, r"min_p=-0.1 must be from 0 to 1"),
        ({"min_p": 1.1}, r"min_p=1.1 must be from 0 to 1"),
        ({"max_tokens": 0}, r"max_tokens=0 must be >= 1, or None"),
        ({"min_tokens": -1}, r"min_tokens=-1 must be >= 0"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9 must not be above max_tokens=8"),
        ({"seed": -1}, r"seed=-1 must be in \[0, 2\*\*32\)"),
        ({"seed": 2**32}, r"seed=4294967296 must be in \[0, 2\*\*32\)"),
        ({"stop": ["a", ""]}, r"stop=\['a', ''\] has an empty string.*leave it out"),
        ({"stop": ""}, r"stop=\[''\] has an empty string"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids=\[3, -1\] must not be negative"),
        ({"logprobs": -1}, r"logprobs=-1 must be from 0 to 32"),
        ({"logprobs": 33}, r"logprobs=33 must be from 0 to 32"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1 must be from 0 to 32"),
        ({"prompt_logprobs": 33}, r"prompt_logprobs=33 must be from 0 to 32"),
        ({"presence_penalty": float("inf")}, r"presence_penalty=inf must be at most 1e\+09 in size"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty=nan must be at most 1e\+09 in size"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0.0 must be from 1e-6 to 1e6"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty=inf must be from 1e-6 to 1e6"),
        (
            {"logit_bias": {-1: 0.5}},
            r"logit_bias\[-1\]=0.5 must be at most 1e\+09 in size, or -inf, of a token id >= 0",
        ),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\]=nan must be at most 1e\+09"),
        ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\]=inf must be at most 1e\+09"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, r"logit_bias has 301 entries; at most 300"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_value_out_of_its_range_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        jp.SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [5, 61]}, r"stop_token_ids: 61 is not a token id of this model: 0 <= id < 61"),
        ({"logit_bias": {5: 1.0, 61: 1.0}}, r"logit_bias: 61 is not a token id of this model: 0 <= id < 61"),
        ({"stop": "x"}, r"stop=\['x'\] needs a tokenizer, and this model has none; give stop_token_ids, or LLM\(token"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_this_model_cannot_do_is_refused_and_the_queue_goes_on(options: dict[str, Any], message: str):
    llm = engine()
    other = llm.add_request(prompt(5), greedy(3))
    llm.step()
    before = llm.stats()
    params = greedy(4, **options)
    with pytest.raises(jp.RequestError, match=message):
        llm.add_request(prompt(6), params)
    with pytest.raises(jp.RequestError, match=message):
        llm.generate([prompt(5), prompt(6)], [greedy(), params])
    with pytest.raises(jp.RequestError, match=message):
        llm.stream(prompt(6), params)
    assert llm.stats() == before
    (outputs,) = drive(llm).values()
    assert outputs[-1].request_id == other
    assert outputs[-1].outputs[0].token_ids == likeliest(prompt(5), 3)
    assert_baseline(llm)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"n": 2.5}, r"n=2.5 must be an integer"),
        ({"max_tokens": float("nan")}, r"max_tokens=nan must be an integer or None"),
        ({"logprobs": 2.5}, r"logprobs=2.5 must be an integer or None"),
        ({"temperature": None}, r"temperature=None must be a number"),
        ({"top_p": "1"}, r"top_p='1' must be a number"),
        ({"ignore_eos": "no"}, r"ignore_eos='no' must be True or False"),
        ({"stop": [5]}, r"stop=\[5\] must be a string or a list of strings"),
        ({"stop_token_ids": [27.5]}, r"stop_token_ids=\[27.5\] must be a list of token ids"),
        ({"logit_bias": {1.5: 3}}, r"logit_bias=\{1.5: 3\} must be a dictionary from token ids to numbers"),
    ],
)
def test_a_value_of_another_type_is_refused(option: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        jp.SamplingParams(**option)


def test_options_may_come_as_numpy_numbers_and_iterators():
    params = jp.SamplingParams(n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=iter([3, 4]), stop="end")
    assert (params.n, params.temperature, params.stop_token_ids, params.stop) == (2, 0.5, (3, 4), ("end",))


@pytest.mark.parametrize(
    ("request_options", "message"),
    [
        ({"namespace": [1]}, r"namespace=\[1\] cannot be hashed"),
        ({"priority": "a"}, r"priority='a' must be an integer"),
        ({"prompt": 5}, r"5 is neither text nor a list of token ids"),
        ({"prompt": [1.0, 2.0]}, r"1.0 is not a token id of this model"),
        ({"prompt": [True]}, r"True is not a token id of this model"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_the_queue_goes_on(request_options: dict[str, Any], message: str):
    llm = engine()
    good = llm.add_request(prompt(9), greedy(3))
    with pytest.raises(jp.RequestError, match=message):
        llm.add_request(**({"prompt": prompt(5), "params": greedy(3)} | request_options))
    while llm.has_unfinished():
        outputs = llm.step()
    assert [output.request_id for output in outputs] == [good]
    assert outputs[0].outputs[0].token_ids == alone(prompt(9), greedy(3))


def test_arrays_of_jax_and_numpy_are_prompts():
    llm = engine()
    expected = alone(prompt(9), greedy(3))
    for array in (jnp.array(prompt(9)), np.array(prompt(9)), [jnp.array(prompt(9))], np.array([prompt(9)])):
        assert llm.generate(array, greedy(3))[0].outputs[0].token_ids == expected
