"""The engine on a tiny model, with its books checked and its pool poisoned after every step."""

import copy
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from tiny import alone, assert_baseline, drive, greedy, prompt

import jax_paged as jp
from jax_paged import buckets
from jax_paged.ledger import Commands, StepPlan, StepResult
from jax_paged.memory import page_bytes, pool_format
from jax_paged.models.llama import Llama, random_weights
from jax_paged.models.load import LoadedModel
from jax_paged.step import Bucket, jit_step, pack_commands, pack_inputs, run_step
from jax_paged.tokenizer import Tokenizer

SIZES = [tiny.PAGES_OF_1, tiny.SIZES, tiny.PAGES_OF_16]
engine = partial(tiny.engine, plain=True)


def engine_of(sizes: dict[str, Any], **options: Any) -> jp.LLM:
    """Of the two kinds of programs, at the other sizes those that other tests compile, too."""
    return tiny.engine(plain=sizes is tiny.SIZES, **sizes, **options)


def tokens_of(output: jp.RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


# --- The numbers are the model's ---


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"pages_of_{sizes['page_size']}")
def test_g1_tokens_and_logprobs_are_those_of_the_dense_model(sizes: dict[str, Any]):
    llm = engine_of(sizes)
    requests = [(prompt(length, seed=length), greedy(12, logprobs=0)) for length in (1, 3, 4, 5, 15, 16, 17, 33)]
    for output in llm.generate(*map(list, zip(*requests))):
        sample = output.outputs[0]
        logits = tiny.logits(output.prompt_token_ids + sample.token_ids)[len(output.prompt_token_ids) - 1 : -1]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert sample.token_ids == logits.argmax(-1).tolist()
        np.testing.assert_allclose(sample.logprobs, logprobs.max(-1), atol=1e-4)
        assert sample.cumulative_logprob == pytest.approx(sum(sample.logprobs))
        assert sample.finish_reason == "length"
    assert_baseline(llm)


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a1_a_prompt_sent_twice_gives_the_same_and_computes_at_least_its_last_token(length: int, partial_hits: bool):
    llm = engine(partial_hits=partial_hits)
    first, second = (llm.generate(prompt(length), greedy())[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1 if partial_hits else (length - 1) // 4 * 4)
    assert tokens_of(first) == tokens_of(second) == alone(prompt(length), greedy())
    stats = llm.stats()
    assert stats["hit_tokens"] == second.num_cached_tokens
    assert stats["computed_prefill_tokens"] == 2 * length - second.num_cached_tokens
    assert_baseline(llm)


@pytest.mark.parametrize("num_more", [1, 3, 4, 5])
def test_d1_what_follows_a_hit_is_computed_at_its_place(num_more: int):
    params = greedy(6, logprobs=0)
    tokens = prompt(16) + prompt(num_more, seed=1)
    cold = engine(prefix_cache=False).generate(tokens, params)[0]
    llm = engine()
    llm.generate(prompt(16), greedy(1))
    warm = llm.generate(tokens, params)[0]
    assert warm.num_cached_tokens == 16
    assert tokens_of(warm) == tokens_of(cold)
    np.testing.assert_allclose(warm.outputs[0].logprobs, cold.outputs[0].logprobs, atol=1e-5)


def test_a7_a_prefix_that_was_evicted_and_overwritten_is_computed_again():
    llm = engine(partial_hits=False)
    first = llm.generate(prompt(40), greedy())[0]
    llm.generate([prompt(80, seed=1), prompt(80, seed=2)], greedy())
    again = llm.generate(prompt(40), greedy())[0]
    assert llm.stats()["evicted_pages"] > 10
    assert again.num_cached_tokens == 0
    assert tokens_of(first) == tokens_of(again)
    assert_baseline(llm)


def test_c1_the_next_turn_finds_the_last_one_prompt_and_answer():
    llm = engine()
    first = llm.generate(prompt(20), greedy(10))[0]
    tokens = prompt(20) + tokens_of(first) + prompt(10, seed=1)
    second = llm.generate(tokens, greedy(10))[0]
    assert second.num_cached_tokens == 29 // 4 * 4
    assert tokens_of(second) == alone(tokens, greedy(10))
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_d2_requests_preempted_again_and_again_give_what_they_give_alone(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    prompts = [prompt(12, seed) for seed in range(5)]  # of 18 pages each, in a pool of 24
    params = greedy(60)
    outputs = llm.generate(prompts, params)
    assert llm.stats()["preemptions"] >= 3
    assert llm.stats()["generated_tokens"] == 5 * 60
    for tokens, output in zip(prompts, outputs):
        assert tokens_of(output) == alone(tokens, params)
    assert_baseline(llm)


def test_d3_seeded_samples_are_the_same_preempted_in_a_batch_or_alone():
    params = jp.SamplingParams(temperature=1, seed=7, max_tokens=60)
    llm = engine()
    prompts = [prompt(12, seed) for seed in range(5)]
    outputs = llm.generate(prompts, params)
    assert llm.stats()["preemptions"] > 0
    for tokens, output in zip(prompts, outputs):
        assert tokens_of(output) == alone(tokens, params)
    other = jp.SamplingParams(temperature=1, seed=8, max_tokens=60)
    assert alone(prompts[0], other) != tokens_of(outputs[0])


def test_requests_without_a_seed_differ_and_repeat_with_the_engine():
    params = jp.SamplingParams(temperature=1, max_tokens=20)
    runs = [[tokens_of(o) for o in engine(seed=seed).generate([prompt(5)] * 3, params)] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0] + runs[2]}) == 6


def test_greedy_rows_do_not_change_beside_sampled_ones():
    llm = engine()
    params = [greedy(10, logprobs=0), jp.SamplingParams(temperature=1, seed=1, max_tokens=10)] * 2
    prompts = [prompt(6, seed) for seed in range(4)]
    outputs = llm.generate(prompts, params)
    for tokens, options, output in zip(prompts, params, outputs):
        assert tokens_of(output) == alone(tokens, options)
    assert outputs[1].outputs[0].logprobs is None
    assert len(outputs[0].outputs[0].logprobs) == 10


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "shared": st.sampled_from([0, 0, 3, 8, 17]),
            "own": st.integers(1, 24),
            "max_tokens": st.sampled_from([1, 4, 20]),
            "temperature": st.sampled_from([0.0, 1.0]),
            "steps": st.integers(0, 4),
        }
    ),
    min_size=2,
    max_size=8,
)


