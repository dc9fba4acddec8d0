"""Shared settings: `--long` runs the property tests at length, and finds new examples each time."""

import hypothesis
import pytest

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the property tests many times longer")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "ci")
