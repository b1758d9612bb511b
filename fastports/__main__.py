"""``python -m fastports``: the same as the ``fastports`` command."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
