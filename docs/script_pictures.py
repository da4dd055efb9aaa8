"""Takes the pictures that a script of the pages has written into its page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import figure_rst


def move_pictures(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Move the PNG files beside a script into the gallery's folder; the markup that shows them.

    The library draws into files, without a window, so that Sphinx-Gallery's own scraper of figures finds none.
    """
    written = sorted(Path(variables["src_file"]).parent.glob("*.png"))
    targets = [next(variables["image_path_iterator"]) for _ in written]
    for source, target in zip(written, targets, strict=True):
        shutil.move(source, target)
    return figure_rst(targets, gallery["src_dir"])