@hypothesis.settings(max_examples=max(24, hypothesis.settings.default.max_examples // 4))
@hypothesis.given(
    sizes=st.sampled_from(SIZES),
    requests=REQUESTS,
    prefill=st.booleans(),
    prefix_cache=st.sampled_from([True, True, False]),
    partial_hits=st.booleans(),
    schedule=st.sampled_from(["lpm", "fcfs"]),
)
def test_g3_any_run_gives_each_request_what_it_gives_alone(
    sizes: dict[str, Any], requests: list[dict[str, Any]], **options: Any
):
    llm = engine_of(sizes, **options)
    expected = {}
    for i, request in enumerate(requests):
        tokens = prompt(request["shared"]) + prompt(request["own"], seed=i % 3 + 1)
        params = jp.SamplingParams(temperature=request["temperature"], seed=i, max_tokens=request["max_tokens"])
        expected[llm.add_request(tokens, params)] = alone(tokens, params, **sizes)
        for _ in range(request["steps"]):
            for output in llm.step():
                assert tokens_of(output) == expected[output.request_id][: len(tokens_of(output))]
                if output.finished:
                    assert tokens_of(output) == expected.pop(output.request_id)
    for request_id, outputs in drive(llm).items():
        assert tokens_of(outputs[-1]) == expected.pop(request_id)
    assert not expected
    assert_baseline(llm)


# --- One program a bucket, one pool ---


@contextmanager
def real_compilations() -> Iterator[list[str]]:
    """The programs that XLA compiles, whoever asked for them."""
    found: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(details))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("num_tokens", [21, 32])
def test_prompts_whose_pages_are_all_cached_go_on_several_tokens_a_call(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
):
    monkeypatch.setattr(buckets, "_MAX_REREAD", 8)  # tokens of KV, which such rows read in any program
    llm = engine()
    prompts = [prompt(num_tokens, seed=seed) for seed in range(2)]
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(9))
        assert [tokens_of(output) for output in outputs] == [alone(tokens, greedy(9)) for tokens in prompts]
    assert all(output.num_cached_tokens == num_tokens - 1 for output in outputs)
    with llm.prefill(prompts[0]) as branch:
        assert tokens_of(branch.generate(greedy(9))) == alone(prompts[0], greedy(9))
    assert_baseline(llm)


