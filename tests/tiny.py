"""A model small enough to run thousands of steps, the same model written out in numpy, and engines for it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

import jax_paged as jp
from jax_paged.models.config import ModelConfig
from jax_paged.models.llama import Llama, random_weights

# Two layers: in the first, keys and values depend on the token alone, in the second on all before it.
CONFIG = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    sliding_windows=(None, None),
)

# Few sizes, since each is compiled anew: the engines of one size share their programs.
SIZES: dict[str, Any] = {"page_size": 4, "num_pages": 24, "max_seqs": 4, "max_batch_tokens": 16, "max_model_len": 96}


@cache
def weights() -> dict[str, np.ndarray]:
    return random_weights(CONFIG, seed=1)


@cache
def model() -> Llama:
    return Llama(CONFIG, weights())


def engine(*, prefill: bool = True, **options: Any) -> jp.LLM:
    """An engine that checks its books and poisons its pool after every step.

    It uses the programs for prefill from the start; with `prefill` off it puts short prompts through decode's, as
    engines do that have not compiled the others.
    """
    llm = jp.LLM(model(), **(SIZES | {"dtype": "float32", "debug_checks": True} | options))
    llm._has_prefilled = prefill
    return llm


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num_tokens).tolist()


def greedy(max_tokens: int = 8, **options: Any) -> jp.SamplingParams:
    return jp.SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def alone(prompt: Sequence[int], params: jp.SamplingParams, **sizes: Any) -> list[int]:
    """The tokens of a request that runs alone on a fresh engine without a prefix cache, a token a row."""
    key = repr((prompt, params, sizes))
    if key not in _ran_alone:
        llm = engine(prefix_cache=False, prefill=False, **sizes)
        _ran_alone[key] = llm.generate(prompt, params)[0].outputs[0].token_ids
    return _ran_alone[key]


_ran_alone: dict[str, list[int]] = {}


def logits(tokens: Sequence[int]) -> np.ndarray:
    """f64[num_tokens, vocab_size]: the model without cache, pages or batches, in numpy."""
    c, w = CONFIG, weights()
    num_tokens, half = len(tokens), c.head_dim // 2
    angles = np.arange(num_tokens)[:, None, None] * c.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def heads(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return (x @ weight.T).reshape(num_tokens, -1, c.head_dim)

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["embed"][list(tokens)].astype(np.float64)
    for i in range(c.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): weight.astype(np.float64) for name, weight in w.items()}
        h = norm(x, layer["attn_norm"])
        group = c.num_q_heads // c.num_kv_heads
        q = rotate(heads(h, layer["q"]))
        k, v = (np.repeat(y, group, axis=1) for y in (rotate(heads(h, layer["k"])), heads(h, layer["v"])))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        x = x + out.reshape(num_tokens, -1) @ layer["o"].T
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"].T)) @ layer["down"].T
    return norm(x, w["norm"]) @ w["lm_head"].T
