"""Exact mode: a request gets the same bits whatever runs beside it, however it is chunked, cached, preempted or laid
out in pages.
"""

from functools import cache
from typing import Any

import pytest
import tiny

import jax_paged as jp

LENGTHS = [1, 2, 7, 13, 16, 17, 30]
PROMPTS = [tiny.prompt(length, i) for i, length in enumerate(LENGTHS)]
PROMPTS += [PROMPTS[-1][:20] + tiny.prompt(6, 99), PROMPTS[-1][:25]]  # two that begin as another does
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_p": 0.02},
]
PARAMS = [jp.SamplingParams(max_tokens=8, seed=3, logprobs=2, **OPTIONS[i % len(OPTIONS)]) for i in range(len(PROMPTS))]
ROOM = {"max_seqs": 4, "max_model_len": 48, "num_pages": 48}


def bits(output: jp.RequestOutput) -> list[tuple[list[int], list[str], list[dict[int, float]]]]:
    """Of each sample the tokens, and log-probabilities to the last bit."""
    return [
        (sample.token_ids, [logprob.hex() for logprob in sample.logprobs or ()], sample.top_logprobs or [])
        for sample in output.outputs
    ]


@cache
def alone() -> list[Any]:
    """Each request by itself, with nothing cached."""
    llm = tiny.engine(exact=True, prefix_cache=False, **ROOM)
    return [bits(llm.generate(prompt, params)[0]) for prompt, params in zip(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"page_size": 1, "num_pages": 192},
        {"page_size": 3, "num_pages": 16, "max_batch_tokens": 4, "decode_steps_per_call": 3, "schedule": "dfs"},
    ],
    ids=lambda sizes: ",".join(f"{name}={value}" for name, value in sizes.items()) or "together",
)
def test_a_batch_cold_and_cached_has_the_bits_of_each_request_alone(sizes: dict[str, Any]):
    llm = tiny.engine(exact=True, **(ROOM | sizes))
    for order in (1, -1):  # the second time from the cache, and in other rows
        outputs = llm.generate(PROMPTS[::order], PARAMS[::order])[::order]
        assert [bits(output) for output in outputs] == alone()
    stats = llm.stats()
    assert stats["hit_tokens"] > 0
    tight = sizes.get("num_pages") == 16
    assert (stats["preemptions"] > 0) == tight, "the pool that is to be tight is, and no other"
    tiny.assert_baseline(llm)


def test_samples_and_branches_have_the_bits_of_requests_alone():
    llm = tiny.engine(exact=True, **ROOM)
    params = jp.SamplingParams(max_tokens=8, seed=3, logprobs=2, temperature=1.0)
    (alone,) = llm.generate(PROMPTS[5], params)
    (samples,) = llm.generate(PROMPTS[5], jp.SamplingParams(n=6, max_tokens=8, seed=3, logprobs=2, temperature=1.0))
    assert bits(samples)[:1] == bits(alone)

    (longer,) = llm.generate([*PROMPTS[4], 1, 2, 3], params, namespace="apart")
    with llm.prefill(PROMPTS[4]) as root, root.fork() as branch:
        branch.extend([1, 2, 3])
        assert bits(branch.generate(params)) == bits(longer)

    (beams,) = llm.beam_search(PROMPTS[5], beam_width=3, max_tokens=5)
    _, among_others = llm.beam_search([PROMPTS[4], PROMPTS[5]], beam_width=3, max_tokens=5)
    assert bits(among_others) == bits(beams)
    tiny.assert_baseline(llm)


def test_log_probabilities_of_a_prompt_are_refused():
    llm = tiny.engine(exact=True, **ROOM)
    with pytest.raises(jp.RequestError, match="not to be had with exact=True"):
        llm.generate(PROMPTS[2], jp.SamplingParams(prompt_logprobs=0))
    with llm.prefill(PROMPTS[2]) as branch, pytest.raises(jp.RequestError, match="not to be had with exact=True"):
        branch.logprobs([1, 2])
    tiny.assert_baseline(llm)
