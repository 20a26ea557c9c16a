"""The site, built by Sphinx from the same Markdown files that are read in the checkout.

    sphinx-build -W --keep-going -c docs . build/site

The source is the checkout's root, so that links between README, docs/ and the code lead where they lead on disk: to
pages of the site, and to the files themselves. The notebook is run by the build. tests/docs/test_site.py builds it.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import trainer

project = "trainer"
version = release = trainer.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]

root_doc = "docs/index"
pages = ["*.md", "docs/*.md", "docs/decisions/*.md", "bench/README.md", "bench/results/*.md"]
include_patterns = [*pages, "examples/*.ipynb"]
exclude_patterns = [".*", "build", "runs", "tests", "trainer", "configs", "launch"]
default_role = "code"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 150

html_theme = "furo"
html_title = "trainer"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


class SettingIndex(SphinxTransform):
    """Makes the rows of tables of settings entries of the index, by which the search finds them, and links to them."""

    default_priority = 800  # before Sphinx collects the entries

    def apply(self, **more: Any) -> None:
        for row in self.document.findall(nodes.row):
            name = next(iter(row.findall(nodes.literal)), nodes.literal()).astext()
            if self.env.docname == "docs/settings" and re.fullmatch(r"[a-z]+[.\w]*", name):
                row["ids"].append(name)
                row[0].insert(0, addnodes.index(entries=[("single", name, name, "", None)]))


def setup(app: Sphinx) -> None:
    app.add_transform(SettingIndex)
