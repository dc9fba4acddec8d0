"""A conversation: each turn sends the whole history again, and computes only what is new in it.

Every turn is asked twice, with the prefix cache and without it (in a namespace of its own, where requests share
nothing). The time is that to the first token, which is what the history costs.
"""

from itertools import pairwise

import jax_paged as jp

QUESTIONS = [
    "Hi! I would like to grow tomatoes on my balcony. What do I need? Please tell me about pots, soil and light.",
    "Thank you. How often should I water them in summer, and at which time of the day?",
    "Some of the leaves have become yellow. What could be the reason, and what should I do about it?",
]

print("loading the model and compiling")
# Steps of at most 64 tokens need three programs, two for prefill and one for decode. A server has more.
llm = jp.LLM("smollm2-135m", max_seqs=8, max_batch_tokens=64, num_pages=256)
params = jp.SamplingParams(temperature=0, max_tokens=16)


def seconds_to_first_token(output: jp.RequestOutput) -> float:
    return output.times.first_token_s - output.times.arrival_s


llm.generate(list(range(1000, 1200)), jp.SamplingParams(max_tokens=2), namespace="warm-up")  # compiles
num_compiled = llm.stats()["compilations"]
messages: list[dict[str, str]] = []
turns, seconds_alone = [], []
for i, question in enumerate(QUESTIONS):
    messages.append({"role": "user", "content": question})
    alone = llm.chat(messages, jp.SamplingParams(temperature=0, max_tokens=1), namespace=f"alone {i}")
    turn = llm.chat(messages, params)
    messages.append({"role": "assistant", "content": turn.outputs[0].text})
    assert alone.num_cached_tokens == 0
    turns.append(turn)
    seconds_alone.append(seconds_to_first_token(alone))
    print(f"\nuser: {question}\nassistant: {turn.outputs[0].text}")
    print(
        f"[turn {i + 1}: {turn.num_cached_tokens} of {len(turn.prompt_token_ids)} prompt tokens from the cache, first "
        f"token after {seconds_to_first_token(turn):.2f} s with the prefix cache, {seconds_alone[-1]:.2f} s without]"
    )

num_prompt = sum(len(turn.prompt_token_ids) for turn in turns)
num_cached = sum(turn.num_cached_tokens for turn in turns)
print(f"\n{num_cached} of {num_prompt} prompt tokens from the cache")
print(f"{sum(map(seconds_to_first_token, turns)):.2f} s with the prefix cache, {sum(seconds_alone):.2f} s without")

# Each prompt begins with the one before, of which at least every whole page is found.
for before, turn in pairwise(turns):
    assert turn.num_cached_tokens >= len(before.prompt_token_ids) // 16 * 16
assert llm.stats()["compilations"] == num_compiled, "the times have compilation in them"
