"""The counts and hand-offs as prometheus-client and OpenTelemetry see them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from programs import program

import fastports
from fastports import HandoffError


def test_a_scrape_reads_the_counts_of_this_moment() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from fastports.metrics.prometheus import register

    registry = prometheus.CollectorRegistry()
    collector = register(registry)

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(f"fastports_{name}", labels)

    before = fastports.stats()
    with fastports.allocate(3) as block:
        assert value("allocations_total") == before.allocations + 1
        assert value("ports_total") == before.ports + 3
        assert value("held_ports") == before.held_ports + 3
        with pytest.raises(fastports.PortsUnavailable):
            fastports.allocate(1, range=(block.first, block.last))
        with block.spawn(program("server", "{port}"), handoff="door") as child:
            pass
    assert value("held") == before.held
    assert value("refusals_total", cause="full") == before.refusals["full"] + 1
    assert value("children_total", mode="door") == before.children["door"] + 1
    after = fastports.stats().handoff
    assert value("handoff_seconds_count") == after.count == before.handoff.count + 1
    assert value("handoff_seconds_sum") == after.sum
    assert value("handoff_seconds_bucket", le="+Inf") == after.count
    assert child.listened_after is not None
    for bound in after.bounds:
        expected = sum(n for b, n in zip(after.bounds, after.counts, strict=False) if b <= bound)
        assert value("handoff_seconds_bucket", le=str(bound)) == expected
    registry.unregister(collector)
    assert prometheus.generate_latest(registry) == b""


def test_hand_offs_are_spans_and_durations_and_counts_are_observed() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from fastports.metrics.otel import instrument

    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    before = fastports.stats()
    with (
        instrument(meter_provider=meters, tracer_provider=tracers) as instrumentation,
        fastports.allocate(1, label="web") as block,
    ):
        with (
            tracers.get_tracer("test").start_as_current_span("outer") as outer,
            block.spawn(program("server", "{port}"), handoff="door") as child,
        ):
            pass
        with pytest.raises(HandoffError):
            block.spawn(program("fails", "{port}"), handoff="door", stderr=subprocess.DEVNULL)
        instrumentation.remove()
        block.spawn(program("server", "{port}"), handoff="door").stop()
    good, _, bad = exporter.get_finished_spans()
    assert good.name == f"spawn {sys.executable}"
    assert good.parent is not None and good.parent.span_id == outer.get_span_context().span_id
    assert good.attributes is not None and good.attributes["fastports.label"] == "web"
    assert good.attributes["fastports.pid"] == str(child.pid)
    assert good.end_time is not None and good.start_time is not None
    assert child.listened_after is not None
    took = (good.end_time - good.start_time) / 1e9
    assert took == pytest.approx(child.listened_after, abs=1e-5)
    assert not bad.status.is_ok and "ended with status 3" in str(bad.status.description)

    data = reader.get_metrics_data()
    assert data is not None
    points: dict[str, Any] = {
        metric.name: metric.data.data_points
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert points["fastports.allocations"][0].value == before.allocations + 1
    assert points["fastports.held"][0].value == before.held
    doors = [p.value for p in points["fastports.children"] if p.attributes["mode"] == "door"]
    assert doors == [before.children["door"] + 3]
    (durations,) = points["fastports.handoff.duration"]
    assert durations.count == 1 and durations.attributes["mode"] == "door"
    meters.shutdown()


@pytest.mark.parametrize("library", ["prometheus_client", "opentelemetry"])
def test_nobody_else_loads_these_libraries(library: str) -> None:
    code = "import fastports, fastports.hooks, sys; fastports.stats();"
    code += f"print({library!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
