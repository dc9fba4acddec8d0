"""Benchmarks. Each prints ratios of things measured in turn in one process: absolute times are the machine's,
ratios are ours.
"""
