"""Reading Llama-family models from GGUF files.

The header is parsed here rather than by `gguf.GGUFReader`, which makes a numpy array of every token's length and text
(seconds for 49k tokens) and does not notice the end of a short file. The layout is that of the GGUF specification
(docs/gguf.md in ggml), versions 2 and 3. Quantised blocks are decoded by the `gguf` package.
"""

import dataclasses
import itertools
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_paged.models.config import ModelConfig, ModelError, RopeScaling, room_for, rope_frequencies, weight_shapes
from jax_paged.tokenizer import Tokenizer, import_extra

__all__ = ["GgufFile", "GgufTensor", "read_config", "read_tokenizer", "read_weights"]

ARCHITECTURES = ("llama",)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

# Our names and the file's; the last is a layer's name after "blk.{i}.".
_TENSORS = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"
_OTHER_FILE = "upgrade it, or use a file in another quantisation, such as Q4_K_M or Q8_0"

# A model stops at its EOS token, and at any control token with one of these texts, by which models of this family end
# a turn or a document; files name only one of them (llama.cpp treats them alike).
_ENDINGS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>")
_CONTROL = 3

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_PIECES_A_TASK = 16  # handing over a piece takes a tenth of its decoding
_PIECE = 1 << 16  # weights decoded at a time; with more, malloc returns the scratch memory each time (2.5x slower)


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    name: str
    type: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # row-major: [out_features, in_features]
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """A GGUF file's metadata and the places of its tensors; their data stays on disk until read.

    Attributes:
      metadata: key to bool, int, float, str, or a list of those.
      tensors: name to place.

    Raises:
      ModelError: the file is no GGUF, is cut short or contradicts itself, or is of a version that is not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.stat().st_size == 0:
            raise ModelError(f"{self.path} is empty; download it again")
        with open(self.path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Cursor(self.data, self.path)
        num_tensors, num_keys = _read_prologue(header)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = header.string()
            if key in self.metadata:
                raise header.damage(f"the key {key!r} appears twice")
            self.metadata[key] = header.value(header.scalar("<I"))
        places = [_read_tensor_info(header) for _ in range(num_tensors)]
        start = _align(header.position, self._alignment())
        self.tensors = {place.name: dataclasses.replace(place, offset=place.offset + start) for place in places}
        self._check_tensors(header, num_tensors)

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """A tensor's bytes as stored, u8[rows, bytes_per_row], read-only; a vector is one row."""
        flat = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(math.prod(tensor.shape[:-1]), -1)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(
                f"{self.path}: general.alignment={alignment!r} must be a power of two; download the file again"
            )
        return alignment

    def _check_tensors(self, header: "_Cursor", num_tensors: int) -> None:
        if len(self.tensors) != num_tensors:
            raise header.damage("two tensors have one name")
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > len(self.data):
            raise ModelError(
                f"{self.path} is cut short: its tensors end at byte {end}, the file at byte {len(self.data)}; "
                "download it again"
            )


