"""The counts of this process for prometheus-client (extra ``prometheus``).

>>> from prometheus_client import CollectorRegistry, generate_latest
>>> from fastports.metrics.prometheus import register
>>> registry = CollectorRegistry()
>>> collector = register(registry)
>>> b"fastports_allocations_total" in generate_latest(registry)
True

The numbers are read when they are scraped; nothing runs in between. They are those of one process:
where several processes are scraped as one (``PROMETHEUS_MULTIPROC_DIR``) they do not take part.
"""

from __future__ import annotations

from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ..counts import stats

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

__all__ = ["Collector", "register"]

_COUNTERS = (
    ("allocations", "Blocks given out"),
    ("ports", "Ports in the blocks given out"),
    ("probes", "Ports that were tried"),
    ("listening", "Programs that came up on their ports"),
    ("exited", "Programs that ended"),
    ("failed", "Programs that did not come up"),
    ("steals", "Strangers found listening on a port that was handed over"),
    ("etcd_calls", "Round trips to etcd"),
    ("etcd_faults", "Round trips to etcd that failed"),
    ("etcd_seconds", "Seconds that round trips to etcd took"),
    ("leases_lost", "Leases that etcd took back"),
    ("contested", "Records that etcd had under another owner"),
)
_GAUGES = (("held", "Blocks held now"), ("held_ports", "Ports held now"))


class Collector:
    """A custom collector: each scrape is one :func:`fastports.stats`."""

    def describe(self) -> Iterator[Metric]:
        """The metrics without their numbers."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        now = stats()
        for name, text in _COUNTERS:
            yield CounterMetricFamily(f"fastports_{name}", text, value=getattr(now, name))
        for name, text in _GAUGES:
            yield GaugeMetricFamily(f"fastports_{name}", text, value=getattr(now, name))
        refusals = CounterMetricFamily(
            "fastports_refusals", "Calls that ended in an error, by cause", labels=["cause"]
        )
        for cause, number in now.refusals.items():
            refusals.add_metric([cause], number)
        yield refusals
        children = CounterMetricFamily(
            "fastports_children", "Programs started, by hand-off mode", labels=["mode"]
        )
        for mode, number in now.children.items():
            children.add_metric([mode], number)
        yield children
        so_far, buckets = 0, []
        for bound, number in zip([*now.handoff.bounds, "+Inf"], now.handoff.counts, strict=True):
            so_far += number
            buckets.append((str(bound), so_far))
        yield HistogramMetricFamily(
            "fastports_handoff_seconds",
            "Seconds from the start of a program until it listened",
            buckets=buckets,
            sum_value=now.handoff.sum,
        )


def register(registry: CollectorRegistry = REGISTRY) -> Collector:
    """Add a :class:`Collector` to a registry of prometheus-client.

    Parameters
    ----------
    registry
        The default one if none is given.

    Returns
    -------
    Collector
        For ``registry.unregister``.
    """
    collector = Collector()
    registry.register(collector)
    return collector
