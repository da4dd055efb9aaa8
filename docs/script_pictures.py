"""Takes the pictures that a script of the pages has written into its page, and undoes what it has set."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from sphinx_gallery.scrapers import figure_rst

#: The order of the pages.
ORDER = [
    "first_jacobian",
    "pruned_network",
    "recurrent_scan",
    "equation",
    "newton",
    "bundle_adjustment",
    "power_flow",
    "optimal_control",
    "pruned_flop",
    "sparse_training",
    "scanned_loop",
    "recurrent_speed",
    "delayed_gradients",
    "simulation",
    "schedules",
    "patterns",
]


def position(script: str) -> int:
    """The place of a script on its page of tiles."""
    return ORDER.index(Path(script).stem)


def move_pictures(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Move the PNG files beside a script into the gallery's folder; the markup that shows them.

    The library draws into files, without a window, so that Sphinx-Gallery's own scraper of figures finds none.
    """
    written = sorted(Path(variables["src_file"]).parent.glob("*.png"))
    targets = [next(variables["image_path_iterator"]) for _ in written]
    for source, target in zip(written, targets, strict=True):
        shutil.move(source, target)
    return figure_rst(targets, gallery["src_dir"])


def reset(gallery: dict[str, Any], script: str) -> None:
    """Undo what a script sets for the whole process."""
    torch.set_default_dtype(torch.float32)
