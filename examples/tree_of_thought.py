"""Tree of thought (Yao et al. 2023, arXiv 2305.10601): propose several next thoughts, keep the best, go on from there.

A state is a branch: its forks share all its pages, and each copies at most the last one. A proposal is what a fork
generates, all of them in one batch, scored by its log-probability. Every proposal also runs from its first token on, as
it would without sharing.
"""

import time

import jax_paged as jp

PROMPT = """Here is a plan for a birthday party in the garden. The party is on Saturday afternoon, there will
be twelve children between six and eight years old, and the budget is small. There must be something to eat and to
drink, a game for everyone, and an idea for the case that it rains.

The first step is"""
NUM_LEVELS, NUM_PROPOSALS, THOUGHT_TOKENS = 2, 3, 10

print("loading the model and compiling")
# Steps of at most 64 tokens need three programs, two for prefill and one for decode. A server has more.
llm = jp.LLM("smollm2-135m", max_seqs=8, max_batch_tokens=64, num_pages=256)


def params(seed: int) -> jp.SamplingParams:
    return jp.SamplingParams(temperature=0.8, max_tokens=THOUGHT_TOKENS, seed=seed, ignore_eos=True, logprobs=0)


llm.generate(llm.tokenizer.encode(PROMPT) * 2, params(0), namespace="warm-up")  # compiles
num_compiled = llm.stats()["compilations"]
num_prompt = num_cached = 0
seconds_shared = seconds_alone = 0.0
state = llm.prefill(PROMPT)
for level in range(NUM_LEVELS):
    start = time.perf_counter()
    forks = [state.fork() for _ in range(NUM_PROPOSALS)]
    thoughts = llm.generate(forks, [params(seed) for seed in range(NUM_PROPOSALS)])
    seconds_shared += time.perf_counter() - start

    start = time.perf_counter()
    for seed in range(NUM_PROPOSALS):
        llm.add_request(state.token_ids, params(seed), namespace=f"alone {level} {seed}")
    while llm.has_unfinished():
        assert all(output.num_cached_tokens == 0 for output in llm.step())
    seconds_alone += time.perf_counter() - start

    best = max(thoughts, key=lambda thought: thought.outputs[0].cumulative_logprob)
    for thought in thoughts:
        sample = thought.outputs[0]
        print(f"{'*' if thought is best else ' '} {'    ' * level}{sample.cumulative_logprob:6.1f} {sample.text!r}")
        # All but the last token, after which it samples, was there.
        assert thought.num_cached_tokens == len(state.token_ids) - 1
        num_prompt += len(thought.prompt_token_ids)
        num_cached += thought.num_cached_tokens
    for branch in (state, *(fork for fork, thought in zip(forks, thoughts) if thought is not best)):
        branch.close()
    state = forks[thoughts.index(best)]

print(f"best: {state.text[len(PROMPT) :]!r}")
print(f"{num_cached} of {num_prompt} prompt tokens from the cache")
print(f"{seconds_shared:.2f} s with the prefix cache, {seconds_alone:.2f} s without")
assert llm.stats()["compilations"] == num_compiled, "the times have compilation in them"
