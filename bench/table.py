"""Measuring side by side, and the table of ratios that a run ends with.

Every round times the subject once and each rival once, in turn, so that a busy machine slows all of
them alike. Figures are medians over rounds; a ratio is the median of the rounds' own ratios, with
the ratio of the two minima beside it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

#: Work to time from outside returns how many units it did; work that timed itself, also seconds.
Run = Callable[[], "int | tuple[float, int]"]
#: How the subject stands to a rival: how many times its cost, how many times quicker, or how many
#: seconds more.
Measure = Literal["cost", "faster", "more"]


@dataclass
class Rival:
    """What is timed beside the subject, and what is promised of the two, if anything."""

    name: str
    run: Run
    measure: Measure = "cost"
    limit: float | None = None
    samples: list[float] = field(default_factory=list)


@dataclass
class Row:
    work: str
    here: str
    rival: str = ""
    its: str = ""
    result: str = ""
    minima: str = ""
    target: str = ""
    hit: bool | None = None
    part: str = ""


class Table:
    """The rows of one run; ``part`` names the benchmarks that add them now."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.part = ""
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def compare(
        self, benchmark: Any, work: str, subject: Run, rivals: Sequence[Rival], seconds: float = 4.0
    ) -> None:
        """Time ``subject`` (with pytest-benchmark) and ``rivals`` in alternating rounds.

        All times are for one unit of what the functions say they did. ``seconds`` is about what the
        whole comparison may take; a smoke run takes a twentieth.
        """
        samples: list[float] = []
        units: list[int] = []
        turn = 0

        def others() -> None:
            nonlocal turn
            for i in range(len(rivals)):
                rival = rivals[(turn + i) % len(rivals)]
                rival.samples.append(_sample(rival.run))
            turn += 1

        def timed() -> None:
            done = subject()
            assert isinstance(done, int)
            units.append(done)

        begin = time.perf_counter()
        others()
        timed()
        one_round = time.perf_counter() - begin
        for rival in rivals:
            rival.samples.clear()  # that was the warm-up
        units.clear()
        rounds = int((seconds / 20 if self.smoke else seconds) / one_round)
        rounds = max(2 if self.smoke else 7, min(rounds, 500))
        benchmark.pedantic(timed, setup=others, rounds=rounds, iterations=1)
        if benchmark.stats is None:  # --benchmark-disable: called once, not timed
            return
        for elapsed, done in zip(benchmark.stats.stats.data, units, strict=True):
            samples.append(elapsed / done)
        for index, rival in enumerate(rivals):
            row = _row(work if index == 0 else "", samples, rival)
            self._add(row)
            benchmark.extra_info[rival.name] = {
                "median": median(rival.samples),
                "min": min(rival.samples),
                "result": row.result,
                "target": row.target,
                "hit": row.hit,
            }

    def count(
        self, work: str, value: float, unit: str, limit: float | None, at_most: bool = True
    ) -> None:
        """A row for something that is counted, not timed."""
        row = Row(work, f"{value:,.0f} {unit}")
        if limit is not None:
            row.target = f"{'<=' if at_most else '>='} {limit:,.0f}"
            row.hit = value <= limit if at_most else value >= limit
        self._add(row)

    def _add(self, row: Row) -> None:
        row.part = self.part
        self.rows.append(row)

    def note(self, text: str) -> None:
        """Say something below the table, once."""
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        head = Row("work", "fastports", "beside", "it takes", "result", "minima", "target")
        names = ("work", "here", "rival", "its", "result", "minima", "target")
        cells = [[getattr(row, name) for name in names] for row in (head, *self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
        verdicts = ["", *({None: "", True: "hit", False: "MISS"}[row.hit] for row in self.rows)]
        left = (True, False, True, False, False, False, False)
        lines = []
        for line, verdict in zip(cells, verdicts, strict=True):
            columns = [
                text.ljust(width) if is_left else text.rjust(width)
                for text, width, is_left in zip(line, widths, left, strict=True)
            ]
            lines.append("  ".join([*columns, verdict]).rstrip())
        lines.insert(1, "-" * max(map(len, lines)))
        return [*lines, "", self._about(), *self.notes]

    def markdown(self, parts: Collection[str] | None = None) -> str:
        """What has a target, as a table for a page; of these parts only."""
        lines = ["| work | here | beside | ratio | target |", "|---|--:|---|--:|--:|"]
        work = ""
        for row in self.rows:
            part = row.work.lstrip(" .")  # of the row before, where it begins with a space or dots
            if part == row.work:
                work = row.work or work
            if row.hit is None or (parts is not None and row.part not in parts):
                continue
            result = row.result or row.here
            rival = f"{row.rival} ({row.its})" if row.rival else ""
            target = row.target if row.hit else f"{row.target}, missed"
            name = f"{work}: {part}" if part and part != row.work else work
            cells = (name, row.here if row.result else "", rival, result, target)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, "", f"{self._about()}.", ""])

    def _about(self) -> str:
        missed = sum(row.hit is False for row in self.rows)
        hits = sum(row.hit is True for row in self.rows)
        about = (
            f"Linux {platform.release().partition('-')[0]} {platform.machine()}, CPython"
            f" {platform.python_version()}, {os.cpu_count()} CPUs; {hits} targets hit,"
            f" {missed} missed"
        )
        if self.smoke:
            about += "; a smoke run, whose figures mean little"
        return about


def _sample(run: Run) -> float:
    begin = time.perf_counter()
    done = run()
    elapsed = time.perf_counter() - begin
    if isinstance(done, tuple):
        elapsed, done = done
    return elapsed / done


def _row(work: str, samples: list[float], rival: Rival) -> Row:
    pairs = list(zip(samples, rival.samples, strict=True))
    row = Row(
        work, shown(median(samples)) if work else "", rival.name, shown(median(rival.samples))
    )
    limit = rival.limit
    if rival.measure == "more":
        value = median(a - b for a, b in pairs)
        row.result = f"{value * 1e3:+.2f} ms"
        row.minima = f"{(min(samples) - min(rival.samples)) * 1e3:+.2f} ms"
        if limit is not None:
            row.target = f"<= {limit * 1e3:g} ms"
            row.hit = value <= limit
    elif rival.measure == "cost":
        value = median(a / b for a, b in pairs)
        row.result = f"{value:.2f} x"
        row.minima = f"{min(samples) / min(rival.samples):.2f} x"
        if limit is not None:
            row.target = f"<= {limit:g} x"
            row.hit = value <= limit
    else:
        value = median(b / a for a, b in pairs)
        row.result = f"{value:.2f} x faster"
        row.minima = f"{min(rival.samples) / min(samples):.2f} x"
        if limit is not None:
            row.target = f">= {limit:g} x"
            row.hit = value >= limit
    return row


def shown(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return (
                f"{seconds * scale:.3g} {unit}"
                if seconds * scale < 100
                else (f"{seconds * scale:.0f} {unit}")
            )
    return f"{seconds * 1e9:.0f} ns"
