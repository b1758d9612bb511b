"""The counts of this process, and its hand-offs as spans, for OpenTelemetry (extra ``otel``).

Only the API is needed here; what is made of it is the SDK's, which the program configures.
"""

from __future__ import annotations

import time

from opentelemetry import metrics, trace
from opentelemetry.metrics import Observation
from opentelemetry.trace import Status, StatusCode

from .. import hooks
from ..counts import Stats, stats

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, MeterProvider
    from opentelemetry.trace import TracerProvider

    from ..hooks import Event

__all__ = ["Instrumentation", "instrument"]

_SUMS: tuple[tuple[str, str, str, Callable[[Stats], object]], ...] = (
    ("fastports.allocations", "{block}", "Blocks given out", lambda now: now.allocations),
    ("fastports.ports", "{port}", "Ports in the blocks given out", lambda now: now.ports),
    ("fastports.probes", "{port}", "Ports that were tried", lambda now: now.probes),
    ("fastports.steals", "{steal}", "Strangers found listening", lambda now: now.steals),
    ("fastports.etcd.calls", "{call}", "Round trips to etcd", lambda now: now.etcd_calls),
    ("fastports.etcd.faults", "{call}", "Those that failed", lambda now: now.etcd_faults),
    ("fastports.etcd.duration", "s", "The time they took", lambda now: now.etcd_seconds),
    ("fastports.etcd.leases_lost", "{lease}", "Leases lost", lambda now: now.leases_lost),
    ("fastports.refusals", "{call}", "Calls that ended in an error", lambda now: now.refusals),
    ("fastports.children", "{program}", "Programs started", lambda now: now.children),
)
_LABELS = {"fastports.refusals": "cause", "fastports.children": "mode"}
_FACTS = ("first", "last", "protocol", "label", "pid", "mode")


class Instrumentation:
    """What :func:`instrument` set up; :meth:`remove` or its ``with`` statement ends the spans.

    Instruments of OpenTelemetry cannot be taken back: they go on reading the counts.
    """

    def __init__(self, meters: MeterProvider | None, tracers: TracerProvider | None) -> None:
        meter = metrics.get_meter("fastports", meter_provider=meters)
        for name, unit, text, read in _SUMS:
            meter.create_observable_counter(name, [_observer(name, read)], unit, text)
        for name, read in (
            ("fastports.held", lambda now: now.held),
            ("fastports.held_ports", lambda now: now.held_ports),
        ):
            meter.create_observable_up_down_counter(name, [_observer(name, read)])
        self._durations = meter.create_histogram(
            "fastports.handoff.duration", "s", "From the start of a program until it listened"
        )
        self._tracer = trace.get_tracer("fastports", tracer_provider=tracers)
        self._subscription = hooks.subscribe(self._hear, "child_listening", "handoff_failed")

    def _hear(self, event: Event) -> None:
        facts = event.facts
        mode = str(facts["mode"])
        now = time.time_ns()
        seconds = facts["seconds"]
        assert isinstance(seconds, float)
        if event.name == "child_listening":
            self._durations.record(seconds, {"mode": mode})
        span = self._tracer.start_span(
            f"spawn {facts['program']}",
            start_time=now - int(seconds * 1e9),
            attributes={f"fastports.{name}": str(facts[name]) for name in _FACTS},
        )
        if event.name == "handoff_failed":
            span.set_status(Status(StatusCode.ERROR, str(facts["why"])))
        span.end(now)

    def remove(self) -> None:
        """Make no more spans and record no more durations. Idempotent."""
        self._subscription.cancel()

    def __enter__(self) -> Instrumentation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def instrument(
    *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> Instrumentation:
    """Have the counts observed, and each hand-off recorded as a span and a duration.

    A span begins with the program and ends when it listens, or when it was given up; it belongs to
    the span that is current in the thread that waits. Call it once.

    Parameters
    ----------
    meter_provider, tracer_provider
        Those of the process (``opentelemetry.metrics``, ``opentelemetry.trace``) if none is given.

    Returns
    -------
    Instrumentation
    """
    return Instrumentation(meter_provider, tracer_provider)


def _observer(
    name: str, read: Callable[[Stats], object]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(options: CallbackOptions) -> Iterable[Observation]:
        value = read(stats())
        if isinstance(value, (int, float)):
            return [Observation(value)]
        assert isinstance(value, dict)
        return [Observation(number, {_LABELS[name]: key}) for key, number in value.items()]

    return observe
