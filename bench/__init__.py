"""Benchmarks: fastports beside its floor and its peers, as ratios of one run.

``pytest bench`` takes about three minutes, ``pytest bench --smoke`` a few seconds (few rounds: it
shows that the benchmarks work, its figures mean little).
"""