class _Cursor:
    """Reads values in the order in which a file holds them, and never past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def damage(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is damaged or cut short: {what} (at byte {self.position} of {len(self.data)}); "
            "download it again"
        )

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.data) - self.position:
            raise self.damage(f"{num_bytes} bytes are needed")
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self._text(self.take(self.scalar("<Q")))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("<I"), self.scalar("<Q")
            return self._strings(count) if item_kind == _STRING else self._numbers(item_kind, count)
        return self.scalar(self._code(kind))

    def _numbers(self, kind: int, count: int) -> list[Any]:
        code = self._code(kind)
        items = self.take(count * struct.calcsize(code))
        return np.frombuffer(items, np.dtype(code)).tolist()

    def _strings(self, count: int) -> list[str]:
        """A vocabulary is 50k to 250k strings, so this loop is the time it takes to read a header."""
        data, position, unpack_length, items = self.data, self.position, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack_length(data, position)[0]
                items.append(data[start:position])
        except (struct.error, OverflowError):  # past the end, and past any address
            raise self.damage(f"an array of {count} strings goes past the end") from None
        if position > len(data):
            raise self.damage(f"an array of {count} strings goes past the end")
        self.position = position
        return [self._text(item) for item in items]

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damage(f"a value has the unknown type {kind}")
        return _SCALARS[kind]

    def _text(self, raw: bytes) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.damage(f"{raw[:40]!r} is not UTF-8") from None


def _read_prologue(header: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata keys)."""
    magic = header.take(4)
    if magic != b"GGUF":
        raise ModelError(f"{header.path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = header.scalar("<I")
    if version not in (2, 3):
        raise ModelError(
            f"{header.path} is GGUF version {version}; supported are 2 and 3, little-endian. Convert the model again"
        )
    return header.scalar("<Q"), header.scalar("<Q")


def _read_tensor_info(header: _Cursor) -> GgufTensor:
    """One entry of the tensor table; its offset counts from the start of the data."""
    gguf = import_extra("gguf")
    name = header.string()
    num_dims = header.scalar("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise header.damage(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(header.scalar("<Q") for _ in range(num_dims))[::-1]
    type_id, offset = header.scalar("<I"), header.scalar("<Q")
    try:
        kind = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        raise ModelError(
            f"{header.path}: tensor {name!r} has type {type_id}, unknown to the installed gguf package; {_OTHER_FILE}"
        ) from None
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block_size:
        raise header.damage(f"tensor {name!r} of shape {shape} is not in whole {kind.name} blocks of {block_size}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block_size * block_bytes)


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def read_config(file: GgufFile) -> ModelConfig:
    """The model's configuration, from metadata and from which tensors there are.

    Raises:
      ModelError: the architecture, or a feature of it, is not supported, or a value is missing or out of range.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: the architecture {architecture!r} is not supported; supported: "
            f"{', '.join(map(repr, ARCHITECTURES))}"
        )
    get = _Metadata(file, architecture)
    num_layers, hidden_size = get.integer("block_count"), get.integer("embedding_length")
    num_q_heads = get.integer("attention.head_count")
    if f"blk.{num_layers - 1}.attn_norm.weight" not in file.tensors:
        raise ModelError(
            f"{file.path}: block_count={num_layers}, but there is no tensor of the last layer; download it again"
        )
    if get.integer("expert_count", 0):
        raise ModelError(
            f"{file.path}: mixtures of experts (expert_count={get.integer('expert_count')}) are not supported; "
            "use a dense model"
        )
    head_dim = get.integer("attention.key_length", hidden_size // max(num_q_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if get.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {key}={get.integer(key)} is not supported: it must be {head_dim=}; use another model"
            )
    config = ModelConfig(
        family="llama",
        vocab_size=file.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in file.tensors
        else get.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=get.integer("attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        max_model_len=get.integer("context_length"),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=_linear_scaling(get),
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sliding_windows=(get.integer("attention.sliding_window", 0) or None,) * num_layers,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file.metadata),
    )
    return _with_llama3_scaling(file, config) if _ROPE_FACTORS in file.tensors else config


class _Metadata:
    """Typed look-ups of an architecture's keys; a missing or mistyped one is a ModelError that names it."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, (int,)))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, (int, float)))

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, default, (str,)))

    def _get(self, key: str, default: Any, kinds: tuple[type, ...]) -> Any:
        key = f"{self._architecture}.{key}"
        value = self._file.metadata.get(key, default)
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(
                f"{self._file.path}: {key}={value!r} must be there, as one {expected}; convert the model again"
            )
        return value


def _linear_scaling(get: _Metadata) -> RopeScaling | None:
    factor = get.number("rope.scaling.factor", get.number("rope.scale_linear", 0.0))  # the second is the older name
    kind = get.text("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    return RopeScaling(kind=kind, factor=factor)


def _with_llama3_scaling(file: GgufFile, config: ModelConfig) -> ModelConfig:
    """Finds the scaling behind a table of divisors, one per frequency, which is how these files hold "llama3" scaling.

    Its constants, but for the factor, are the same in all of Llama 3.1 to 3.3; the table must agree with them.
    """
    divisors = _decode(file, file.tensors[_ROPE_FACTORS]).ravel()
    scaled = dataclasses.replace(
        config, rope_scaling=RopeScaling(kind="llama3", factor=max(float(divisors.max()), 1.0))
    )
    expected = rope_frequencies(config) / rope_frequencies(scaled)
    if config.rope_scaling or divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            f"{file.path}: the frequency table {_ROPE_FACTORS!r} is not that of 'llama3' scaling with "
            "low_freq_factor=1, high_freq_factor=4 and 8192 original positions, the only one supported; use another "
            "model"
        )
    return scaled


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        named += [i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == _CONTROL and token in _ENDINGS]
    ids = [token_id for token_id in named if token_id is not None]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"the ids that end a text must be whole numbers, got {ids}; convert the model again")
    return tuple(dict.fromkeys(ids))


