"""``fastports gc``: what dead owners left in etcd."""

from __future__ import annotations

from . import cluster
from .options import parse
from .say import Usage, printable, say, tolerant_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gc"]

HELP = """\
usage: fastports gc --etcd [ENDPOINTS] [--namespace N] [--dry-run]
                    [--older-than AGE]

Removes keys that dead owners left in etcd. A lease takes them off by itself,
so that there is little to do: what remains are keys that were written without
a lease on this host, and keys of processes of this host that are gone while
their lease still runs. Of other hosts nothing is known, so nothing is removed
there, unless it has no lease and --older-than says that it is old enough.

  --etcd [ENDPOINTS]  where; see `fastports help etcd`
  --namespace N       another namespace than the default
  --dry-run           only tell what would be removed
  --older-than AGE    keys without a lease on other hosts too, if they were
                      recorded before that: 90s, 15m, 12h, 7d

examples:
  fastports gc --etcd etcd-0:2379 --dry-run
  fastports gc --etcd --older-than 7d

Exit status: 0, also when there is nothing; 1 if etcd does not answer."""

_NAMES = {"--dry-run": "dry-run", "--older-than": "older-than", **cluster.NAMES}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def gc(words: Sequence[str]) -> int:
    options, rest = parse(words, _NAMES, flags=("dry-run",), optional=("etcd",))
    if "help" in options:
        print(HELP)
        return 0
    if rest:
        raise Usage(f"gc takes no argument {rest[0]!r}.")
    if "etcd" not in options:
        raise Usage("gc cleans up in etcd, and needs --etcd. What is held on this host needs none.")
    age = options["older-than"]
    older_than = None if age is None else _age(age)
    tolerant_output()
    dry = "dry-run" in options
    with cluster.registry(options) as registry:
        found = registry.gc(dry_run=dry, older_than=older_than)
        for each in found:
            what = "would remove" if dry else "removed" if each.removed else "left"
            reason = each.reason if dry or each.removed else "it changed meanwhile"
            print(f"{what} {printable(each.key)}: {printable(reason)}")
        if not found:
            say(f"nothing is to be cleaned up in the namespace {printable(registry.namespace)!r}.")
    return 0


def _age(text: str) -> float:
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "s")
    if number.isascii() and number.isdigit() and len(number) <= 9:
        return float(int(number) * _UNITS[unit])
    raise Usage(f"--older-than takes an age such as 90s, 15m, 12h or 7d, not {text!r}.")
