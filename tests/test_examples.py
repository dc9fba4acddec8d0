"""Every script in examples/ runs, and what it claims can be read from what it prints."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# They take two minutes together on two idle cores; this is for busy ones.
TIME_LIMIT_S = 900
# In one process: importing, and compiling what most of them use, take most of the time that each takes by itself.
# Their model is read once.
RUN_ALL = """
import functools, runpy, sys, traceback
from jax_paged import engine
load = functools.cache(engine.load)
engine.load = lambda name, dtype, progress=None: load(name, dtype)
for path in sys.argv[1:]:
    print(f"=== {path}", flush=True)
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
"""


@pytest.fixture(scope="module")
def printed(plain_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example prints, by its name."""
    flags = f"{plain_env['XLA_FLAGS']} --xla_backend_optimization_level=1"  # compiles sooner
    paths = sorted(map(str, EXAMPLES.glob("*.py")))
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *paths],
        cwd=tmp_path_factory.mktemp("examples"),
        env={**plain_env, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    _, *parts = re.split(r"^=== .*/(\w+)\.py\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of the last match."""
    found = list(re.finditer(pattern, text))
    assert found, f"{pattern!r} is not in:\n{text}"
    return [float(group) for group in found[-1].groups()]


def check_prefix_reuse(text: str) -> None:
    cached, prompt = numbers(r"(\d+) of (\d+) prompt tokens from the cache", text)
    assert prompt / 3 < cached < prompt
    # Not which is less: both are measured, on a machine that may be busy.
    seconds = numbers(r"([\d.]+) s with the prefix cache, ([\d.]+) s without", text)
    assert min(seconds) > 0


def check_quickstart(text: str) -> None:
    assert "The capital of France is Paris" in text
    cached, prompt = numbers(r"(\d+) of (\d+) prompt tokens from the cache", text)
    assert 0 < cached < prompt
    pages, free, held = numbers(r"(\d+) pages: (\d+) free, (\d+) in the prefix tree", text)
    assert free + held == pages
    assert held > 0


def check_multi_turn_chat(text: str) -> None:
    check_prefix_reuse(text)
    turns = re.findall(r"turn \d+: (\d+) of (\d+) prompt tokens", text)
    cached = [int(turn[0]) for turn in turns]
    assert cached[0] == 0
    assert cached == sorted(set(cached)), "each turn finds more than the one before"


def check_self_consistency(text: str) -> None:
    check_prefix_reuse(text)
    votes = re.search(r"votes: {(.*)}", text)
    assert votes
    counts = {answer: int(count) for answer, count in re.findall(r"'([^']*)': (\d+)", votes[1])}
    assert sum(counts.values()) == text.count("sample:")
    assert counts[text.split("the majority says ")[1].splitlines()[0]] == max(counts.values())


def check_tree_of_thought(text: str) -> None:
    check_prefix_reuse(text)
    thoughts = [
        (line[0] == "*", float(line[1:].split()[0])) for line in text.splitlines() if re.match(r"[* ] +-", line)
    ]
    levels = [thoughts[i : i + 3] for i in range(0, len(thoughts), 3)]
    assert len(levels) == 2
    for level in levels:
        kept = [score for is_kept, score in level if is_kept]
        assert kept == [max(score for _, score in level)], "the best thought of a level is the one that is kept"


def check_bring_your_own_model(text: str) -> None:
    count, error = numbers(r"(\d+) tokens as with plain attention, log-probabilities within (\S+)", text)
    assert count == 60
    assert error < 1e-4
    cached = [int(found) for found in re.findall(r"(\d+) from the cache", text)]
    assert cached[0] == 0 < cached[1]


def check_kernel_only(text: str) -> None:
    errors = [float(found) for found in re.findall(r"largest error (\S+)", text)]
    assert len(errors) == 2
    assert max(errors) < 1e-5


def check_generation_in_one_jit(text: str) -> None:
    most, num_pages, reserved = numbers(r"most at once: (\d+) of (\d+); all at full length would take (\d+)", text)
    assert 0 < most <= num_pages < reserved
    assert numbers(r"at the end: (\d+) pages free, out of pages: False", text) == [num_pages]
    assert numbers(r"(\d+) tokens in one call, the same as step by step", text) == [60]


CLAIMS: dict[str, Callable[[str], None]] = {
    "bring_your_own_model": check_bring_your_own_model,
    "few_shot": check_prefix_reuse,
    "generation_in_one_jit": check_generation_in_one_jit,
    "kernel_only": check_kernel_only,
    "multi_turn_chat": check_multi_turn_chat,
    "quickstart": check_quickstart,
    "self_consistency": check_self_consistency,
    "tree_of_thought": check_tree_of_thought,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_example_prints_what_it_proves(name: str, printed: dict[str, str]):
    assert "Traceback" not in printed[name], printed[name]
    CLAIMS[name](printed[name])


def test_every_claim_belongs_to_an_example():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CLAIMS)
