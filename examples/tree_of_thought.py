"""Tree of thought (Yao et al. 2023, arXiv 2305.10601): propose several next thoughts, keep the best, go on from there.

A state is a token list; its proposals are samples with different seeds, scored by their mean log-probability. Every state
begins with its parent, so all that is above a thought in the tree comes from the prefix cache. Each level runs twice, with
the prefix cache and without it (each in a namespace of its own, where requests share nothing).
"""

import time

import jax_paged as jp

PROMPT = """The following is a plan that a careful person made for a birthday party in the garden. It has short steps, each of which
is one sentence, in the order in which they should be done. The party is on Saturday afternoon, there will be twelve children
between six and eight years old, and the budget is small. There must be something to eat, something to drink, a game for
everyone, and an idea for the case that it rains. Nothing may be dangerous, and the neighbours should not be disturbed.

The plan:
1."""
NUM_LEVELS, NUM_PROPOSALS, NUM_KEPT = 3, 4, 2

print("loading the model and compiling")
# Steps of at most 64 tokens, and as many sequences: then two programs do, one for prefill and one for decode.
llm = jp.LLM("smollm2-135m", max_seqs=64, max_batch_tokens=64, num_pages=512)


def propose(states: list[list[int]], share: bool) -> tuple[list[jp.RequestOutput], float]:
    """A few continuations of each state, and the seconds they took together."""
    start = time.perf_counter()
    for state in states:
        for seed in range(NUM_PROPOSALS):
            params = jp.SamplingParams(temperature=0.8, max_tokens=16, seed=seed, logprobs=0)
            llm.add_request(state, params, namespace="shared" if share else f"alone {len(state)} {seed}")
    done = []
    while llm.has_unfinished():
        done += [output for output in llm.step() if output.finished]
    return done, time.perf_counter() - start
