"""Many ways on from one prompt: samples, branches and beam search, against the dense model and against runs alone."""

import gc
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, permutations
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import alone, assert_baseline, beams, drive, engine, greedy, likeliest, prompt

import jax_paged as jp

# It repeats itself, so that its next token is one of its own.
LOOPING = prompt(9) + likeliest(prompt(9), 20)

# A pool that holds one long sequence.
TINY_POOL: dict[str, Any] = {"num_pages": 11, "max_model_len": 44}


def seeded(max_tokens: int = 8, **options: Any) -> jp.SamplingParams:
    return jp.SamplingParams(temperature=1, seed=7, max_tokens=max_tokens, **options)


def samples_of(output: jp.RequestOutput) -> list[list[int]]:
    assert [sample.index for sample in output.outputs] == list(range(len(output.outputs)))
    return [sample.token_ids for sample in output.outputs]


def used_pages(llm: jp.LLM) -> int:
    stats = llm.stats()
    return stats["num_pages"] - stats["free_pages"]


# --- Samples of one prompt ---


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("sizes", [{}, TINY_POOL], ids=["pool", "tiny_pool"])
def test_d4_samples_with_a_seed_differ_and_are_the_same_in_any_run(sizes: dict[str, Any], prefix_cache: bool):
    params = seeded(12, n=7)
    cold = engine(**tiny.ROOMY).generate(prompt(9), params)[0]
    assert len({tuple(tokens) for tokens in samples_of(cold)}) == 7
    llm = engine(prefix_cache=prefix_cache, **sizes)  # of four slots
    for _ in range(2):
        busy = [llm.add_request(prompt(11, seed), greedy(14)) for seed in (1, 2)]
        assert samples_of(llm.generate(prompt(9), params)[0]) == samples_of(cold)
        outputs = drive(llm)
        assert [outputs[i][-1].outputs[0].token_ids for i in busy] == [alone(prompt(11, i), greedy(14)) for i in (1, 2)]
    assert_baseline(llm)


def test_the_first_sample_is_the_one_that_a_request_for_a_single_one_gets():
    llm = engine()
    assert samples_of(llm.generate(prompt(9), seeded(n=3))[0])[0] == alone(prompt(9), seeded())
    assert_baseline(llm)


