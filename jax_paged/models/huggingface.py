"""Reading Llama-family models from a directory as `transformers` writes it.

config.json, generation_config.json            sizes, end-of-text ids
model.safetensors                              weights, or
model.safetensors.index.json + shards          the same in several files
tokenizer.json, tokenizer_config.json          vocabulary, special tokens, chat template
chat_template.jinja                            the template, in newer directories
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the name "bfloat16", which safetensors asks it for)
import numpy as np
import safetensors

from jax_paged.models.config import ModelConfig, ModelError, RopeScaling, weight_shapes
from jax_paged.tokenizer import Tokenizer

__all__ = ["read_config", "read_tokenizer", "read_weights"]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")  # the same decoder; the second may have a sliding window
_FLOATS = ("F32", "F16", "BF16")
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_TENSORS = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def read_config(directory: Path) -> ModelConfig:
    """The model's configuration, with transformers' defaults for what `config.json` leaves out.

    Raises:
      ModelError: a file is missing or damaged, the architecture or a feature of it is not supported, or a value is
        missing or out of range.
    """
    fields = _Fields(directory / "config.json", _read_json(directory / "config.json"))
    architectures = fields.values.get("architectures")
    if not (isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in ARCHITECTURES):
        raise ModelError(
            f"{fields.path}: {architectures=} is not supported; supported: {', '.join(map(repr, ARCHITECTURES))}"
        )
    _refuse_variants(fields)
    hidden_size, num_q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window", 0) if architectures == ["MistralForCausalLM"] else 0
    theta, scaling = _rope(fields)
    return ModelConfig(
        family="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_q_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(num_q_heads, 1)),
        max_model_len=fields.integer("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        sliding_windows=(window or None,) * num_layers,
        bos_token_id=fields.values.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(directory, fields),
    )


def read_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """The directory's tokenizer, or None without a `tokenizer.json`.

    Raises:
      ModelError: see `Tokenizer.from_file`; or a file beside it is damaged, or its vocabulary is larger than the
        model's.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    settings = _read_json(directory / "tokenizer_config.json", missing_ok=True)
    template = _chat_template(directory, settings)
    tokenizer = Tokenizer.from_file(path, settings, template, config.bos_token_id, config.eos_token_ids)
    if tokenizer.base_vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer knows {tokenizer.base_vocab_size} tokens, the model {config.vocab_size}; use the "
            "tokenizer that came with the model"
        )
    return tokenizer


def read_weights(
    directory: Path, config: ModelConfig, dtype: np.dtype, progress: Callable[[int, int], None] | None = None
) -> dict[str, np.ndarray]:
    """All weights as `dtype`.

    Args:
      directory, config: the directory and its `read_config`.
      dtype: bfloat16 or float32.
      progress: called with (bytes of weights read, bytes in all), both counted in `dtype`, after each tensor.

    Returns:
      Name to array, as `weight_shapes` lists them.

    Raises:
      ModelError: a file or tensor is missing or damaged, has another shape, or holds numbers that are not float32,
        float16 or bfloat16.
    """
    shapes = weight_shapes(config)
    total, done = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize, 0
    weights = {}
    with ExitStack() as stack:
        places = _open_files(directory, stack)
        for name, shape in shapes.items():
            weights[name] = _read_tensor(places, directory, name, shape).astype(dtype, copy=False)
            done += weights[name].nbytes
            if progress is not None:
                progress(done, total)
    return weights


class _Fields:
    """Typed look-ups in a JSON object; a missing or mistyped value is a ModelError that names it. Null is missing."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, (int,)))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, (int, float)))

    def flag(self, key: str) -> bool:
        return bool(self._get(key, False, (bool,)))

    def _get(self, key: str, default: Any, kinds: tuple[type, ...]) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(f"{self.path}: {key}={value!r} must be there, as one {expected}; download the file again")
        return value


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again, with this file") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ModelError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, not a JSON object; download it again")
    return values


def _refuse_variants(fields: _Fields) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{fields.path}: hidden_act={activation!r} is not supported; supported: 'silu'")
    if fields.values.get("quantization_config"):
        raise ModelError(
            f"{fields.path}: quantised weights (quantization_config) are not supported in a directory; use the model "
            "in bfloat16, or a quantised .gguf file"
        )
    rotated = fields.number("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ModelError(f"{fields.path}: partial_rotary_factor={rotated} is not supported; supported: 1.0")


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling): rope_theta and rope_scaling in older files, together in rope_parameters in newer ones."""
    values = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise ModelError(f"{fields.path}: RoPE scaling {values!r} must be a JSON object; download the file again")
    rope = _Fields(fields.path, values)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        # Without a factor, an unknown kind is still refused by its name.
        return theta, RopeScaling(kind=str(kind), factor=rope.number("factor", None if kind == "linear" else 1.0))
    return theta, RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_model_len=rope.integer("original_max_position_embeddings"),
    )


def _eos_token_ids(directory: Path, fields: _Fields) -> tuple[int, ...]:
    """The ids that end a text, from both files that may name one id, a list, or none."""
    generation = _read_json(directory / "generation_config.json", missing_ok=True)
    ids: list[Any] = []
    for values in (generation, fields.values):
        named = values.get("eos_token_id")
        ids += named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"{fields.path}: eos_token_id={ids} must be token ids; download the file again")
    return tuple(dict.fromkeys(ids))


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


type _Places = dict[str, Any]  # tensor name to the open safetensors file that holds it


def _open_files(directory: Path, stack: ExitStack) -> _Places:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        names = {"model.safetensors"}
    else:
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no weight_map from tensors to files; download it again")
        names = set(weight_map.values())
    places: _Places = {}
    for name in sorted(names):
        path = directory / name
        try:
            file = stack.enter_context(safetensors.safe_open(str(path), framework="np"))
        except FileNotFoundError as error:
            raise ModelError(f"{path} is missing; download the model again, in safetensors format") from error
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut short ({error}); download it again") from error
        places |= dict.fromkeys(file.keys(), file)
    return places


def _read_tensor(places: _Places, directory: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor_name = _tensor_name(name)
    if tensor_name not in places:
        raise ModelError(f"{directory}: tensor {tensor_name!r} is missing from its weights; download the model again")
    found = places[tensor_name].get_slice(tensor_name)
    if tuple(found.get_shape()) != shape:
        raise ModelError(
            f"{directory}: tensor {tensor_name!r} has shape {tuple(found.get_shape())}, config.json asks for {shape}; "
            "use the config that came with the weights"
        )
    if found.get_dtype() not in _FLOATS:
        raise ModelError(
            f"{directory}: tensor {tensor_name!r} has dtype {found.get_dtype()}, which is not supported; supported: "
            f"{', '.join(_FLOATS)}"
        )
    return places[tensor_name].get_tensor(tensor_name)


def _tensor_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    _, layer, part = name.split(".")
    stem = part.removesuffix("_bias")
    return f"model.layers.{layer}.{_LAYER_TENSORS[stem]}.{'weight' if part == stem else 'bias'}"
