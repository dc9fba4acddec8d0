"""Shared settings: `--long` runs the property tests at length, and finds new examples each time."""

import os

# Nearly all of the tests' time is compilation; this halves it. Processes that the tests start are compiled as usual.
_FLAGS_BEFORE = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_FLAGS_BEFORE} --xla_backend_optimization_level=0"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)


@pytest.fixture
def plain_env() -> dict[str, str]:
    """The environment for a process that is to run as a user's would."""
    return {**os.environ, "XLA_FLAGS": _FLAGS_BEFORE}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the property tests many times longer")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "ci")
