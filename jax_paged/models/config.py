"""What a decoder's weights look like: sizes, constants, and the name and shape of every array."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_paged.errors import ModelError

__all__ = ["ModelConfig", "ModelError", "RopeScaling", "room_for", "rope_frequencies", "weight_shapes"]

FAMILIES = ("llama",)
ROPE_SCALINGS = ("linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies were slowed down to lengthen a model's context.

    "linear" divides every frequency by `factor` (Chen et al. 2023, arXiv 2306.15595, section 2.3). "llama3" divides
    those that turn less than `low_freq_factor` times in the original context, keeps those that turn more than
    `high_freq_factor` times, and blends in between (`apply_scaling` in Meta's Llama 3.1 reference code).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0  # "llama3" only, as are the next two
    high_freq_factor: float = 4.0
    original_max_model_len: int = 8192  # tokens

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise ModelError(
                f"RoPE scaling {self.kind!r} is not supported; supported are {_listed(ROPE_SCALINGS)}, or none. "
                "Use a model with one of those"
            )
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ModelError(
                f"RoPE scaling factor={self.factor} must be a finite number >= 1; check the model's config"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelError(
                f"RoPE scaling needs 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor=} and "
                f"{self.high_freq_factor=}; check the model's config"
            )
        _check_positive(original_max_model_len=self.original_max_model_len)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder (Touvron et al. 2023, arXiv 2302.13971, section 2.2; GQA: arXiv 2305.13245).

    Raises:
      ModelError: a value is out of range or two values contradict each other.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens; the longest sequence the model was trained for
    rope_theta: float  # component pair i of a head turns by rope_theta ** (-2 i / head_dim) radians a position
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float
    tie_embeddings: bool  # the output matrix is the embedding: no "lm_head" among the weights
    attention_bias: bool = False  # q, k, v and o have biases
    mlp_bias: bool = False  # gate, up and down have biases
    sliding_windows: tuple[int | None, ...]  # per layer: a token sees the last so many, itself included; None: all
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"{self.family=} is not supported; supported: {_listed(FAMILIES)}")
        _check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_model_len=self.max_model_len,
        )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"{name}={value} must be a finite number > 0; check the model's config")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_q_heads=} is not a multiple of {self.num_kv_heads=}: no KV head could serve a whole group "
                "of query heads; check the model's config"
            )
        if self.head_dim % 2:
            raise ModelError(f"{self.head_dim=} is odd, but RoPE turns components in pairs; check the model's config")
        self._check_windows()
        self._check_token_ids()

    def _check_windows(self) -> None:
        if len(self.sliding_windows) != self.num_layers:
            raise ModelError(
                f"{len(self.sliding_windows)} sliding windows for {self.num_layers=}; give one per layer, None for "
                "full attention"
            )
        for window in self.sliding_windows:
            if window is not None:
                _check_positive(sliding_window=window)

    def _check_token_ids(self) -> None:
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for token_id in (*bos, *self.eos_token_ids):
            if not (_is_int(token_id) and 0 <= token_id < self.vocab_size):
                raise ModelError(
                    f"BOS or EOS token id {token_id!r} is outside the vocabulary of {self.vocab_size}; check the "
                    "model's config"
                )


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians that one position turns each pair of a head's components (Su et al. 2021, arXiv 2104.09864, section 3.2).

    Returns:
      f32[head_dim / 2]; component i is turned against component i + head_dim / 2.
    """
    freqs = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        kept = np.ones_like(freqs)
    elif scaling.kind == "linear":
        kept = np.zeros_like(freqs)
    else:
        turns = scaling.original_max_model_len * freqs / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    factor = 1.0 if scaling is None else scaling.factor
    return (freqs * (kept + (1 - kept) / factor)).astype(np.float32)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape, in the order of use; matrices are [out_features, in_features]."""
    return dict(_weight_shapes(config))


def room_for(shapes: dict[str, tuple[int, ...]], dtype: Any) -> dict[str, np.ndarray]:
    """Uninitialised arrays of these shapes, one after the other in memory, from a multiple of 64 bytes on."""
    sizes = {name: math.prod(shape) * np.dtype(dtype).itemsize for name, shape in shapes.items()}
    room = np.empty(sum(sizes.values()) + 64, np.uint8)
    end, arrays = -room.ctypes.data % 64, {}
    for name, shape in shapes.items():
        start, end = end, end + sizes[name]
        arrays[name] = room[start:end].view(dtype).reshape(shape)
    return arrays


def _weight_shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_size, kv_size = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices = {
        "q": (q_size, c.hidden_size),
        "k": (kv_size, c.hidden_size),
        "v": (kv_size, c.hidden_size),
        "o": (c.hidden_size, q_size),
        "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }
    yield "embed", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_layers):
        for norm in ("attn_norm", "mlp_norm"):
            yield f"layers.{layer}.{norm}", (c.hidden_size,)
        for name, shape in matrices.items():
            yield f"layers.{layer}.{name}", shape
            if c.attention_bias if name in ("q", "k", "v", "o") else c.mlp_bias:
                yield f"layers.{layer}.{name}_bias", shape[:1]
    yield "norm", (c.hidden_size,)
    if not c.tie_embeddings:
        yield "lm_head", (c.vocab_size, c.hidden_size)


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if not _is_int(value) or value < 1:
            raise ModelError(f"{name}={value!r} must be a whole number >= 1; check the model's config")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