def test_a_step_that_fails_gives_the_pool_back_before_another_is_made(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    request_id = llm.add_request(prompt(20), greedy(9))
    llm.step()
    pool = llm._cache.kv_pages
    with monkeypatch.context() as patch:
        patch.setattr(llm._scheduler, "commit", lambda plan, result: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    lost = llm._cache.kv_pages
    assert all(layer.is_deleted() for layer in (*pool, *lost))
    with monkeypatch.context() as patch:
        patch.setattr("jax_paged.cache.init_cache", lambda *_: {}["no memory"])
        with pytest.raises(KeyError, match="no memory"):
            llm.check()
    llm.check()
    assert tokens_of(drive(llm)[request_id][-1]) == alone(prompt(20), greedy(9))
    assert_baseline(llm)


def test_check_finds_a_page_of_the_tree_that_holds_other_tokens():
    llm = engine()
    llm.generate(prompt(20), greedy(3))
    llm.check()
    (page, *_) = llm.tree.pages()
    llm._cache = llm._cache.replace(tokens=llm._cache.tokens.at[page, 1].add(1))
    with pytest.raises(jp.InvariantError, match=f"page {page} is held for tokens that are not those"):
        llm.check()


def test_where_the_model_gives_nan_a_request_ends_with_an_error_and_others_go_on():
    weights = dict(tiny.weights())
    weights["embed"] = weights["embed"].copy()
    weights["embed"][7] = np.nan
    llm = tiny.engine(model=Llama(tiny.CONFIG, weights), plain=True)
    bad, good = [3, 7, 5, 9, 2], [token for token in prompt(20) if token != 7]
    for params in (greedy(9), jp.SamplingParams(temperature=1, seed=1, max_tokens=9, logprobs=2)):
        ended, other = llm.generate([bad, good], params)
        (sample,) = ended.outputs
        assert sample.finish_reason == "error:the model's logits are not numbers (NaN)"
        assert (sample.token_ids, sample.logprobs or []) == ([], [])
        assert tokens_of(other) == alone(good, params)
    (event,) = llm.stream(bad, greedy(3))
    assert (event.text, event.token_id, event.output.finished) == ("", None, True)
    ended, other = llm.beam_search([bad, good], beam_width=2, max_tokens=3)
    assert [sample.finish_reason for sample in ended.outputs] == ["error:the model's logits are not numbers (NaN)"]
    assert [sample.token_ids for sample in other.outputs] == [beam for beam, _ in tiny.beams(good, 2, 3)]
    assert_baseline(llm)


def test_text_with_a_token_that_the_model_has_no_embedding_for_is_refused():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer._backend.add_special_tokens(["<pad>"])
    llm = engine(tokenizer=tokenizer)
    assert tokenizer.encode("ab<pad>")[-1] == 61
    with pytest.raises(jp.RequestError, match=r"the text has token 61 in it, .*0 <= id < 61"):
        llm.generate("ab<pad>", greedy(3))
    assert_baseline(llm)


def test_the_tokenizers_end_tokens_end_a_text_as_the_models_do():
    expected = alone(prompt(9), greedy(9))
    end = expected[3]
    llm = engine(tokenizer=Tokenizer(tiny.tokenizer()._backend, eos_token_ids=(end,)))
    (output,) = llm.generate(prompt(9), greedy(9))
    assert tokens_of(output) == expected[: expected.index(end) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert tokens_of(llm.generate(prompt(9), greedy(9, ignore_eos=True))[0]) == expected


def test_without_a_dtype_the_cache_has_that_of_the_weights():
    loaded = LoadedModel(tiny.CONFIG, tiny.weights(), None, "tiny")
    for model in (loaded, tiny.model()):
        assert jp.LLM(model, **tiny.SIZES).spec.dtype == np.float32
    with pytest.raises(ValueError, match="dtype='bfloat16' of a model that was loaded in float32"):
        jp.LLM(loaded, dtype="bfloat16", **tiny.SIZES)


@pytest.mark.parametrize(("policy", "kept"), [("lru", 1), ("fifo", 2), ("lfu", 1)])
def test_the_eviction_policy_says_which_prefix_goes(policy: str, kept: int):
    llm = engine(eviction_policy=policy)
    for seed in (1, 2, 1):  # of 24 pages each takes 8 in the tree; the first is the older one, and used once more
        llm.generate(prompt(33, seed), greedy(1))
    llm.generate(prompt(41, 3), greedy(1))
    cached = [llm.generate(prompt(33, seed), greedy(1))[0].num_cached_tokens for seed in (kept, 3 - kept)]
    assert cached[0] == 32 > cached[1]


def test_new_weights_count_from_the_next_request_on_and_old_prefixes_do_not():
    llm = engine()
    before = tokens_of(llm.generate(prompt(20), greedy(9))[0])
    other = LoadedModel(tiny.CONFIG, random_weights(tiny.CONFIG, seed=2), None, "tiny")
    llm.add_request(prompt(5), greedy(3))
    llm.step()
    with pytest.raises(jp.RequestError, match="cannot change while sequences run"):
        llm.update_weights(other)
    drive(llm)
    compiled = llm.stats()["compilations"]
    llm.update_weights(other)
    (output,) = llm.generate(prompt(20), greedy(9))
    assert tokens_of(output) != before
    assert output.num_cached_tokens == 0
    llm.update_weights(tiny.model())
    assert tokens_of(llm.generate(prompt(20), greedy(9))[0]) == before
    assert llm.stats()["compilations"] == compiled
    larger = replace(tiny.CONFIG, intermediate_size=64)
    with pytest.raises(ValueError, match=r"no weights for this engine's model: .* stands where"):
        llm.update_weights(LoadedModel(larger, random_weights(larger, seed=1), None, "larger"))
    assert_baseline(llm)


def test_stats_tell_how_many_run_wait_and_are_held():
    llm = engine()
    with llm.prefill(prompt(5)):
        for seed in range(6):
            llm.add_request(prompt(5, seed), greedy(9))
        llm.step()
        assert [llm.stats()[name] for name in ("running", "waiting", "held")] == [4, 2, 1]
    llm.close()
    assert [llm.stats()[name] for name in ("running", "waiting", "held")] == [0, 0, 0]


def test_nothing_compiles_after_warmup(monkeypatch: pytest.MonkeyPatch):
    # What other tests have compiled would serve this engine, warm or not.
    monkeypatch.setattr("jax_paged.engine.run_step", jit_step())
    llm = engine(debug_checks=False)
    llm.warmup()
    before = llm.stats()["compilations"]
    rng = np.random.default_rng(0)
    with real_compilations() as compiled:
        for i in range(200):
            params = jp.SamplingParams(
                temperature=float(i % 2), max_tokens=int(rng.integers(1, 20)), logprobs=0 if i % 3 else None,
                logit_bias={} if i % 7 else {5: 1.0},
            )  # fmt: skip
            llm.add_request(prompt(int(rng.integers(0, 20))) + prompt(int(rng.integers(1, 50)), seed=i), params)
            llm.step()
        drive(llm)
        llm.check()
        llm.reset_prefix_cache()
        llm.check()
    assert compiled == []
    assert llm.stats()["compilations"] == before
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["evicted_pages"] > 0
    assert_baseline(llm)


@pytest.mark.parametrize("bucket", [0, -1], ids=["decode", "mixed"])
def test_the_compiled_step_holds_one_pool(bucket: int):
    llm = engine()
    bucket = llm._buckets.sizes[bucket]._replace(plain=True)
    spec = replace(llm.spec, num_pages=20_000)
    commands = pack_commands(Commands(), llm._capacity, spec.num_pages, spec.max_seqs)
    inputs = pack_inputs(StepPlan([], [], Commands()), commands, bucket, spec.max_seqs)
    cache = jax.eval_shape(lambda: jp.init_cache(spec))
    memory = run_step.lower(llm._shape, llm._weights, cache, inputs, bucket).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= spec.pool_bytes
    assert memory.temp_size_in_bytes < spec.pool_bytes / 20


def test_g2_a_step_writes_only_to_the_slots_of_its_tokens():
    llm = engine(debug_checks=False, num_pages=24)
    llm.generate([prompt(9, seed=1), prompt(14, seed=2)], greedy(3))  # leaves pages in the tree
    llm.add_request(prompt(5, seed=3), greedy(20))
    llm.add_request(prompt(9, seed=4), greedy(20))
    for _ in range(8):
        before = [np.array(layer) for layer in llm._cache.kv_pages]
        lengths = {seq: seq.num_computed for seq in llm._scheduler.running}
        llm.step()
        untouched = np.ones((llm.spec.num_pages, llm.spec.page_size), bool)
        for seq in llm._scheduler.running:
            for position in range(lengths.get(seq, 0), seq.num_computed):
                untouched[seq.pages[position // 4], position % 4] = False
        assert 0 < (~untouched).sum() <= 16
        for old, new in zip(before, llm._cache.kv_pages):
            np.testing.assert_array_equal(old[untouched], np.asarray(new)[untouched])


# --- Abort, streams, and engines that are closed ---


@pytest.mark.parametrize("decode_steps_per_call", [1, None])
def test_e2_no_page_that_is_held_when_a_call_begins_is_handed_out_in_it(
    decode_steps_per_call: int | None, monkeypatch: pytest.MonkeyPatch
):
    # In a call of several steps the short ones end long before the long one takes its last page.
    llm = tiny.engine(decode_steps_per_call=decode_steps_per_call, prefix_cache=False)
    ended_with_pages_taken_after = 0
    dispatch = llm._dispatch

    def watched(plan, bucket):
        nonlocal ended_with_pages_taken_after
        held = {page for seq in llm._scheduler.running for page in seq.pages}
        result = dispatch(plan, bucket)
        taken = result.taken[result.taken < llm.spec.num_pages]
        assert len(set(taken.tolist())) == len(taken)
        assert not held & set(taken.tolist())
        ended_with_pages_taken_after += any(row.seq.num_left < plan.num_steps for row in plan.rows) and len(taken)
        return result

    monkeypatch.setattr(llm, "_dispatch", watched)
    lengths = [2, 20, 3, 5]
    outputs = llm.generate([prompt(6, seed=i) for i in range(4)], [greedy(length) for length in lengths])
    assert [output.outputs[0].token_ids for output in outputs] == [
        alone(prompt(6, seed=i), greedy(length)) for i, length in enumerate(lengths)
    ]
    if decode_steps_per_call is None:
        assert ended_with_pages_taken_after
    assert_baseline(llm)


@pytest.mark.parametrize("phase", ["queued", "between chunks", "decoding", "one token before the end", "after the end"])
def test_e1_abort_gives_one_last_output_and_leaves_the_others_alone(phase: str):
    llm = engine(max_seqs=4)
    neighbour = llm.add_request(prompt(6, seed=1), greedy(30))
    victim = llm.add_request(prompt(40, seed=2), greedy(6))
    request = llm._requests[victim]
    (seq,) = request.sequences
    is_phase = {
        "queued": lambda: True,
        "between chunks": lambda: 0 < seq.num_computed < 40,
        "decoding": lambda: seq.num_outputs == 2,
        "one token before the end": lambda: seq.num_outputs == 5,
        "after the end": lambda: request.finished,
    }[phase]
    seen: list[jp.RequestOutput] = []
    while not is_phase():
        seen += llm.step()
    for _ in range(2):
        llm.abort(victim)
    llm.check()
    outputs = seen + [output for more in drive(llm).values() for output in more]
    (last,) = (output for output in outputs if output.request_id == victim and output.finished)
    assert last.outputs[0].finish_reason == ("length" if phase == "after the end" else "abort")
    assert tokens_of(last) == alone(prompt(40, seed=2), greedy(6))[: seq.num_outputs]
    assert last.times.finished_s is not None
    (other,) = (output for output in outputs if output.request_id == neighbour and output.finished)
    assert tokens_of(other) == alone(prompt(6, seed=1), greedy(30))
    assert_baseline(llm)


def test_aborting_what_was_never_there_does_nothing():
    llm = engine()
    llm.abort(12345)
    assert not llm.has_unfinished()
    assert llm.step() == []


def test_a_stream_yields_every_token_once():
    llm = engine()
    events = list(llm.stream(prompt(20), greedy(9)))
    assert [event.token_id for event in events] == alone(prompt(20), greedy(9))
    assert [event.output.finished for event in events] == [False] * 8 + [True]
    assert events[-1].output.outputs[0].finish_reason == "length"
    assert_baseline(llm)


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_a_stream_closed_early_ends_its_request(num_events: int):
    llm = engine()
    stream = llm.stream(prompt(20), greedy(9))
    for _ in range(num_events):
        next(stream)
    stream.close()
    assert not llm.has_unfinished()
    assert_baseline(llm)


def test_streams_read_in_turn_each_yield_every_token_once():
    llm = engine()
    prompts = [prompt(length, seed=length) for length in (3, 20, 9)]
    streams = [llm.stream(tokens, greedy(4 + i)) for i, tokens in enumerate(prompts)]
    events: list[list[jp.StreamEvent]] = [[], [], []]
    while any(live := [next(stream, None) for stream in streams]):
        for seen, event in zip(events, live):
            seen += [event] if event else []
    for i, tokens in enumerate(prompts):
        assert [event.token_id for event in events[i]] == alone(tokens, greedy(4 + i))
        assert events[i][-1].output.finished
    assert_baseline(llm)


@pytest.mark.parametrize("num_events", [1, 2])
def test_a_stream_whose_request_is_aborted_ends_with_that(num_events: int):
    llm = engine()
    stream = llm.stream(prompt(20), greedy(9))
    events = [next(stream) for _ in range(num_events)]
    llm.abort(events[0].output.request_id)
    events += stream
    expected = alone(prompt(20), greedy(9))[:num_events]
    assert [event.token_id for event in events] == [*expected, None]
    assert events[-1].output.outputs[0].finish_reason == "abort"
    assert tokens_of(events[-1].output) == expected
    assert not llm.has_unfinished()
    assert_baseline(llm)


def test_a_stream_aborted_before_its_first_token_ends_with_that():
    llm = engine()
    stream = llm.stream(prompt(60), greedy(9))
    others = llm.stream(prompt(5, seed=1), greedy(9))
    next(others)
    for request_id in list(llm._requests):  # the second alone has been started
        llm.abort(request_id)
    assert [event.token_id for event in others] == [None]
    assert [event.token_id for event in stream] == alone(prompt(60), greedy(9))
    assert_baseline(llm)


def test_a_stream_goes_on_when_someone_else_runs_the_steps():
    llm = engine()
    stream = llm.stream(prompt(20), greedy(9))
    events = [next(stream)]
    while llm.has_unfinished():
        assert llm.step() == []
    events += stream
    assert [event.token_id for event in events] == alone(prompt(20), greedy(9))
    assert_baseline(llm)


def test_step_leaves_the_outputs_of_generate_for_it(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    other = llm.add_request(prompt(5, seed=1), greedy(4))
    advance, seen = llm._advance, []

    def advance_and_step(max_steps: int) -> None:  # as another thread might, between two steps
        advance(max_steps)
        with monkeypatch.context() as patch:
            patch.setattr(llm, "_advance", lambda max_steps: None)
            seen.extend(llm.step())

    monkeypatch.setattr(llm, "_advance", advance_and_step)
    assert tokens_of(llm.generate(prompt(9), greedy(6))[0]) == alone(prompt(9), greedy(6))
    assert {output.request_id for output in seen} == {other}
    assert tokens_of(seen[-1]) == alone(prompt(5, seed=1), greedy(4))
    assert not llm.has_unfinished()
    assert_baseline(llm)


def test_generate_leaves_the_outputs_of_others_for_step():
    llm = engine()
    other = llm.add_request(prompt(5, seed=1), greedy(3))
    llm.generate(prompt(5), greedy(20))
    assert llm.has_unfinished()
    (output,) = llm.step()
    assert output.request_id == other
    assert output.finished
    assert tokens_of(output) == alone(prompt(5, seed=1), greedy(3))
    assert not llm.has_unfinished()


def test_outputs_are_made_for_those_who_read_them(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    made: list[int] = []
    output_of = llm._output
    monkeypatch.setattr(llm, "_output", lambda request: made.append(request.request_id) or output_of(request))
    outputs = llm.generate([prompt(5), prompt(9, seed=1)], greedy(20))
    assert sorted(made) == [output.request_id for output in outputs]
    made.clear()
    events = list(llm.stream(prompt(5), greedy(20)))
    assert len(made) == len(events) == 20
    made.clear()
    llm.add_request(prompt(5), greedy(20))
    (outputs,) = drive(llm).values()
    assert len(made) == len(outputs) == 20


def test_an_output_stays_as_it_is_while_its_request_goes_on():
    llm = engine()
    params = greedy(12, logprobs=2, n=2)
    llm.add_request(prompt(9), params)
    seen: list[tuple[jp.RequestOutput, jp.RequestOutput]] = []
    while llm.has_unfinished():
        seen += [(output, copy.deepcopy(output)) for output in llm.step()]
    assert len(seen) == 12
    for num_tokens, (output, before) in enumerate(seen, 1):
        assert output == before
        for sample in output.outputs:
            assert len(sample.token_ids) == len(sample.logprobs) == len(sample.top_logprobs) == num_tokens
            assert sample.cumulative_logprob == pytest.approx(sum(sample.logprobs))
    assert len({id(output.prompt_token_ids) for output, _ in seen}) == 1


@pytest.mark.parametrize("prefill", [False, True])
def test_what_waits_is_counted_only_while_no_prefill_is_compiled(monkeypatch: pytest.MonkeyPatch, prefill: bool):
    llm = engine(prefill=prefill)
    counts: list[int] = []
    num_pending = llm._scheduler.num_pending
    monkeypatch.setattr(llm._scheduler, "num_pending", lambda: counts.append(num_pending()) or counts[-1])
    llm.generate([prompt(5, seed=i) for i in range(8)], greedy(4))
    assert counts[:1] == ([] if prefill else [8 * 5])


def test_leaving_a_with_block_ends_everything():
    with engine() as llm:
        for seed in range(6):
            llm.add_request(prompt(20, seed), greedy(30))
        for _ in range(4):
            llm.step()
    assert not llm.has_unfinished()
    assert_baseline(llm)


@pytest.mark.parametrize("after_the_step", [False, True])
def test_ctrl_c_ends_what_generate_runs_and_loses_no_page(monkeypatch: pytest.MonkeyPatch, after_the_step: bool):
    llm = engine()
    other = llm.add_request(prompt(5, seed=1), greedy(30))
    dispatch = llm._dispatch

    def interrupted(plan: StepPlan, bucket: Bucket) -> StepResult:
        if llm.stats()["steps"] < 6:
            return dispatch(plan, bucket)
        if after_the_step:
            dispatch(plan, bucket)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(30, seed) for seed in range(2, 8)], greedy(20))
    monkeypatch.undo()
    llm.check()
    assert list(llm._requests) == [other]
    outputs = drive(llm)
    assert list(outputs) == [other]
    assert tokens_of(outputs[other][-1]) == alone(prompt(5, seed=1), greedy(30))
    assert_baseline(llm)


@pytest.mark.parametrize("place", ["plan", "_book_pages", "_book_token", "_finish"])
def test_ctrl_c_inside_a_step_waits_for_its_end_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, place: str):
    llm = engine()
    first = llm.add_request(prompt(20), greedy(2))
    second = llm.add_request(prompt(5, seed=1), greedy(9))
    method = getattr(llm._scheduler, place)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return method(*arguments)

    outputs: dict[int, list[jp.RequestOutput]] = {}
    interrupts = 0
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(llm._scheduler, place, interrupted)
        while llm.has_unfinished():
            try:
                for output in llm.step():
                    outputs.setdefault(output.request_id, []).append(output)
            except KeyboardInterrupt:
                interrupts += 1
                llm.check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert interrupts == 1
    for request, tokens, most in ((first, prompt(20), 2), (second, prompt(5, seed=1), 9)):
        assert tokens_of(outputs[request][-1]) == alone(tokens, greedy(most))
    assert llm.stats()["preemptions"] == 0
    assert llm.stats()["computed_prefill_tokens"] == 25  # nothing was computed again
    assert_baseline(llm)


def test_a_callback_that_calls_the_engine_is_told_not_to():
    def on_event(event: jp.CacheEvent) -> None:
        for call in (
            lambda: llm.add_request(prompt(3)),
            llm.step,
            lambda: llm.abort(request),
            llm.reset_prefix_cache,
            llm.check,
            llm.warmup,
        ):
            with pytest.raises(jp.RequestError, match="in the middle of a step: on_cache_event"):
                call()
        events.append(event.kind)

    events: list[str] = []
    llm = engine(on_cache_event=on_event)
    request = llm.add_request(prompt(20), greedy(4))
    outputs = drive(llm)
    assert "stored" in events
    assert tokens_of(outputs[request][-1]) == alone(prompt(20), greedy(4))
    assert_baseline(llm)


def test_what_is_refused_while_the_engine_is_busy_leaves_nothing_behind():
    llm = engine()
    branch = llm.prefill(prompt(20))
    llm._is_busy = True  # as in another thread's step
    for call in (
        lambda: next(llm.stream(prompt(3))),
        lambda: llm.generate(prompt(3)),
        lambda: llm.add_request(prompt(3)),
        lambda: branch.logprobs([1]),
    ):
        with pytest.raises(jp.RequestError, match="in the middle of a step"):
            call()
    llm._is_busy = False
    assert not llm._streams
    assert not llm.has_unfinished()
    assert len(branch.logprobs([1])) == 1
    branch.close()
    assert_baseline(llm)


def test_ctrl_c_as_a_score_begins_leaves_no_page_held(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    branch = llm.prefill(prompt(20))
    share = llm._scheduler.share

    def interrupted(*arguments: Any) -> None:
        share(*arguments)
        signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(llm._scheduler, "share", interrupted)
        with pytest.raises(KeyboardInterrupt):
            branch.logprobs([1])
        with pytest.raises(KeyboardInterrupt):
            branch.fork()
    finally:
        signal.signal(signal.SIGINT, handler)
    branch.close()
    gc.collect()
    llm.generate(prompt(3), greedy(1))
    assert not llm._scheduler.held
    assert_baseline(llm)


def test_a_stream_collected_in_the_middle_of_a_step_ends_its_request():
    llm = engine(on_cache_event=lambda event: streams.clear())
    streams = [llm.stream(prompt(5, seed=1), greedy(40))]
    next(streams[0])
    outputs = llm.generate(prompt(20), greedy(4))
    assert not streams
    assert tokens_of(outputs[0]) == alone(prompt(20), greedy(4))
    llm.add_request(prompt(3), greedy(2))
    drive(llm)
    assert not llm._requests
    assert_baseline(llm)


# --- Namespaces, weights, counters ---


def test_f1_namespaces_share_no_pages():
    llm = engine()
    cached = [
        llm.generate(prompt(20), greedy(4), namespace=name)[0].num_cached_tokens for name in ("a", "b", "a", None)
    ]
    assert cached == [0, 0, 19, 0]
    assert_baseline(llm)


def test_f2_the_prefix_cache_is_not_reset_while_pages_are_in_use():
    llm = engine()
    llm.generate(prompt(20), greedy(4))
    llm.add_request(prompt(20), greedy(4))
    llm.step()
    before = llm.stats()
    assert llm.reset_prefix_cache() is False
    assert llm.stats() == before
    drive(llm)
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt(20), greedy(4))[0].num_cached_tokens == 0
    assert_baseline(llm)


def test_without_a_prefix_cache_nothing_is_kept():
    llm = engine(prefix_cache=False)
    for _ in range(2):
        assert llm.generate(prompt(20), greedy(4))[0].num_cached_tokens == 0
    assert llm.tree is None
    assert llm.stats()["free_pages"] == 24


def test_stats_add_up_at_every_step():
    llm = engine()
    for seed in range(6):
        llm.add_request(prompt(18, seed % 3), greedy(25))
    while llm.has_unfinished():
        llm.step()
        stats = llm.stats()
        assert stats["free_pages"] + stats["tree_pages"] + stats["private_pages"] == stats["num_pages"] == 24
        assert min(stats.values()) >= 0
    assert stats["query_tokens"] == 6 * 18
    assert stats["generated_tokens"] == 6 * 25


def test_times_come_from_the_clock_given():
    ticks = iter(range(1000))
    llm = engine(clock=lambda: float(next(ticks)))
    times = llm.generate(prompt(20), greedy(3))[0].times
    assert times.arrival_s < times.first_scheduled_s < times.first_token_s < times.finished_s


# --- Ends and limits ---


def test_stop_tokens_end_a_request_and_ignored_ones_do_not():
    tokens = alone(prompt(9), greedy(20))
    stop = tokens[5]
    end = tokens.index(stop) + 1
    llm = engine()
    output = llm.generate(prompt(9), greedy(20, stop_token_ids=[stop]))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (tokens[:end], "stop")


def test_a_sequence_may_fill_the_model_length_and_the_pool_exactly():
    llm = engine()
    output = llm.generate(prompt(95), greedy(None))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    output = llm.generate(prompt(60), greedy(None))[0].outputs[0]
    assert len(output.token_ids) == 36
    assert output.token_ids == alone(prompt(60), greedy(36))
    assert_baseline(llm)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"the prompt \[\] has no tokens; give at least one"),
        ([1, 61], r"61 is not a token id of this model: 0 <= id < 61"),
        ([-1], r"-1 is not a token id of this model"),
        ([1.5], r"1.5 is not a token id of this model"),
        ("text", r"text needs a tokenizer"),
        (
            list(range(60)) + list(range(36)),
            r"a prompt of 96 tokens leaves no room to generate: .*max_model_len=96 .*24 of the pool's 24 pages of 4.*"
            r"shorten it, or raise max_model_len or num_pages",
        ),
    ],
)
def test_h1_a_prompt_that_can_never_run_is_refused_and_the_queue_goes_on(tokens: Any, message: str):
    llm = engine()
    other = llm.add_request(prompt(5), greedy(3))
    llm.step()
    before = llm.stats()
    with pytest.raises(jp.RequestError, match=message):
        llm.add_request(tokens)
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt(5), tokens])
    with pytest.raises(ValueError, match=message):
        llm.stream(tokens)
    assert llm.stats() == before
    assert list(drive(llm)) == [other]
    assert_baseline(llm)


