"""Shared settings: `--long` runs the property tests at length, and finds new examples each time."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Each of pytest's processes gets cores of its own, where there are enough: XLA would use all of them in each, and two
# that share all get in each other's way. To be set before any thread starts.
_WORKER, _NUM_WORKERS = (os.environ.get(f"PYTEST_XDIST_WORKER{name}") for name in ("", "_COUNT"))
if _WORKER and _NUM_WORKERS and hasattr(os, "sched_setaffinity"):
    _CORES = sorted(os.sched_getaffinity(0))[int(_WORKER.removeprefix("gw")) :: int(_NUM_WORKERS)]
    if _CORES:
        os.sched_setaffinity(0, _CORES)

# Nearly all of the tests' time is compilation; this halves it. Processes that the tests start are compiled as usual.
_FLAGS_BEFORE = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_FLAGS_BEFORE} --xla_backend_optimization_level=0"

# What one of the processes has compiled serves the others, and the next run.
_CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parent.parent / ".pytest_cache" / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
}
os.environ |= _CACHE

# Tracing makes many objects that stay; looking through them again and again took a twenty-fifth of the time.
gc.set_threshold(100_000, 20, 20)

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)


@pytest.fixture(scope="session")
def plain_env() -> dict[str, str]:
    """The environment for a process that is to run as a user's would."""
    env = {name: value for name, value in os.environ.items() if name not in _CACHE}
    return {**env, "XLA_FLAGS": _FLAGS_BEFORE}


@pytest.fixture
def numpy_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the callbacks of interpreted kernels NumPy's arrays.

    Four fifths of an interpreter's time would go by in making jax arrays of them, and reading integers from those.
    """
    from jax._src import callback as callbacks
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    def call(*args: Any, callback: Callable[..., Any], **_: Any) -> list[np.ndarray]:
        return [np.asarray(result) for result in callback(*map(np.asarray, args))]

    def to_int(x: Any) -> Any:
        return int(x) if isinstance(x, np.ndarray) else of_jax_arrays(x)

    of_jax_arrays = shared_memory._to_int
    assert hasattr(callbacks, "io_callback_impl")
    monkeypatch.setattr(callbacks, "io_callback_impl", call)
    monkeypatch.setattr(shared_memory, "_to_int", to_int)


# Each file runs in one process: the longest first, so that no process ends long after the others.
_LONGEST = [
    "reference",
    "examples",
    "gpu_kernel",
    "engine",
    "attention",
    "cli",
    "any_program",
    "tpu_kernel",
    "branching",
]


def _place(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_")
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    gc.freeze()  # what is there now stays, and need not be looked through


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the property tests many times longer")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "ci")
