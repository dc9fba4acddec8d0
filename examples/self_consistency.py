"""Self-consistency (Wang et al. 2022, arXiv 2203.11171): sample several ways to an answer and let the majority decide.

Five samples of one prompt run as one batch, with the prefix cache and without it (each in a namespace of its own, where
requests share nothing). With it, the prompt is computed once. Samples differ by their seeds.
"""

import re
import time
from collections import Counter

import jax_paged as jp

PROMPT = """Question: On which continent is the city of Tokyo?
Answer: Tokyo is the capital of Japan. Japan is a country in Asia. The answer is Asia.

Question: On which continent is the city of Cairo?
Answer: Cairo is the capital of Egypt. Egypt is a country in Africa. The answer is Africa.

Question: On which continent is the city of Ottawa?
Answer: Ottawa is the capital of Canada. Canada is a country in North America. The answer is North America.

Question: On which continent is the city of Rome?
Answer: Rome is the capital of Italy. Italy is a country in Europe. The answer is Europe.

Question: On which continent is the city of Buenos Aires?
Answer:"""
NUM_SAMPLES = 5

print("loading the model and compiling")
# Steps of at most 64 tokens need three programs, two for prefill and one for decode. A server has more.
llm = jp.LLM("smollm2-135m", max_seqs=8, max_batch_tokens=64, num_pages=256)
newline = llm.tokenizer.encode("\n")


def run(share: bool) -> tuple[list[jp.RequestOutput], float]:
    """The samples, and the seconds they took together."""
    start = time.perf_counter()
    for seed in range(NUM_SAMPLES):
        params = jp.SamplingParams(temperature=1, max_tokens=28, seed=seed, stop_token_ids=newline)
        llm.add_request(PROMPT, params, namespace="shared" if share else f"alone {seed}")
    done = []
    while llm.has_unfinished():
        done += [output for output in llm.step() if output.finished]
    return sorted(done, key=lambda output: output.request_id), time.perf_counter() - start


llm.generate(PROMPT, jp.SamplingParams(max_tokens=2), namespace="warm-up")  # compiles
num_compiled = llm.stats()["compilations"]
alone, seconds_alone = run(share=False)
shared, seconds_shared = run(share=True)

votes: Counter[str] = Counter()
for output in shared:
    text = output.outputs[0].text
    answer = re.search(r"answer is (.+?)\.", text)
    votes[answer[1] if answer else "no answer"] += 1
    print(f"sample:{text}")
print(f"votes: {dict(votes)}; the majority says {votes.most_common(1)[0][0]}")

num_prompt = sum(len(output.prompt_token_ids) for output in shared)
num_cached = sum(output.num_cached_tokens for output in shared)
print(f"{num_cached} of {num_prompt} prompt tokens from the cache")
print(f"{seconds_shared:.2f} s with the prefix cache, {seconds_alone:.2f} s without")

# The first sample computes the prompt, the others find all whole pages of it; the last token is always computed.
assert all(output.num_cached_tokens == 0 for output in [shared[0], *alone])
assert all(output.num_cached_tokens >= (len(output.prompt_token_ids) - 1) // 16 * 16 for output in shared[1:])
assert len({tuple(output.outputs[0].token_ids) for output in shared}) > 1, "different seeds, the same sample"
assert llm.stats()["compilations"] == num_compiled, "the times have compilation in them"
