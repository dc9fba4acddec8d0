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
PROMPTS = [case["prompt_ids"] for case in CASES]
LONG = max(PROMPTS, key=len)


@pytest.fixture(scope="module", autouse=True)
def optimised_programs() -> Iterator[None]:
    """Where other tests would rather compile fast, these run their programs for longer than they compile them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run_step", jit_step(compiler_options={"xla_backend_optimization_level": 1}))
        yield


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("smollm2-135m", "float32")


@pytest.fixture(scope="module")
def most_tokens(request) -> int:
    """Tokens of each continuation that the tests compare."""
    return 32 if request.config.getoption("--long") else 8


def make_llm(loaded: LoadedModel, page_size: int, **options) -> jp.LLM:
    """An engine whose pool holds what all cases come to, and little more."""
    num_pages = sum(-(-len(case["prompt_ids"] + case["token_ids"]) // page_size) for case in CASES) + 1
    llm = jp.LLM(
        loaded, page_size=page_size, num_pages=num_pages, max_seqs=16, max_model_len=640, max_batch_tokens=64,
        dtype="float32", **options,
    )  # fmt: skip
    # The largest program for decode and the largest for prefill do the work of them all.
    llm._buckets.sizes = [size for size in llm._buckets.sizes if size.num_tokens == (16 if size.one_token_rows else 64)]
    return llm


def make_llm_of_one_program(loaded: LoadedModel, page_size: int) -> jp.LLM:
    """Prefill's serves rows of one token, too: half as much to compile."""
    llm = make_llm(loaded, page_size, decode_steps_per_call=1)
    llm._buckets.sizes = [size for size in llm._buckets.sizes if not size.one_token_rows]
    return llm


def params(case: dict, most_tokens: int) -> jp.SamplingParams:
    return jp.SamplingParams(temperature=0, max_tokens=min(most_tokens, len(case["token_ids"])), logprobs=0)


def assert_matches(output: jp.RequestOutput, case: dict, most_tokens: int) -> None:
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
    if len(sample.token_ids) == len(case["token_ids"]):
        assert sample.text == case["text"]


def generate(llm: jp.LLM, most_tokens: int) -> list[jp.RequestOutput]:
    """All cases in one batch."""
    outputs = llm.generate(PROMPTS, [params(case, most_tokens) for case in CASES])
    for output, case in zip(outputs, CASES, strict=True):
        assert_matches(output, case, most_tokens)
    llm.check()
    return outputs


def generate_cold_and_cached(llm: jp.LLM, most_tokens: int) -> None:
    generate(llm, most_tokens)
    for output, case in zip(generate(llm, 4), CASES):
        # Whole pages of prompt and continuation are in the tree, and the last prompt token is computed all the same.
        num_tokens, page_size = len(case["prompt_ids"]), llm.spec.page_size
        full = (num_tokens + min(most_tokens, len(case["token_ids"])) - 1) // page_size * page_size
        assert output.num_cached_tokens >= min(full, num_tokens - 1)


@pytest.mark.parametrize("page_size", [1, 8, 64, 128])
def test_a_batch_matches_cold_and_again_from_the_cache(loaded: LoadedModel, page_size: int, most_tokens: int):
    llm = (make_llm_of_one_program if most_tokens < 32 else make_llm)(loaded, page_size)
    generate_cold_and_cached(llm, most_tokens)


def test_all_tokens_match_poisoned_cold_from_the_cache_and_after_eviction(loaded: LoadedModel):
    llm = make_llm(loaded, 16, debug_checks=True)
    generate_cold_and_cached(llm, 32)
    llm.generate(LONG[1:], params(CASES[0], 2))
    evicted = [output.num_cached_tokens < len(output.prompt_token_ids) - 1 for output in generate(llm, 2)]
    assert any(evicted)
    assert not all(evicted)


def test_one_by_one_matches_without_a_prefix_cache(loaded: LoadedModel, most_tokens: int):
    llm = make_llm(loaded, 16, prefix_cache=False)
    for case in CASES:
        (output,) = llm.generate(case["prompt_ids"], params(case, most_tokens // 4))
        assert_matches(output, case, most_tokens // 4)
        assert output.num_cached_tokens == 0
    assert llm.stats()["free_pages"] == llm.spec.num_pages


def test_exact_mode_gives_the_same_bits_at_every_page_size(loaded: LoadedModel, request):
    if not request.config.getoption("--long"):
        pytest.skip("--long: compiles three more programs of the demo model; test_exact.py has a small one")
    runs = []
    for page_size in (8, 64, 128):
        llm = jp.LLM(
            loaded, page_size=page_size, num_pages=2048 // page_size + 32, max_seqs=64, max_model_len=640,
            max_batch_tokens=64, dtype="float32", exact=True,
        )  # fmt: skip
        runs.append(generate(llm, 32))
    for outputs in zip(*runs):
        samples = [output.outputs[0] for output in outputs]
        assert samples[0].token_ids == samples[1].token_ids == samples[2].token_ids
        assert samples[0].logprobs == samples[1].logprobs == samples[2].logprobs


def test_texts_and_chats_become_the_reference_prompts(loaded: LoadedModel):
    llm = make_llm(loaded, 16)
    for case in CASES:
        ids = llm.render_chat(case["messages"]) if case["kind"] == "chat" else llm.tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"]
