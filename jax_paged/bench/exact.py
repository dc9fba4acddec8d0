"""What exact mode costs: the same requests with and without it."""

import json
import time
from typing import TYPE_CHECKING

import numpy as np

from jax_paged.engine import LLM
from jax_paged.request import SamplingParams

if TYPE_CHECKING:
    from jax_paged.models.load import LoadedModel

__all__ = ["main", "measure"]

NUM_REQUESTS, PROMPT, OUT = 16, 128, 32


def measure(loaded: "LoadedModel", exact: bool) -> dict[str, float]:
    """Seconds of prefill (one token out) and of the whole, compilation left out."""
    llm = LLM(
        loaded, exact=exact, prefix_cache=False, max_seqs=NUM_REQUESTS, max_model_len=512, num_pages=1024,
        dtype=loaded.weights["embed"].dtype.name,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, llm.config.vocab_size, PROMPT).tolist() for _ in range(NUM_REQUESTS)]
    times = []
    for max_tokens in (OUT, 1, OUT):  # the first compiles
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params)
        times.append(time.perf_counter() - start)
    return {"prefill_s": times[1], "decode_s": times[2] - times[1]}


def main(loaded: "LoadedModel", as_json: bool = False) -> None:
    """Prints both, and their ratios."""
    plain, exact = (measure(loaded, exact) for exact in (False, True))
    ratios = {name: exact[name] / plain[name] for name in plain}
    if as_json:
        print(json.dumps({"plain": plain, "exact": exact, "ratios": ratios}))
        return
    print(f"{NUM_REQUESTS} requests of {PROMPT} tokens, {OUT} out; exact / plain")
    for name, what in (("prefill_s", "prefill"), ("decode_s", "decode")):
        print(f"{what:<8} {exact[name]:7.2f} s / {plain[name]:7.2f} s = {ratios[name]:.2f}")
