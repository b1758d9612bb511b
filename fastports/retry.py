"""How often, how fast and how long a call to a service is tried again."""

from __future__ import annotations

import time

from .errors import InvalidRequest, RegistryError

__all__ = ["Retry"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")


class Retry:
    """A bounded, jittered retry policy.

    Only errors that call themselves retryable are tried again, and never past the deadline. The
    wait before attempt ``n + 1`` is uniform between zero and ``min(cap, base * 2**n)`` ("full
    jitter"), so that many processes that failed together do not come back together.

    Parameters
    ----------
    attempts
        Most calls in all, the first included.
    base, cap
        Seconds; the longest wait after the first failure, and after any failure.
    budget
        Seconds that all attempts and waits may take together; None leaves it to the caller.
    """

    __slots__ = ("attempts", "base", "budget", "cap")

    def __init__(
        self,
        attempts: int = 8,
        *,
        base: float = 0.05,
        cap: float = 0.5,
        budget: float | None = None,
    ) -> None:
        if not isinstance(attempts, int) or attempts < 1:
            raise InvalidRequest(
                "attempts is a whole number from 1 on", argument="attempts", value=attempts
            )
        for name, value in (("base", base), ("cap", cap), ("budget", budget)):
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidRequest(
                    f"{name} is a number of seconds, not negative", argument=name, value=value
                )
        self.attempts: int = attempts
        self.base: float = base
        self.cap: float = cap
        self.budget: float | None = budget

    def __repr__(self) -> str:
        return f"Retry({self.attempts}, base={self.base}, cap={self.cap}, budget={self.budget})"

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        from os import urandom  # not `random`: a seeded parent would give its children one jitter

        longest = min(self.cap, self.base * 2.0 ** min(failures - 1, 60))
        return longest * int.from_bytes(urandom(4), "big") / 2.0**32

    def call(self, work: Callable[[], T], *, deadline: float | None = None) -> T:
        """Run ``work`` until it succeeds, fails for good, or the policy ends.

        Parameters
        ----------
        work
            Called without arguments; to be tried again it raises a
            :class:`~fastports.errors.RegistryError` whose ``retryable`` is true.
        deadline
            ``time.monotonic()`` value after which nothing is started any more.

        Raises
        ------
        RegistryError
            The last one, as it was raised.
        """
        end = float("inf") if deadline is None else deadline
        if self.budget is not None:
            end = min(end, time.monotonic() + self.budget)
        last: RegistryError
        try:
            return work()
        except RegistryError as exc:
            if not exc.retryable or self.attempts == 1 or time.monotonic() >= end:
                raise
            last = exc
        try:
            import tenacity  # 35 ms, and only a call that failed once pays them
        except ImportError as exc:
            raise RegistryError(
                f"{last} (retries need tenacity; type: pip install 'fastports[etcd]')",
                outcome=last.outcome,
                endpoint=last.endpoint,
            ) from exc

        def attempt() -> T:
            nonlocal last
            if time.monotonic() >= end:
                raise last
            try:
                return work()
            except RegistryError as exc:
                last = exc
                raise

        def wait(state: Any) -> float:
            return max(0.0, min(self.pause(state.attempt_number + 1), end - time.monotonic()))

        time.sleep(max(0.0, min(self.pause(1), end - time.monotonic())))
        retrying = tenacity.Retrying(
            stop=lambda state: state.attempt_number >= self.attempts - 1 or time.monotonic() >= end,
            wait=wait,
            retry=tenacity.retry_if_exception(
                lambda exc: isinstance(exc, RegistryError) and exc.retryable
            ),
            reraise=True,
        )
        result: T = retrying(attempt)
        return result
