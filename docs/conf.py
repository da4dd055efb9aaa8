"""How Sphinx builds the pages; `make docs` runs it on a copy, so that what it generates stays under build/docs."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import jacsparse
from benchmarks._pages import write_pages

sys.path.insert(0, str(Path(__file__).parent))

write_pages(Path(__file__).parent)

project = "jacsparse"
author = copyright = "The jacsparse project"
version = release = jacsparse.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["scripts", "generated"]
templates_path = ["_templates"]
# Names between single backticks, as docstrings write them.
default_role = "py:obj"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_attributes_as_param_list = True

# What a copy button leaves out, with all that a block prints.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "jacsparse"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
# These pages stand alone.
html_sidebars = {page: [] for page in ("index", "papers", "which-one", "stability")}
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
}


def _inventories(sites: dict[str, str]) -> dict[str, tuple[str, None]]:
    """The sites whose list of names can be fetched: a machine without a network builds without those links."""
    reachable = {}
    for name, address in sites.items():
        try:
            urllib.request.urlopen(f"{address}objects.inv", timeout=5).close()
        except OSError:
            continue
        reachable[name] = (address, None)
    return reachable


intersphinx_mapping = _inventories(
    {
        "torch": "https://docs.pytorch.org/docs/stable/",
        "numpy": "https://numpy.org/doc/stable/",
        "scipy": "https://docs.scipy.org/doc/scipy/",
    }
)


sphinx_gallery_conf = {
    "examples_dirs": ["scripts/tutorials", "scripts/gallery"],
    "gallery_dirs": ["tutorials", "gallery"],
    "filename_pattern": r"\.py$",
    "image_scrapers": ("script_pictures.move_pictures",),
    "reset_modules": ("script_pictures.reset", "matplotlib"),
    "download_all_examples": False,
    "write_computation_times": False,
    "within_subsection_order": "script_pictures.position",
    "remove_config_comments": True,
    "min_reported_time": 1e9,
    "abort_on_example_error": True,
    "capture_repr": ("__repr__",),
    "show_memory": False,
}


def _escape_stars(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Shapes as in ``(batch, *input_shape)`` are no emphasis."""
    for number, line in enumerate(lines):
        if "`" not in line and ">>>" not in line:
            lines[number] = re.sub(r"(?<=[ (])\*(?=\w)", r"\\*", line)


def _link_names(app: Any, tree: nodes.document) -> None:
    """Make links of public names in inline code; a name that no page documents stays code."""
    for literal in list(tree.findall(nodes.literal)):
        name = re.fullmatch(r"(jacsparse(?:\.\w+)+)(?:\(\))?", literal.astext())
        if name and not isinstance(literal.parent, addnodes.pending_xref | nodes.reference | nodes.title):
            target = {"refdomain": "py", "reftype": "obj", "reftarget": name[1], "refdoc": app.env.docname}
            literal.replace_self(addnodes.pending_xref("", literal.deepcopy(), refexplicit=False, **target))


def setup(app: Any) -> None:
    """Called by Sphinx; numpydoc's own function comes first."""
    app.connect("doctree-read", _link_names)
    app.connect("autodoc-process-docstring", _escape_stars, priority=900)