def test_greedy_samples_are_all_the_same():
    llm = engine()
    assert samples_of(llm.generate(prompt(9), greedy(6, n=4))[0]) == [likeliest(prompt(9), 6)] * 4
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_all_samples_share_the_prompt_which_is_computed_once(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    llm.add_request(prompt(30), seeded(9, n=4))
    most = 0
    while llm.has_unfinished():
        llm.step()
        most = max(most, used_pages(llm))
    assert llm.stats()["computed_prefill_tokens"] == 30
    # Seven full pages and one of two tokens, of which three samples have copies; each ends in a page of its own more,
    # up to 38 computed tokens.
    assert most <= 7 + 4 * 3
    assert_baseline(llm)


@pytest.mark.parametrize(("length", "copies"), [(15, 1), (16, 0), (17, 1)])
def test_a_sample_that_diverges_copies_the_prompts_last_page_unless_that_is_full(length: int, copies: int):
    llm = engine(prefix_cache=False)
    llm.add_request(prompt(length), seeded(4, n=4))
    while not llm._scheduler.running or llm._scheduler.running[0].num_outputs == 0:
        llm.step()
    prompt_pages = -(-length // 4)
    assert used_pages(llm) == prompt_pages
    assert len({tuple(seq.pages) for seq in llm._scheduler.running}) == 1
    llm.step()
    # Each has written a token: three to copies and one in place, or each to a new page.
    assert used_pages(llm) == prompt_pages + (3 if copies else 4)
    full = length // 4
    tables = [seq.pages for seq in llm._scheduler.running]
    assert len({tuple(table[:full]) for table in tables}) == 1
    assert len({table[full] for table in tables}) == 4
    drive(llm)
    assert_baseline(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 5.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": 3.0},
        {"logit_bias": {5: 3.0, 9: -np.inf}},
        {"min_tokens": 5, "stop_token_ids": likeliest(LOOPING, 1)},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_sample_feels_the_options_from_its_first_token_on(options: dict[str, Any]):
    params = greedy(6, n=3, logprobs=0, **options)
    llm = engine()
    output = llm.generate(LOOPING, params)[0]
    assert samples_of(output) == [alone(LOOPING, replace(params, n=1))] * 3
    assert len({tuple(sample.logprobs or ()) for sample in output.outputs}) == 1
    assert_baseline(llm)


def test_samples_that_share_all_their_pages_make_room_for_a_request_before_them():
    llm = engine(prefix_cache=False)
    params = jp.SamplingParams(temperature=1, seed=1, max_tokens=24)
    first = llm.add_request(prompt(58), params)
    second = llm.add_request(prompt(28, seed=1), replace(params, n=3))
    outputs = drive(llm)
    assert llm.stats()["preemptions"] > 0
    assert outputs[first][-1].outputs[0].token_ids == alone(prompt(58), params)
    whole = engine(**tiny.ROOMY).generate(prompt(28, seed=1), replace(params, n=3))[0]
    assert samples_of(outputs[second][-1]) == samples_of(whole)
    assert_baseline(llm)


def test_samples_end_each_for_itself():
    params = jp.SamplingParams(temperature=1, seed=3, n=4, max_tokens=20, logprobs=2)
    free_run = engine().generate(prompt(9), params)[0]
    stop = free_run.outputs[2].token_ids[5]
    llm = engine()
    output = llm.generate(prompt(9), replace(params, stop_token_ids=[stop]))[0]
    for free, sample in zip(free_run.outputs, output.outputs):
        end = free.token_ids.index(stop) + 1 if stop in free.token_ids else 20
        assert sample.token_ids == free.token_ids[:end]
        assert sample.finish_reason == ("stop" if stop in free.token_ids else "length")
        assert len(sample.logprobs or ()) == len(sample.top_logprobs or ()) == end
        np.testing.assert_allclose(sample.logprobs or (), (free.logprobs or ())[:end], atol=1e-5)
    assert_baseline(llm)


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6, 9, 13])
def test_e1_samples_aborted_after_any_step_end_once_and_leave_the_others_alone(num_steps: int, n: int):
    llm = engine()
    neighbour = llm.add_request(prompt(6, seed=1), greedy(12))
    victim = llm.add_request(prompt(30, seed=2), seeded(6, n=n))
    outputs: list[jp.RequestOutput] = []
    for _ in range(num_steps):
        outputs += llm.step()
    for _ in range(2):
        llm.abort(victim)
    llm.check()
    outputs += [output for more in drive(llm).values() for output in more]
    (last,) = (output for output in outputs if output.request_id == victim and output.finished)
    whole = engine(**tiny.ROOMY).generate(prompt(30, seed=2), seeded(6, n=n))[0]
    for sample, tokens in zip(last.outputs, samples_of(whole), strict=True):
        assert sample.token_ids == tokens[: len(sample.token_ids)]
        assert sample.finish_reason == ("length" if len(sample.token_ids) == 6 else "abort")
    (other,) = (output for output in outputs if output.request_id == neighbour and output.finished)
    assert other.outputs[0].token_ids == alone(prompt(6, seed=1), greedy(12))
    assert_baseline(llm)


def test_a_stream_is_of_one_sample():
    llm = engine()
    with pytest.raises(ValueError, match=r"n=2 samples in one stream; open one each, or use generate"):
        llm.stream(prompt(5), greedy(3, n=2))
    assert_baseline(llm)


# --- Branches ---


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 30])
def test_a_prefilled_prompt_goes_on_as_the_model_does(length: int, prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    with llm.prefill(prompt(length)) as branch:
        assert branch.token_ids == prompt(length)
        assert len(branch.pages) == -(-(length - 1) // 4)  # nothing follows the last token yet
        output = branch.generate(greedy(6, logprobs=0))
        expected = likeliest(prompt(length), 6)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == prompt(length)
        assert branch.token_ids == prompt(length) + expected
    assert llm.stats()["computed_prefill_tokens"] <= max(length, 1)
    assert_baseline(llm)


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize("length", [2, 4, 5, 6, 8, 9, 10])
def test_a_prompt_that_is_cached_already_can_be_prefilled(length: int, partial_hits: bool):
    llm = engine(partial_hits=partial_hits)
    llm.generate(prompt(14), greedy(3))
    with llm.prefill(prompt(length)) as branch, llm.prefill(prompt(length)) as other:
        assert len(branch.pages) == len(other.pages) == -(-(length - 1) // 4)
        llm.generate([prompt(40, seed) for seed in (1, 2, 3)], greedy(20))  # whatever is not held is overwritten
        for each in (branch, other):
            assert each.generate(greedy(6)).outputs[0].token_ids == likeliest(prompt(length), 6)
    assert_baseline(llm)


def test_a_cached_page_that_a_branch_holds_does_not_count_as_free():
    llm = engine()
    llm.generate(prompt(8), greedy(1))
    with llm.prefill(prompt(7)) as branch:  # all cached: a whole page, and two tokens of another
        long = llm.add_request(prompt(75, seed=1), greedy(9))
        while llm.stats()["generated_tokens"] < 2:
            llm.step()
        assert llm.stats()["free_pages"] <= 3
        short = llm.add_request(prompt(15, seed=2), greedy(4))  # of four pages
        outputs = drive(llm)
        assert outputs[long][-1].outputs[0].token_ids == likeliest(prompt(75, seed=1), 9)
        assert outputs[short][-1].outputs[0].token_ids == likeliest(prompt(15, seed=2), 4)
        assert branch.generate(greedy(4)).outputs[0].token_ids == likeliest(prompt(7), 4)
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_fork_copies_nothing_until_it_writes_and_then_one_page(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    with llm.prefill(prompt(11)) as root:
        before = llm.stats()
        twin = root.fork()
        assert llm.stats() == before | {"held": 2}
        assert twin.pages == root.pages
        assert twin.token_ids == root.token_ids
        assert len(root.pages) == 3
        free = before["free_pages"]
        twin.extend([5])  # the eleventh token is written, to the third page
        assert llm.stats()["free_pages"] == free - 1
        assert twin.pages[:2] == root.pages[:2]
        assert twin.pages[2] != root.pages[2]
        assert root.token_ids == prompt(11)
        root.extend([6])  # by itself on its third page now
        assert llm.stats()["free_pages"] == free - 1
        twin.close()
        assert root.generate(greedy(4)).outputs[0].token_ids == likeliest([*prompt(11), 6], 4)
    assert_baseline(llm)


def test_a_fork_at_the_border_of_a_page_copies_none():
    llm = engine()
    with llm.prefill(prompt(9)) as root, root.fork() as twin:
        assert len(root.pages) == 2
        for branch, token in ((root, 5), (twin, 6)):
            branch.extend([token])
            assert branch.generate(greedy(4)).outputs[0].token_ids == likeliest([*prompt(9), token], 4)
        assert twin.pages[:2] == root.pages[:2]
        assert not set(twin.pages[2:]) & set(root.pages[2:])
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_branch_extends_generates_and_scores_in_turn(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    tokens = prompt(6)
    with llm.prefill(tokens) as branch:
        for turn in range(4):
            more = prompt(turn * 3, seed=turn)
            branch.extend(np.array(more, np.int32))
            tokens += more
            scored = prompt(5, seed=10 + turn)
            expected = tiny.logprobs(tokens + scored)[len(tokens) - 1 :]
            np.testing.assert_allclose(branch.logprobs(scored), expected[np.arange(5), scored], atol=1e-4)
            assert branch.token_ids == tokens
            output = branch.generate(greedy(5, logprobs=1)).outputs[0]
            assert output.token_ids == likeliest(tokens, 5)
            tokens += output.token_ids
            expected = tiny.logprobs(tokens)[-6:-1].max(-1)
            np.testing.assert_allclose(output.logprobs or (), expected, atol=1e-4)
            assert branch.token_ids == tokens
    # The last token of each piece was computed along with what came next, and scored ones for their scores alone.
    assert_baseline(llm)


@pytest.mark.parametrize("sizes", [{}, TINY_POOL], ids=["pool", "tiny_pool"])
def test_branches_and_prompts_generate_together(sizes: dict[str, Any]):
    llm = engine(**sizes)
    with llm.prefill(prompt(9)) as root, root.fork() as left, root.fork() as right:
        left.extend([5])
        for _ in range(2):  # from where they were, and from where that has brought them
            tokens = [left.token_ids, prompt(7, seed=1), right.token_ids]
            before = llm.stats()["steps"]
            outputs = llm.generate([left, prompt(7, seed=1), right], greedy(6))
            assert llm.stats()["steps"] - before <= 8 or sizes
            assert [output.outputs[0].token_ids for output in outputs] == [likeliest(ids, 6) for ids in tokens]
            assert [left.token_ids, right.token_ids] == [ids + likeliest(ids, 6) for ids in tokens[::2]]
            assert root.token_ids == prompt(9)
        (output,) = llm.generate(root, greedy(3))
        assert root.token_ids == prompt(9) + output.outputs[0].token_ids == prompt(9) + likeliest(prompt(9), 3)
    assert_baseline(llm)


def test_branches_that_cannot_generate_together_are_refused_and_stay_as_they_were():
    llm = engine()
    with llm.prefill(prompt(6)) as left, llm.prefill(prompt(7)) as right, right.fork() as closed:
        closed.close()
        refused: list[tuple[list[Any], Any, str]] = [
            ([left, right, left], None, r"a branch stands twice among the prompts; fork it"),
            ([left, [61]], None, r"61 is not a token id"),
            ([left, closed], None, r"this branch is closed"),
            ([left, right], [greedy(2), greedy(n=2)], r"n=2 samples on one branch"),
            ([left, right], [greedy(2)], r"1 SamplingParams for 2 prompts"),
            (
                [[left], [right]],
                None,
                r"branches and token ids in one list; give branches and whole prompts",
            ),
        ]
        before = llm.stats()
        for prompts, params, message in refused:
            with pytest.raises(jp.RequestError, match=message):
                llm.generate(prompts, params)
            assert (left.token_ids, right.token_ids, llm.stats()) == (prompt(6), prompt(7), before)
        with pytest.raises(jp.RequestError, match=r"a branch of another LLM.*prefill its token_ids"):
            engine().generate(left)
        for call in (llm.add_request, llm.stream, llm.prefill):
            with pytest.raises(jp.RequestError, match=r"a branch is no prompt here; give its token_ids"):
                call(left)
        outputs = llm.generate((left, right), greedy(4))
        assert [output.outputs[0].token_ids for output in outputs] == [likeliest(prompt(n), 4) for n in (6, 7)]
    assert_baseline(llm)


def test_what_a_branch_holds_is_not_computed_again():
    llm = engine(prefix_cache=False)
    with llm.prefill(prompt(20)) as root:
        root.generate(greedy(6))
        with root.fork() as twin:
            twin.extend(prompt(4, seed=1))
            twin.generate(greedy(6))
    # 19 and then the prompt's last; then the last generated and three more; then the last of those four.
    assert llm.stats()["computed_prefill_tokens"] <= 19 + 1 + 4 + 1
    assert llm.stats()["generated_tokens"] == 12
    assert_baseline(llm)


def test_nothing_is_scored_where_no_tokens_are_given():
    llm = engine()
    with llm.prefill(prompt(5)) as branch:
        assert branch.logprobs([]) == []
        branch.extend([])
        assert branch.token_ids == prompt(5)
    assert_baseline(llm)


@pytest.mark.parametrize("ending", ["stop_token_ids", "the model's end token"])
def test_the_stop_token_that_ends_a_generation_is_not_part_of_the_branch(ending: str):
    llm = engine()
    free_run = likeliest(prompt(9), 8)
    stop = free_run[2]
    end = free_run.index(stop)
    params = greedy(8)
    if ending == "stop_token_ids":
        params = greedy(8, stop_token_ids=[stop])
    else:
        tiny.set_end_tokens(llm, stop)
    with llm.prefill(prompt(9)) as branch:
        output = branch.generate(params).outputs[0]
        assert (output.token_ids, output.finish_reason) == (free_run[: end + 1], "stop")
        tokens = prompt(9) + free_run[:end]
        assert branch.token_ids == tokens
        with branch.fork() as twin:
            twin.extend([3, 4])
            assert twin.generate(greedy(4, ignore_eos=True)).outputs[0].token_ids == likeliest([*tokens, 3, 4], 4)
        scores = tiny.logprobs([*tokens, 8])[-2]
        np.testing.assert_allclose(branch.logprobs([8]), scores[8:9], atol=1e-4)
        again = branch.generate(greedy(3, ignore_eos=True)).outputs[0]
        assert again.token_ids == likeliest(tokens, 3)
        assert branch.token_ids == tokens + again.token_ids
    assert_baseline(llm)


def test_a_stop_token_that_does_not_end_it_stays_in_the_branch():
    llm = engine()
    stop = likeliest(prompt(9), 3)[-1]
    with llm.prefill(prompt(9)) as branch:
        branch.generate(greedy(3, stop_token_ids=[stop], min_tokens=3))
        branch.generate(greedy(4))
        assert len(branch.token_ids) == 9 + 3 + 4
        assert branch.token_ids[-4:] == likeliest(branch.token_ids[:-4], 4)
    assert_baseline(llm)


def test_sampled_generation_on_a_branch_is_that_of_its_tokens_as_a_prompt():
    params = jp.SamplingParams(temperature=1, seed=5, max_tokens=6, repetition_penalty=1.5, logprobs=0)
    llm = engine()
    with llm.prefill(prompt(7)) as branch:
        branch.generate(greedy(4))
        branch.extend([1, 2, 3])
        expected = alone(branch.token_ids, params)
        assert branch.generate(params).outputs[0].token_ids == expected
    assert_baseline(llm)


def test_a_branch_reports_the_log_probabilities_of_all_its_tokens():
    llm = engine()
    with llm.prefill(prompt(10)) as branch:
        output = branch.generate(greedy(3, prompt_logprobs=1))
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        expected = tiny.logprobs(prompt(10))[np.arange(9), prompt(10)[1:]]
        np.testing.assert_allclose(np.array(output.prompt_logprobs[1:], float), expected, atol=1e-4)
        assert output.outputs[0].token_ids == likeliest(prompt(10), 3)
    assert_baseline(llm)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_forks_of_forks_close_in_any_order(order: Sequence[int]):
    llm = engine()
    root = llm.prefill(prompt(6))
    child = root.fork()
    child.extend([1, 2])
    grandchild = child.fork()
    grandchild.extend([3])
    last = grandchild.fork()
    branches = [root, child, grandchild, last]
    tokens = [branch.token_ids for branch in branches]
    assert tokens == [prompt(6), [*prompt(6), 1, 2], [*prompt(6), 1, 2, 3], [*prompt(6), 1, 2, 3]]
    for place in order:
        branch = branches[place]
        assert branch.generate(greedy(3)).outputs[0].token_ids == likeliest(tokens[place], 3)
        branch.close()
        branch.close()
        llm.check()
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_branch_whose_pages_others_needed_is_computed_again(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache, **TINY_POOL)
    with llm.prefill(prompt(18)) as root:
        twin = root.fork()
        twin.extend(prompt(5, seed=9))
        outputs = llm.generate([prompt(12, seed) for seed in (1, 2, 3, 4)], greedy(28))
        assert [output.outputs[0].token_ids for output in outputs] == [
            alone(prompt(12, seed), greedy(28)) for seed in (1, 2, 3, 4)
        ]
        assert root.pages == twin.pages == []
        expected = tiny.logprobs([*prompt(18), 7, 8])[17:19]
        np.testing.assert_allclose(root.logprobs([7, 8]), expected[[0, 1], [7, 8]], atol=1e-4)
        assert twin.generate(greedy(8)).outputs[0].token_ids == likeliest(prompt(18) + prompt(5, seed=9), 8)
        assert root.generate(greedy(8)).outputs[0].token_ids == likeliest(prompt(18), 8)
        twin.close()
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_more_branches_than_the_pool_holds_all_go_on(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache, **TINY_POOL)
    branches = [llm.prefill(prompt(20, seed)) for seed in range(5)]
    for _ in range(2):
        for branch in branches:
            expected = likeliest(branch.token_ids, 6)
            assert branch.generate(greedy(6)).outputs[0].token_ids == expected
    for branch in branches:
        branch.close()
    assert_baseline(llm)


def test_a_branch_may_be_as_long_as_the_model_and_the_pool_allow():
    llm = engine(**TINY_POOL)
    with llm.prefill(prompt(40)) as root, root.fork() as twin:
        for branch in (root, twin):
            output = branch.generate(greedy(None)).outputs[0]
            assert output.token_ids == likeliest(prompt(40), 4)
            with pytest.raises(jp.RequestError, match=r"44 tokens leaves no room to generate: .*max_model_len=44"):
                branch.generate(greedy(1))
            with pytest.raises(jp.RequestError, match=r"max_model_len=44"):
                branch.extend([1])
            with pytest.raises(jp.RequestError, match=r"max_model_len=44"):
                branch.logprobs([1])
            assert len(branch.token_ids) == 44
            branch.extend([])
    assert_baseline(llm)


def test_namespaces_keep_branches_apart():
    llm = engine()
    with llm.prefill(prompt(20), namespace="a") as a, llm.prefill(prompt(20), namespace="b") as b:
        assert not set(a.pages) & set(b.pages)
        with a.fork() as twin:
            twin.extend([1])
            assert twin.generate(greedy(4)).outputs[0].token_ids == likeliest([*prompt(20), 1], 4)
        assert llm.generate(prompt(20), greedy(2), namespace="b")[0].num_cached_tokens == 16
        assert llm.generate(prompt(20), greedy(2))[0].num_cached_tokens == 0
    assert_baseline(llm)


CALLS: list[Callable[[Any], object]] = [
    lambda branch: branch.fork(),
    lambda branch: branch.extend([1]),
    lambda branch: branch.generate(),
    lambda branch: branch.logprobs([1]),
    lambda branch: branch.__enter__(),
    lambda branch: branch.fork_with(1),
    lambda branch: branch.start(None),
]


@pytest.mark.parametrize("call", CALLS, ids=["fork", "extend", "generate", "logprobs", "with", "fork_with", "start"])
def test_a_closed_branch_does_nothing_more(call: Callable[[Any], object]):
    llm = engine()
    with llm.prefill(prompt(6)) as branch:
        pass
    with pytest.raises(jp.RequestError, match=r"this branch is closed; fork it before closing, or prefill"):
        call(branch)
    assert branch.token_ids == prompt(6)
    assert branch.pages == []
    assert_baseline(llm)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda branch: branch.extend([61]), r"61 is not a token id of this model: 0 <= id < 61"),
        (lambda branch: branch.extend([-1]), r"-1 is not a token id of this model"),
        (lambda branch: branch.extend([1.5]), r"1.5 is not a token id of this model"),
        (lambda branch: branch.logprobs([1.5]), r"1.5 is not a token id of this model"),
        (lambda branch: branch.logprobs([2, 61]), r"61 is not a token id of this model"),
        (lambda branch: branch.extend([0] * 91), r"a prompt of 97 tokens .*max_model_len=96"),
        (lambda branch: branch.logprobs([0] * 91), r"a prompt of 97 tokens .*max_model_len=96"),
        (lambda branch: branch.extend("text"), r"text needs a tokenizer, and this model has none; give token ids"),
        (lambda branch: branch.logprobs("text"), r"text needs a tokenizer"),
        (lambda branch: branch.text, r"text needs a tokenizer"),
        (lambda branch: branch.generate(greedy(n=2)), r"n=2 samples on one branch; fork it, and generate from each"),
        (lambda branch: branch.generate(greedy(stop_token_ids=[61])), r"stop_token_ids: 61 is not a token id"),
        (lambda branch: branch.generate(greedy(stop="x")), r"needs a tokenizer"),
    ],
)
def test_what_a_branch_cannot_do_is_refused_and_leaves_it_as_it_was(call: Callable[[Any], object], message: str):
    llm = engine()
    with llm.prefill(prompt(6)) as branch:
        before, pages = llm.stats(), branch.pages
        with pytest.raises(jp.RequestError, match=message):
            call(branch)
        assert (branch.token_ids, branch.pages, llm.stats()) == (prompt(6), pages, before)
        assert branch.generate(greedy(4)).outputs[0].token_ids == likeliest(prompt(6), 4)
    assert_baseline(llm)


def test_a_branch_takes_and_gives_text():
    llm = engine(tokenizer=tiny.tokenizer())
    encode, decode = tiny.tokenizer().encode, tiny.tokenizer().decode
    with llm.prefill("the cab") as branch:
        branch.extend(" in")
        assert branch.token_ids == encode("the cab") + encode(" in")
        assert branch.text == "the cab in"
        assert len(branch.logprobs(" ab")) == len(encode(" ab"))
        output = branch.generate(greedy(5)).outputs[0]
        assert output.text == decode(output.token_ids)
        assert branch.text == decode(branch.token_ids)
    assert_baseline(llm)


def test_a_prompt_that_cannot_be_is_not_prefilled():
    llm = engine()
    for tokens, message in (([], r"no tokens"), ([61], r"61 is not a token id"), ([0] * 97, r"max_model_len=96")):
        with pytest.raises(jp.RequestError, match=message):
            llm.prefill(tokens)
    with llm.prefill([0] * 96) as branch:
        assert len(branch.token_ids) == 96
    assert_baseline(llm)


def test_closing_the_engine_closes_its_branches():
    llm = engine()
    branches = [llm.prefill(prompt(9))]
    branches.append(branches[0].fork())
    branches[1].extend([1, 2, 3])
    llm.close()
    assert_baseline(llm)
    for branch in branches:
        assert branch.pages == []
        branch.close()
    assert_baseline(llm)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_branch_that_nobody_refers_to_gives_its_pages_back(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    branch = llm.prefill(prompt(9))
    twin = branch.fork()
    del branch
    assert twin.generate(greedy(3)).outputs[0].token_ids == likeliest(prompt(9), 3)
    twin.pages.clear()  # a copy
    del twin
    gc.collect()
    assert llm.generate(prompt(5), greedy(2))[0].outputs[0].token_ids == likeliest(prompt(5), 2)
    assert not llm._scheduler.held
    assert llm.reset_prefix_cache() is True
    assert_baseline(llm)


def test_f2_the_prefix_cache_is_not_reset_while_a_branch_holds_pages():
    llm = engine()
    with llm.prefill(prompt(9)) as branch:
        before = llm.stats()
        assert llm.reset_prefix_cache() is False
        assert llm.stats() == before
        assert branch.generate(greedy(3)).outputs[0].token_ids == likeliest(prompt(9), 3)
    assert_baseline(llm)


def test_branches_go_on_beside_requests_and_streams():
    llm = engine()
    other = llm.add_request(prompt(8, seed=1), greedy(30))
    stream = llm.stream(prompt(8, seed=2), greedy(20))
    events = [next(stream)]
    with llm.prefill(prompt(9)) as branch:
        assert branch.generate(greedy(6)).outputs[0].token_ids == likeliest(prompt(9), 6)
        events += stream
        outputs = drive(llm)
        branch.extend([4])
        assert branch.generate(greedy(6)).outputs[0].token_ids == likeliest(branch.token_ids[:-6], 6)
    assert [event.token_id for event in events] == likeliest(prompt(8, seed=2), 20)
    assert list(outputs) == [other]
    assert outputs[other][-1].outputs[0].token_ids == likeliest(prompt(8, seed=1), 30)
    assert_baseline(llm)


@pytest.mark.parametrize("after_the_step", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_e1_ctrl_c_in_a_branch_leaves_it_usable(monkeypatch: pytest.MonkeyPatch, num_steps: int, after_the_step: bool):
    llm = engine(decode_steps_per_call=1)
    with llm.prefill(prompt(9)) as branch, branch.fork() as twin:
        dispatch = llm._dispatch
        steps_before = llm.stats()["steps"]

        def interrupted(*arguments: Any) -> Any:
            if llm.stats()["steps"] - steps_before <= num_steps:
                return dispatch(*arguments)
            if after_the_step:
                dispatch(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(llm, "_dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            branch.generate(greedy(8))
        monkeypatch.undo()
        llm.check()
        assert branch.token_ids == prompt(9) + likeliest(prompt(9), num_steps)
        for each in (branch, twin):
            expected = likeliest(each.token_ids, 5)
            assert each.generate(greedy(5)).outputs[0].token_ids == expected
    assert_baseline(llm)


@pytest.mark.parametrize("first", [2, 6, 9])
@pytest.mark.parametrize("between", [1, 2, 3, 5])
def test_ctrl_c_twice_leaves_no_request_and_all_branches_usable(first: int, between: int):
    ticks = count()
    is_on = False

    def clock() -> float:
        tick = next(ticks)
        if is_on and tick in (first, first + between):
            signal.raise_signal(signal.SIGINT)
        return float(tick)

    llm = engine(clock=clock, decode_steps_per_call=1)
    branches = [llm.prefill(prompt(9, seed)) for seed in range(3)]
    ticks, is_on = count(), True
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which background processes are without
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(branches, greedy(12))
    finally:
        signal.signal(signal.SIGINT, before)
    is_on = False
    llm.check()
    assert not llm.has_unfinished()
    assert not llm._requests
    for branch in branches:
        expected = likeliest(branch.token_ids, 4)
        assert branch.generate(greedy(4)).outputs[0].token_ids == expected
        branch.close()
    assert_baseline(llm)


def test_what_is_refused_in_the_middle_of_a_step_has_not_happened():
    calls: list[Callable[[], object]] = []

    def clock() -> float:
        while calls and llm._is_busy:
            with pytest.raises(jp.RequestError, match="the engine is in the middle of a step"):
                calls.pop()()
        return 0.0

    llm = engine(clock=clock)
    running, closed, extended = (llm.prefill(prompt(9, seed)) for seed in range(3))
    calls += [closed.close, lambda: extended.extend([1, 2]), lambda: extended.generate(greedy(2))]
    running.generate(greedy(3))
    assert not calls
    assert extended.token_ids == prompt(9, 2)
    assert extended.generate(greedy(3)).outputs[0].token_ids == likeliest(prompt(9, 2), 3)
    for branch in (running, closed, extended):
        branch.close()
    assert_baseline(llm)


def test_a_branch_whose_last_token_is_replaced_goes_on_from_the_new_one():
    llm = engine()
    stop = likeliest(prompt(9), 3)[-1]
    for params in (greedy(3), greedy(3, stop_token_ids=[stop])):
        with llm.prefill(prompt(9)) as branch:
            branch.generate(params)
            with branch.fork_with(5) as twin:
                tokens = [*branch.token_ids[:-1], 5]
                assert twin.token_ids == tokens
                with twin.fork() as third:
                    assert third.generate(greedy(4)).outputs[0].token_ids == likeliest(tokens, 4)
                twin.extend([2])
                assert twin.generate(greedy(4)).outputs[0].token_ids == likeliest([*tokens, 2], 4)
    assert_baseline(llm)


# --- Beam search ---


def assert_beams(output: jp.RequestOutput, expected: Sequence[tuple[list[int], float]], ends: Sequence[int] = ()):
    assert output.finished
    assert [sample.index for sample in output.outputs] == list(range(len(expected)))
    for sample, (tokens, score) in zip(output.outputs, expected, strict=True):
        assert sample.token_ids == tokens
        assert sample.cumulative_logprob == pytest.approx(score, abs=1e-3)
        assert sample.cumulative_logprob == pytest.approx(sum(sample.logprobs or ()))
        assert len(sample.logprobs or ()) == len(tokens)
        assert sample.finish_reason == ("stop" if tokens[-1] in ends else "length")


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_i3_beam_search_is_that_without_sharing(width: int, prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache)
    (output,) = llm.beam_search(prompt(11), beam_width=width, max_tokens=7)
    assert_beams(output, beams(prompt(11), width, 7))
    assert output.prompt_token_ids == prompt(11)
    assert_baseline(llm)


def common_ends() -> tuple[int, int]:
    """Two tokens that the model often finds likely after `prompt(11)`, to serve as end tokens."""
    best, second, *_ = beams(prompt(11), 4, 8)
    return best[0][3], second[0][5]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
def test_i3_beams_that_end_are_ranked_with_those_that_do_not(length_penalty: float):
    ends = common_ends()
    llm = engine()
    tiny.set_end_tokens(llm, *ends)
    (output,) = llm.beam_search(prompt(11), beam_width=4, max_tokens=8, length_penalty=length_penalty)
    expected = beams(prompt(11), 4, 8, length_penalty, ends)
    assert_beams(output, expected, ends)
    (output,) = llm.beam_search(prompt(11), beam_width=4, max_tokens=8, ignore_eos=True)
    assert_beams(output, beams(prompt(11), 4, 8))
    assert_baseline(llm)


def test_i3_some_beams_of_that_search_do_end():
    reasons = [beam[-1] in common_ends() for beam, _ in beams(prompt(11), 4, 8, 0.0, common_ends())]
    assert any(reasons)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_i3_beams_of_several_prompts_in_a_pool_that_cannot_hold_them(prefix_cache: bool):
    llm = engine(prefix_cache=prefix_cache, **TINY_POOL)
    prompts = [prompt(14), prompt(9, seed=1), [*prompt(14), 3]]
    outputs = llm.beam_search(prompts, beam_width=3, max_tokens=6)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert_beams(output, beams(tokens, 3, 6))
    assert_baseline(llm)


def test_i3_beams_share_the_pages_of_what_they_have_in_common(monkeypatch: pytest.MonkeyPatch):
    llm = engine(prefix_cache=False)
    most = 0
    advance = llm._advance

    def watched(max_steps: int) -> None:
        nonlocal most
        advance(max_steps)
        most = max(most, used_pages(llm))

    monkeypatch.setattr(llm, "_advance", watched)
    (output,) = llm.beam_search(prompt(32), beam_width=4, max_tokens=8)
    assert_beams(output, beams(prompt(32), 4, 8))
    # The prompt's 8 pages once; each of four beams and of their four sources has three of its own at most.
    assert most <= 8 + 8 * 2
    assert most < 4 * 8
    assert llm.stats()["computed_prefill_tokens"] == 32 + 7 * 4  # then the token that each beam was given last
    assert_baseline(llm)


def test_beams_may_fill_the_models_length():
    llm = engine(**TINY_POOL)
    (output,) = llm.beam_search(prompt(40), beam_width=2, max_tokens=4)
    assert_beams(output, beams(prompt(40), 2, 4))
    assert_baseline(llm)


def test_beam_search_says_what_was_cached():
    llm = engine()
    cold, warm = (llm.beam_search(prompt(20), beam_width=2, max_tokens=2)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 19)
    assert cold.why_not_cached == "no full page is cached yet"
    assert warm.why_not_cached is None
    assert 0 <= cold.request_id < warm.request_id
    assert warm.times.arrival_s < warm.times.finished_s
    assert_baseline(llm)


def test_beam_search_with_text():
    llm = engine(tokenizer=tiny.tokenizer())
    (output,) = llm.beam_search("the cab", beam_width=2, max_tokens=4)
    assert output.prompt_token_ids == tiny.tokenizer().encode("the cab")
    for sample in output.outputs:
        assert sample.text == tiny.tokenizer().decode(sample.token_ids)
    assert_baseline(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, r"beam_width=0 must be an integer of at least 1"),
        ({"beam_width": 17}, r"beam_width=17 must be from 1 to 16"),
        ({"max_tokens": 0}, r"max_tokens=0 must be an integer of at least 1"),
        ({"max_tokens": 92}, r"a prompt of 5 tokens and max_tokens=92 are more than max_model_len=96; shorten one"),
    ],
)
def test_a_beam_search_that_cannot_be_is_refused(options: dict[str, Any], message: str):
    llm = engine()
    other = llm.add_request(prompt(5), greedy(3))
    before = llm.stats()
    with pytest.raises(ValueError, match=message):
        llm.beam_search([prompt(3), prompt(5)], **options)
    assert llm.stats() == before
    assert drive(llm)[other][-1].outputs[0].token_ids == likeliest(prompt(5), 3)
    assert_baseline(llm)


def test_beam_search_leaves_other_requests_to_step():
    llm = engine()
    other = llm.add_request(prompt(5, seed=1), greedy(6))
    (output,) = llm.beam_search(prompt(7), beam_width=2, max_tokens=8)
    assert_beams(output, beams(prompt(7), 2, 8))
    outputs = drive(llm)
    assert list(outputs) == [other]
    assert outputs[other][-1].outputs[0].token_ids == likeliest(prompt(5, seed=1), 6)
    assert_baseline(llm)


def test_ctrl_c_in_a_beam_search_gives_all_pages_back(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    dispatch = llm._dispatch

    def interrupted(*arguments: Any) -> Any:
        if llm.stats()["steps"] < 6:
            return dispatch(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search([prompt(9), prompt(7)], beam_width=3, max_tokens=9)
    monkeypatch.undo()
    assert not llm._scheduler.held
    assert_baseline(llm)
