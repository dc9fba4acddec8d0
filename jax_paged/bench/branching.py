"""What branching saves, and what the host costs: pages held by samples and beams, and the host's part of a step."""

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged import beam
from jax_paged.engine import LLM
from jax_paged.request import SamplingParams

if TYPE_CHECKING:
    from jax_paged.models.load import LoadedModel

__all__ = ["main", "measure_beams", "measure_host", "measure_samples"]


def _tokens(llm: LLM, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, llm.config.vocab_size, length).tolist()


def measure_samples(loaded: "LoadedModel", n: int = 16, prompt: int = 512, out: int = 32) -> dict[str, int]:
    """Pages that n samples of a prompt hold at most at once, and those of the prompt and of each sample alone."""
    llm = LLM(loaded, max_seqs=n, max_model_len=1024, num_pages=2048, prefix_cache=False, dtype=_dtype(loaded))
    llm.add_request(_tokens(llm, prompt), SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=out, ignore_eos=True))
    most = 0
    while llm.has_unfinished():
        llm.step()
        most = max(most, llm.spec.num_pages - llm.stats()["free_pages"])
    size = llm.spec.page_size
    computed = prompt + out - 1  # the last token of a sample has no KV
    return {
        "pages": most,
        "prompt_pages": prompt // size,
        "own_pages_each": -(-computed // size) - prompt // size,
        "unshared_pages": n * -(-computed // size),
        "computed_prompt_tokens": llm.stats()["computed_prefill_tokens"],
    }


def measure_beams(loaded: "LoadedModel", text: str, width: int = 4, out: int = 64) -> dict[str, float]:
    """Pages that beams hold together, over what they would if none were shared: of each step, then the mean."""
    llm = LLM(loaded, max_seqs=8, max_model_len=1024, num_pages=1024, prefix_cache=False, dtype=_dtype(loaded))
    together, alone = [], []
    step: Any = beam._step

    def watched(llm: LLM, searches: list[Any], *args: Any) -> None:
        step(llm, searches, *args)
        held = [one.branch.pages for search in searches for one in search.beams if one.branch is not None]
        together.append(len({page for pages in held for page in pages}))
        alone.append(sum(map(len, held)))

    beam._step = watched  # type: ignore[assignment]
    try:
        llm.beam_search(text, beam_width=width, max_tokens=out)
    finally:
        beam._step = step
    return {"pages": sum(together), "unshared_pages": sum(alone), "saved": 1 - sum(together) / sum(alone)}


def measure_host(loaded: "LoadedModel", num_rows: int = 64, steps: int = 30) -> dict[str, float]:
    """Seconds of a decode step of many rows, and of its part on the host: plan, pack, commit, outputs. Medians."""
    llm = LLM(loaded, max_seqs=num_rows, max_model_len=512, num_pages=2048, dtype=_dtype(loaded))
    params = SamplingParams(temperature=0, max_tokens=steps + 20, ignore_eos=True)
    for i in range(num_rows):
        llm.add_request(_tokens(llm, 64, seed=i), params)
    while llm.stats()["generated_tokens"] < 2 * num_rows:
        llm.step()
    on_device = 0.0
    dispatch = llm._run_on_device

    def timed(*args: Any) -> Any:
        nonlocal on_device
        start = time.perf_counter()
        result = dispatch(*args)
        on_device = time.perf_counter() - start
        return result

    llm._run_on_device = timed  # type: ignore[method-assign, assignment]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        llm.step()
        step = time.perf_counter() - start
        times.append((step, step - on_device))
    llm.close()
    step, host = (statistics.median(column) for column in zip(*times))
    return {"step_s": step, "host_s": host, "host_share": host / step}


def _dtype(loaded: "LoadedModel") -> str:
    return loaded.weights["embed"].dtype.name


def main(loaded: "LoadedModel", as_json: bool = False) -> None:
    """Prints all three."""
    samples = measure_samples(loaded)
    beams = measure_beams(loaded, "Once upon a time, in a village by the sea, there lived an old fisherman who")
    host = measure_host(loaded)
    if as_json:
        print(json.dumps({"samples": samples, "beams": beams, "host": host}))
        return
    print(
        f"16 samples of a 512-token prompt: at most {samples['pages']} pages, {samples['prompt_pages']} of the prompt "
        f"and {samples['own_pages_each']} a sample ({samples['unshared_pages']} unshared); "
        f"{samples['computed_prompt_tokens']} prompt tokens computed"
    )
    print(f"4 beams of 64 tokens: {beams['saved']:.0%} of their pages saved by sharing")
    print(
        f"64 running requests: {host['step_s'] * 1e3:.1f} ms a step, of which {host['host_s'] * 1e3:.1f} ms on the "
        f"host ({host['host_share']:.1%})"
    )
