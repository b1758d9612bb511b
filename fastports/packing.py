"""Where several blocks fit together: a small search over free stretches, no socket in sight."""

from __future__ import annotations

_STEPS = 50_000  # placements tried before a request is called too tight


def free_runs(states: bytes | bytearray) -> list[tuple[int, int]]:
    """``(start, length)`` of each stretch of zeros."""
    runs: list[tuple[int, int]] = []
    at = 0
    while True:
        start = states.find(0, at)
        if start < 0:
            return runs
        at = start
        while at < len(states) and states[at] == 0:
            at += 1
        runs.append((start, at - start))


def place(runs: list[tuple[int, int]], sizes: list[int]) -> list[int] | None:
    """Starts at which blocks of ``sizes`` (descending) fit into free ``runs``, or None.

    Tries the tightest run first and goes back when that leads nowhere; gives up after 50,000
    placements.
    """
    left = [length for _, length in runs]
    used = [0] * len(runs)
    chosen: list[int] = []
    steps = 0

    def fit(index: int) -> bool:
        nonlocal steps
        if index == len(sizes):
            return True
        size = sizes[index]
        seen: set[int] = set()
        for run in sorted(range(len(left)), key=lambda i: left[i]):
            if left[run] < size or left[run] in seen:
                continue  # runs of equal room are the same choice
            steps += 1
            if steps > _STEPS:
                return False
            seen.add(left[run])
            chosen.append(runs[run][0] + used[run])
            left[run] -= size
            used[run] += size
            if fit(index + 1):
                return True
            left[run] += size
            used[run] -= size
            chosen.pop()
        return False

    if sum(sizes) > sum(left) or len(sizes) > 900:  # the recursion's depth
        return None
    return chosen if fit(0) else None