def read_tokenizer(file: GgufFile, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer in the file's metadata, or None if it holds none.

    Raises:
      ModelError: see `Tokenizer.from_gguf`; or its vocabulary is larger than the embedding.
    """
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    tokenizer = Tokenizer.from_gguf(file.metadata, config.eos_token_ids)
    if tokenizer.base_vocab_size > config.vocab_size:
        raise ModelError(
            f"{file.path}: the tokenizer knows {tokenizer.base_vocab_size} tokens, the embedding {config.vocab_size}; "
            "convert the model again"
        )
    return tokenizer


def read_weights(
    file: GgufFile, config: ModelConfig, dtype: np.dtype, progress: Callable[[int, int], None] | None = None
) -> dict[str, np.ndarray]:
    """All weights, decoded to `dtype` on two threads.

    Args:
      file, config: the file and its `read_config`.
      dtype: bfloat16 or float32.
      progress: called with (bytes of the file decoded, bytes in all) as they are.

    Returns:
      Name to array, as `weight_shapes` lists them.

    Raises:
      ModelError: a tensor is missing, has another shape, has a type that cannot be decoded, or is one that the model
        should not have.
    """
    shapes = weight_shapes(config)
    tensors = {name: _find(file, name, shape) for name, shape in shapes.items()}
    _check_nothing_left(file, tensors)
    for kind in {tensor.type for tensor in tensors.values()}:
        _check_decodable(file, kind)
    weights = room_for(shapes, dtype)
    pieces = [piece for name, tensor in tensors.items() for piece in _pieces(file, config, name, tensor, weights[name])]
    total, done = sum(raw.nbytes for raw, _, _ in pieces), 0
    with ThreadPoolExecutor(2) as pool:
        for num_bytes in pool.map(_decode_pieces, itertools.batched(pieces, _PIECES_A_TASK)):
            done += num_bytes
            if progress is not None:
                progress(done, total)
    return weights


def _find(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    tensor_name = _tensor_name(name)
    tensor = file.tensors.get(tensor_name)
    if tensor is None:
        raise ModelError(f"{file.path}: tensor {tensor_name!r} is missing; download or convert the model again")
    if tensor.shape != shape:
        raise ModelError(
            f"{file.path}: tensor {tensor_name!r} has shape {tensor.shape}, the metadata asks for {shape}; "
            "convert the model again"
        )
    return tensor


def _tensor_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    _, layer, part = name.split(".")
    stem = part.removesuffix("_bias")
    return f"blk.{layer}.{_LAYER_TENSORS[stem]}.{'weight' if part == stem else 'bias'}"


def _check_nothing_left(file: GgufFile, used: dict[str, GgufTensor]) -> None:
    """A tensor without a place would be a part of the computation that is left out."""
    left = file.tensors.keys() - {tensor.name for tensor in used.values()} - {_ROPE_FACTORS}
    if left:
        raise ModelError(
            f"{file.path}: {len(left)} tensors have no place in a Llama decoder, {min(left)!r} for one; this variant "
            "is not supported, use another model"
        )


def _check_decodable(file: GgufFile, kind: Any) -> None:
    gguf = import_extra("gguf")
    if kind.name in _FLOATS:
        return
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensors of type {kind.name} cannot be decoded by the installed gguf package; {_OTHER_FILE}"
        ) from None


type _Piece = tuple[np.ndarray, Any, np.ndarray]  # stored blocks u8[blocks, bytes], their type, room for the values


def _pieces(file: GgufFile, config: ModelConfig, name: str, tensor: GgufTensor, out: np.ndarray) -> Iterator[_Piece]:
    """Cuts a tensor into runs of about _PIECE weights."""
    block_size, block_bytes = import_extra("gguf").GGML_QUANT_SIZES[tensor.type]
    raw = file.raw(tensor)
    if name.endswith((".q", ".k", ".q_bias", ".k_bias")):
        raw = _half_split_rows(raw.reshape(tensor.shape[0], -1), config.head_dim)
    blocks, flat = raw.reshape(-1, block_bytes), out.reshape(-1)
    step = _PIECE // block_size
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        first = start * block_size
        yield part, tensor.type, flat[first : first + len(part) * block_size]


def _half_split_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes the row order of these files, where RoPE turns components 2i and 2i + 1 of a head.

    Here it turns i and i + head_dim / 2, so even rows of each head become its first half and odd rows its second.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _decode_pieces(pieces: Iterable[_Piece]) -> int:
    """Decodes stored blocks into their places; returns how many bytes they were."""
    num_bytes = 0
    with np.errstate(over="ignore", invalid="ignore"):  # infinities in a file are its own affair
        for blocks, kind, out in pieces:
            out[...] = _values(blocks, kind)
            num_bytes += blocks.nbytes
    return num_bytes


def _values(blocks: np.ndarray, kind: Any) -> np.ndarray:
    """The numbers in blocks of u8[blocks, bytes], as one row of float32, or of the file's own float type."""
    if kind.name in _FLOATS:
        return blocks.reshape(-1).view(_FLOATS[kind.name])
    # One long row: the package loops in Python over every 16 rows.
    return import_extra("gguf").quants.dequantize(blocks.reshape(1, -1), kind)[0]


def _decode(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    """A small tensor as float32."""
    _check_decodable(file, tensor.type)
    return _values(file.raw(tensor), tensor.type).astype(np.float32)
