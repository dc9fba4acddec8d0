"""The demo model, token for token against greedy continuations by another engine (see `meta` in
data/smollm2_reference.json).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_paged as jp
from jax_paged import engine
from jax_paged.models.load import LoadedModel, load
from jax_paged.step import jit_step

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())
CASES = REFERENCE["cases"]
LONG = max(range(len(CASES)), key=lambda i: len(CASES[i]["prompt_ids"]))


@pytest.fixture(scope="module", autouse=True)
def optimised_programs() -> Iterator[None]:
    """Where other tests would rather compile fast, these run their programs for longer than they compile them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run_step", jit_step(compiler_options={"xla_backend_optimization_level": 1}))
        yield


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("smollm2-135m", "float32")


def make_llm(loaded: LoadedModel, page_size: int, *, num_rows: int = 16, **options) -> jp.LLM:
    # As many tokens a step as sequences: few programs to compile, and the long prompt comes in many chunks.
    return jp.LLM(
        loaded, page_size=page_size, num_pages=-(-2048 // page_size) + 32, max_seqs=num_rows, max_model_len=640,
        max_batch_tokens=num_rows, dtype="float32", **options,
    )  # fmt: skip


def params(case: dict, most_tokens: int = 32) -> jp.SamplingParams:
    return jp.SamplingParams(temperature=0, max_tokens=min(most_tokens, len(case["token_ids"])), logprobs=0)


def assert_matches(output: jp.RequestOutput, case: dict, most_tokens: int = 32) -> None:
    """The file's own rule: tokens are equal up to one whose two best logits lie within 0.02, where rounding may
    decide.
    """
    sample = output.outputs[0]
    assert output.prompt_token_ids == case["prompt_ids"]
    assert len(sample.token_ids) == len(sample.logprobs)
    for i, (token, expected) in enumerate(zip(sample.token_ids, case["token_ids"])):
        if token != expected:
            assert case["top2_gap"][i] < 0.02, f"token {i} of {case['prompt_ids'][:8]}...: {token}, not {expected}"
            return
        assert abs(sample.logprobs[i] - case["logprobs"][i]) < 2e-3
    assert len(sample.token_ids) == min(most_tokens, len(case["token_ids"]))
    if most_tokens == 32:
        assert sample.text == case["text"]


def check_batch(loaded: LoadedModel, page_size: int, most: int, **options) -> list[jp.RequestOutput]:
    """All cases in one batch, cold and again from the cache."""
    llm = make_llm(loaded, page_size, **options)
    prompts = [case["prompt_ids"] for case in CASES]
    cold = llm.generate(prompts, [params(case, most) for case in CASES])
    for output, case in zip(cold, CASES):
        assert_matches(output, case, most)
    warm = llm.generate(prompts, [params(case, 4) for case in CASES])
    for output, case in zip(warm, CASES):
        assert_matches(output, case, 4)
        # Whole pages of prompt and continuation are in the tree, and the last prompt token is computed all the same.
        full = (len(case["prompt_ids"]) + min(most, len(case["token_ids"])) - 1) // page_size * page_size
        assert output.num_cached_tokens >= min(full, len(case["prompt_ids"]) - 1)
    llm.check()
    return cold


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_batch_matches_cold_and_again_from_the_cache(loaded: LoadedModel, page_size: int, request):
    check_batch(loaded, page_size, 32 if page_size == 16 or request.config.getoption("--long") else 8)


def test_other_page_sizes_match_and_in_exact_mode_give_the_same_bits(loaded: LoadedModel, request):
    most = 6
    if request.config.getoption("--long"):
        most = 32
        for page_size in (8, 64, 128):
            check_batch(loaded, page_size, most)
    runs = [check_batch(loaded, page_size, most, exact=True, num_rows=64) for page_size in (8, 64, 128)]
    for outputs in zip(*runs):
        samples = [output.outputs[0] for output in outputs]
        assert samples[0].token_ids == samples[1].token_ids == samples[2].token_ids
        assert samples[0].logprobs == samples[1].logprobs == samples[2].logprobs


def test_one_by_one_matches_without_a_prefix_cache(loaded: LoadedModel, request):
    most = 32 if request.config.getoption("--long") else 4
    llm = make_llm(loaded, 16, prefix_cache=False)
    for case in CASES:
        (output,) = llm.generate(case["prompt_ids"], params(case, most))
        assert_matches(output, case, most)
        assert output.num_cached_tokens == 0
    assert llm.stats()["free_pages"] == llm.spec.num_pages


def test_one_by_one_matches_poisoned_with_pages_shared_and_evicted(loaded: LoadedModel, request):
    most = 32 if request.config.getoption("--long") else 4
    llm = jp.LLM(
        loaded, page_size=16, num_pages=40, max_seqs=8, max_model_len=640, max_batch_tokens=64, dtype="float32",
        debug_checks=True,
    )  # fmt: skip
    for i in (LONG, 0, 1, LONG):
        (output,) = llm.generate(CASES[i]["prompt_ids"], params(CASES[i], most))
        assert_matches(output, CASES[i], most)
    assert output.num_cached_tokens == len(CASES[LONG]["prompt_ids"]) - 1


def test_texts_and_chats_become_the_reference_prompts(loaded: LoadedModel):
    llm = make_llm(loaded, 16)
    for case in CASES:
        ids = llm.render_chat(case["messages"]) if case["kind"] == "chat" else llm.tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"]
