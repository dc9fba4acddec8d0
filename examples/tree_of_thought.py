"""Tree of thought (Yao et al. 2023, arXiv 2305.10601): propose several next thoughts, keep the best, go on from there.

A state is a token list; its proposals are samples with different seeds, scored by their log-probability. Every state
begins with its parent, so all that is above a thought in the tree comes from the prefix cache. Each level runs twice,
with the prefix cache and without it (each in a namespace of its own, where requests share nothing).
"""

import time

import jax_paged as jp

PROMPT = """Here is a plan for a birthday party in the garden. The party is on Saturday afternoon, there will
be twelve children between six and eight years old, and the budget is small. There must be something to eat and to
drink, a game for everyone, and an idea for the case that it rains.

The first step is"""
NUM_LEVELS, NUM_PROPOSALS, THOUGHT_TOKENS = 3, 3, 10

print("loading the model and compiling")
# Steps of at most 16 tokens need two programs, one for prefill and one for decode: less to compile. A server has more.
llm = jp.LLM("smollm2-135m", max_seqs=8, max_batch_tokens=16, num_pages=256)


def propose(state: list[int], share: bool) -> tuple[list[jp.RequestOutput], float]:
    """Continuations of a state, and the seconds they took together."""
    start = time.perf_counter()
    for seed in range(NUM_PROPOSALS):
        params = jp.SamplingParams(temperature=0.8, max_tokens=THOUGHT_TOKENS, seed=seed, ignore_eos=True, logprobs=0)
        llm.add_request(state, params, namespace="shared" if share else f"alone {len(state)} {seed}")
    done = []
    while llm.has_unfinished():
        done += [output for output in llm.step() if output.finished]
    return sorted(done, key=lambda output: output.request_id), time.perf_counter() - start


state = llm.tokenizer.encode(PROMPT)
llm.generate(state * 2, jp.SamplingParams(max_tokens=2), namespace="warm-up")  # compiles
num_compiled = llm.stats()["compilations"]
num_prompt = num_cached = 0
seconds_shared = seconds_alone = 0.0
for level in range(NUM_LEVELS):
    alone, seconds = propose(state, share=False)
    seconds_alone += seconds
    thoughts, seconds = propose(state, share=True)
    seconds_shared += seconds

    best = max(thoughts, key=lambda thought: thought.outputs[0].cumulative_logprob)
    for thought in thoughts:
        sample = thought.outputs[0]
        print(f"{'*' if thought is best else ' '} {'    ' * level}{sample.cumulative_logprob:6.1f} {sample.text!r}")
    num_prompt += sum(len(thought.prompt_token_ids) for thought in thoughts)
    num_cached += sum(thought.num_cached_tokens for thought in thoughts)

    # The first proposal finds all whole pages of the level above; the others also find what the first one computed.
    known = [0 if level == 0 else len(state) - THOUGHT_TOKENS, *[len(state) - 1] * (NUM_PROPOSALS - 1)]
    assert all(thought.num_cached_tokens >= tokens // 16 * 16 for thought, tokens in zip(thoughts, known))
    assert all(thought.num_cached_tokens == 0 for thought in alone)
    state = [*state, *best.outputs[0].token_ids]

print(f"best: {llm.tokenizer.decode(state)[len(PROMPT) :]!r}")
print(f"{num_cached} of {num_prompt} prompt tokens from the cache")
print(f"{seconds_shared:.2f} s with the prefix cache, {seconds_alone:.2f} s without")
assert llm.stats()["compilations"] == num_compiled, "the times have compilation in them"
