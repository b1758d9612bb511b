"""How the documentation is built: sphinx-build -W --keep-going -b html docs build/docs"""

from __future__ import annotations

import fastports

project = "fastports"
author = "The fastports maintainers"
release = version = fastports.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
html_theme = "furo"
html_title = f"fastports {release}"
exclude_patterns = ["systemd", "completion"]

# reference from the docstrings, which are NumPy's
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
autodoc_typehints = "none"  # the signatures carry them, in the source's own words
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}

man_pages = [("cli", "fastports", "find free ports and hold them", author, 1)]

myst_heading_anchors = 3
