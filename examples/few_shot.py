"""Few-shot prompting: five questions behind the same worked examples, which are computed once.

All five run as one batch, with the prefix cache and without it. Without means each in a namespace of its own, where
requests share nothing.
"""

import time

import jax_paged as jp

EXAMPLES = """Decide whether each review is positive or negative.

Review: The food was cold and the waiter forgot us twice. Verdict: negative
Review: A warm little place with the best soup in town. Verdict: positive
Review: I loved every minute of this film and cried at the end. Verdict: positive
Review: The battery died after two days and nobody answers my mails. Verdict: negative
Review: Friendly staff, clean rooms and a wonderful view of the sea. Verdict: positive
Review: Our room smelled of smoke and the shower did not work. Verdict: negative
"""
REVIEWS = [
    "The cake was delicious and everyone was so kind.", "Terrible service, we will never come back.",
    "A beautiful story, I want to see it again.", "The screen cracked within an hour.",
    "Fast delivery and excellent quality.",
]  # fmt: skip

print("loading the model and compiling")
# Steps of at most 64 tokens need three programs, two for prefill and one for decode. A server has more.
llm = jp.LLM("smollm2-135m", max_seqs=8, max_batch_tokens=64, num_pages=256)
params = jp.SamplingParams(temperature=0, max_tokens=1)
prompts = [f"{EXAMPLES}Review: {review} Verdict:" for review in REVIEWS]


def run(share: bool) -> tuple[list[jp.RequestOutput], float]:
    """The outputs in order, and the seconds they took together."""
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        llm.add_request(prompt, params, namespace="shared" if share else f"alone {i}")
    done = []
    while llm.has_unfinished():
        done += [output for output in llm.step() if output.finished]
    return sorted(done, key=lambda output: output.request_id), time.perf_counter() - start


llm.generate(prompts[0], jp.SamplingParams(max_tokens=2), namespace="warm-up")  # compiles
num_compiled = llm.stats()["compilations"]
alone, seconds_alone = run(share=False)
shared, seconds_shared = run(share=True)

for review, output in zip(REVIEWS, shared):
    print(f"{output.outputs[0].text.strip():9} <- {review}")
num_prompt = sum(len(output.prompt_token_ids) for output in shared)
num_cached = sum(output.num_cached_tokens for output in shared)
print(f"{num_cached} of {num_prompt} prompt tokens from the cache")
print(f"{seconds_shared:.2f} s with the prefix cache, {seconds_alone:.2f} s without")

# The first request computes the examples, the others find every whole page of them.
num_shared = len(llm.tokenizer.encode(f"{EXAMPLES}Review:"))
assert all(output.num_cached_tokens == 0 for output in [shared[0], *alone])
assert all(output.num_cached_tokens >= num_shared // 16 * 16 for output in shared[1:])
assert llm.stats()["compilations"] == num_compiled, "the times have compilation in them"
