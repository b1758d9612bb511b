"""The retry policy by itself, with clocks that are real."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fastports.errors import InvalidRequest, RegistryDenied, RegistryError, RegistryUnavailable
from fastports.retry import Retry

pytest.importorskip("tenacity", reason="needs pip install 'fastports[etcd]'")


class Failing:
    """Fails so many times, then returns its count."""

    def __init__(self, times: int, error: type[RegistryError] = RegistryUnavailable) -> None:
        self.times = times
        self.error = error
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error(f"failure {self.calls}")
        return self.calls


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_what_may_be_tried_again_is_tried_again(failures: int) -> None:
    assert Retry(4, base=0, cap=0).call(Failing(failures)) == failures + 1


def test_the_last_error_is_raised_as_it_was() -> None:
    work = Failing(99)
    with pytest.raises(RegistryUnavailable, match="failure 4"):
        Retry(4, base=0, cap=0).call(work)
    assert work.calls == 4


def test_what_cannot_be_helped_is_not_tried_again() -> None:
    work = Failing(99, RegistryDenied)
    with pytest.raises(RegistryDenied):
        Retry(4, base=0, cap=0).call(work)
    assert work.calls == 1


def test_an_error_that_becomes_final_ends_the_retries() -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise RegistryError("first" if len(calls) == 1 else "second", retryable=len(calls) == 1)

    with pytest.raises(RegistryError, match="second"):
        Retry(4, base=0, cap=0).call(work)
    assert len(calls) == 2


def test_one_attempt_is_no_retry() -> None:
    work = Failing(99)
    with pytest.raises(RegistryUnavailable, match="failure 1"):
        Retry(1).call(work)


@pytest.mark.parametrize("how", ["deadline", "budget"])
def test_nothing_is_begun_after_the_deadline(how: str) -> None:
    calls = 0
    over = 0.0

    def work() -> None:
        nonlocal calls, over
        calls += 1
        over = over or time.monotonic() + 1.0
        if calls == 2:  # an attempt that takes until then
            while time.monotonic() < over:
                time.sleep(0.01)
        raise RegistryUnavailable(f"failure {calls}")

    with pytest.raises(RegistryUnavailable, match="failure 2"):
        if how == "deadline":
            Retry(10_000, base=0, cap=0).call(work, deadline=time.monotonic() + 1.0)
        else:
            Retry(10_000, base=0, cap=0, budget=1.0).call(work)
    assert calls == 2


def test_pauses_are_jittered_over_the_whole_width_and_capped() -> None:
    retry = Retry(base=1.0, cap=4.0)
    for failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 4.0)):
        pauses = [retry.pause(failures) for _ in range(400)]
        assert 0 <= min(pauses) < longest * 0.1
        assert longest * 0.9 < max(pauses) <= longest


def test_an_interrupt_passes_through() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Retry().call(work)


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"attempts": 1.5}, {"base": -1}, {"cap": float("inf")},
                {"budget": -1}, {"base": float("nan")}],
)  # fmt: skip
def test_bad_policies_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Retry(**options)  # type: ignore[arg-type]


def test_tenacity_is_loaded_by_the_first_failure_only() -> None:
    code = (
        "import sys\n"
        "from fastports.retry import Retry\n"
        "Retry().call(lambda: 1)\n"
        "sys.exit('tenacity' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