def test_generate_wants_as_many_params_as_prompts():
    llm = engine()
    for params, message in (
        ([greedy()], "1 SamplingParams for 2 prompts"),
        ([], "0 SamplingParams for 2 prompts"),
        ({}, r"params=\{\} must be SamplingParams, a list of them"),
        ([greedy(), 1], "params=1 must be SamplingParams"),
    ):
        with pytest.raises(jp.RequestError, match=message):
            llm.generate([prompt(3), prompt(4)], params)
    assert llm.generate([prompt(3)], [None])[0].outputs[0].finish_reason == "length"


def test_generate_takes_one_prompt_or_several_as_lists_or_arrays():
    llm = engine()
    expected = alone(prompt(5), greedy(2))
    for given in (prompt(5), [prompt(5)], np.array(prompt(5)), np.array([prompt(5)]), [np.array(prompt(5), np.uint8)]):
        (output,) = llm.generate(given, greedy(2))
        assert tokens_of(output) == expected
    assert llm.generate([], greedy(2)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, r"page_size=0 must be an integer of at least 1"),
        ({"max_seqs": 0}, r"max_seqs=0 must be an integer of at least 1"),
        ({"max_batch_tokens": 0}, r"max_batch_tokens=0 must be an integer of at least 1"),
        ({"num_pages": 0}, r"num_pages=0 must be an integer of at least 1, or None"),
        ({"page_size": "16"}, r"page_size='16' must be an integer of at least 1"),
        ({"max_seqs": None}, r"max_seqs=None must be an integer of at least 1"),
        ({"max_batch_tokens": 10.5}, r"max_batch_tokens=10.5 must be an integer"),
        ({"max_model_len": 97.5}, r"max_model_len=97.5 must be an integer of at least 1, or None"),
        ({"decode_steps_per_call": 1.5}, r"decode_steps_per_call=1.5 must be an integer of at least 1, or None"),
        ({"seed": None}, r"seed=None must be an integer of at least 0"),
        ({"exact": "no"}, r"exact='no' must be True or False"),
        ({"eviction_policy": "mru", "prefix_cache": False}, r"policy='mru' is not one of lru, lfu, fifo"),
        ({"prefix_cache": "off"}, r"prefix_cache='off' must be True or False"),
        ({"partial_hits": 2}, r"partial_hits=2 must be True or False"),
        ({"on_cache_event": 1}, r"on_cache_event=1 must be a function, or None"),
        ({"clock": 1}, r"clock=1 must be a function"),
        ({"tokenizer": "x"}, r"tokenizer='x' must be a jax_paged Tokenizer, or None"),
        ({"page_size": 10**9, "num_pages": None}, r"not even one page of 1,000,000,000 tokens.*lower page_size"),
        ({"max_batch_tokens": 3}, r"max_batch_tokens=3 must be at least max_seqs=4"),
        ({"schedule": "random"}, r"schedule='random' is not one of lpm, fcfs"),
        ({"max_model_len": 257}, r"max_model_len=257 must be from 2 to the model's 256 tokens"),
        (
            {"max_model_len": 97},
            r"a pool of 24 pages of 4 holds 96 tokens, less than max_model_len=97; raise num_pages to 25",
        ),
        ({"num_pages": 10**11}, r"a pool of 100,000,000,000 pages takes .* GiB, .* GiB are free; at most num_pages="),
        ({"num_pages": 1, "page_size": 1, "max_model_len": None}, r"holds 1 token; it must hold at least 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        engine(**options)


@pytest.mark.parametrize("model", [None, 5, b"x", object()])
def test_a_model_that_is_none_is_refused(model: Any):
    with pytest.raises(ValueError, match=r"must be a model's name or path"):
        jp.LLM(model)


def test_a_model_may_be_given_as_a_path():
    with pytest.raises(jp.ModelError, match=r"there is no model 'nowhere/model.gguf'"):
        jp.LLM(Path("nowhere/model.gguf"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(np.int64(5)), r"5\)? is neither text nor a list of token ids"),
        (lambda llm: llm.generate(np.array(5)), r"array\(5\) is neither text nor a list of token ids"),
        (lambda llm: llm.generate({3, 1}), r"\{1, 3\} is neither text nor a list of token ids"),
        (lambda llm: llm.generate(b"abc"), r"b'abc' is neither text nor a list of token ids"),
        (lambda llm: llm.generate([True, 1]), r"True is not a token id of this model"),
        (lambda llm: llm.generate([None]), r"None is not a token id of this model"),
        (lambda llm: llm.generate(prompt(3), 5), r"params=5 must be SamplingParams, a list of them, or None"),
        (lambda llm: llm.add_request(prompt(3), priority="high"), r"priority='high' must be an integer"),
        (lambda llm: llm.prefill(prompt(3)).extend(5), r"5 is neither text nor a list of token ids"),
        (lambda llm: llm.prefill(prompt(3)).generate({}), r"params=\{\} must be SamplingParams"),
        (lambda llm: llm.prefill(prompt(3)).fork_with(99), r"99 is not a token id of this model"),
        (lambda llm: llm.beam_search(prompt(3), beam_width="4"), r"beam_width='4' must be an integer"),
        (lambda llm: llm.beam_search(prompt(3), beam_width=2.5), r"beam_width=2.5 must be an integer"),
        (lambda llm: llm.beam_search(prompt(3), max_tokens=None), r"max_tokens=None must be an integer"),
        (lambda llm: llm.beam_search(prompt(3), length_penalty=1e9), r"length_penalty=1000000000.0 must be a number"),
        (lambda llm: llm.beam_search(prompt(3), length_penalty=float("nan")), r"length_penalty=nan must be a number"),
        (lambda llm: llm.beam_search(prompt(3), length_penalty="x"), r"length_penalty='x' must be a number"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told_by_name(call: Callable[[jp.LLM], object], message: str):
    llm = engine()
    with pytest.raises(ValueError, match=message):
        call(llm)
    gc.collect()
    assert_baseline(llm)


def test_jax_arrays_and_their_numbers_are_token_ids():
    llm = engine()
    expected = alone(prompt(5), greedy(2))
    array = jax.numpy.array(prompt(5))
    for given in (array, list(array), [array]):
        assert tokens_of(llm.generate(given, greedy(2))[0]) == expected
    with llm.prefill(array[:3]) as branch:
        branch.extend(array[3:])
        assert branch.generate(greedy(2)).outputs[0].token_ids == expected
        assert len(branch.logprobs(array)) == 5
    assert tokens_of(llm.generate(prompt(5), [greedy(2)])[0]) == expected


def test_a_pool_without_a_size_holds_the_longest_sequences_there_can_be():
    llm = engine(num_pages=None, max_model_len=None)
    assert llm.max_model_len == 256
    assert llm.stats()["num_pages"] == 4 * 256 // 4


def test_a_pool_in_a_format_of_its_own_is_the_same_pool(monkeypatch: pytest.MonkeyPatch):
    expected = [alone(prompt(9), greedy(8)), alone(prompt(14, 1), greedy(8))]
    # As on a TPU; on a CPU, row-major is what it is anyway.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    row_major = Format(Layout(major_to_minor=(0, 1, 2, 3)), here)
    monkeypatch.setattr("jax_paged.engine.pool_format", lambda device: row_major)
    llm = engine(prefill=False)
    outputs = llm.generate([prompt(9), prompt(14, seed=1)], greedy(8))
    assert [tokens_of(output) for output in outputs] == expected
    assert llm.stats()["compilations"] == 1
    assert all(layer.format.layout.major_to_minor == (0, 1, 2, 3) for layer in llm._cache.kv_pages)
    assert_baseline(llm)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "dtype", "rows", "lanes"),
    [(8, 128, "bfloat16", 16, 128), (3, 64, "bfloat16", 8, 128), (5, 80, "float32", 16, 128), (1, 256, "int8", 4, 256)],
)
def test_pages_in_a_tpus_memory_fill_whole_tiles(num_kv_heads: int, head_dim: int, dtype: str, rows: int, lanes: int):
    spec = jp.CacheSpec(
        num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, num_pages=3, page_size=16, max_seqs=1,
        max_pages_per_seq=3, dtype=dtype,
    )  # fmt: skip
    assert page_bytes(spec, "tpu") == 2 * 16 * rows * lanes * np.dtype(spec.dtype).itemsize
    assert page_bytes(spec, "gpu") == page_bytes(spec, "cpu") == spec.page_bytes
    assert pool_format(jax.devices()[0]) is None


def test_check_finds_a_page_that_was_lost():
    llm = engine()
    llm.generate(prompt(20), greedy(4))
    llm._cache = llm._cache.replace(ref_counts=llm._cache.ref_counts.at[3].add(1))
    with pytest.raises(jp.InvariantError, match="3"):
        llm.check()


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hi"}, ["hi"], [{"content": "hi"}], None, 7])
def test_what_is_no_list_of_messages_is_refused(messages: Any):
    llm = engine(tokenizer=tiny.tokenizer())
    with pytest.raises(jp.RequestError, match=r"messages must be a list of .*for plain text use generate"):
        llm.chat(messages)
    assert_baseline(llm)
