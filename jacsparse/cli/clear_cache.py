"""``jacsparse clear-cache``: empty the cache."""

from __future__ import annotations

import typer


def clear_cache() -> None:
    """Empty the cache: compiled kernels, symbolic results and features of sounds, which are made again when needed."""
    from ..models import SOUNDS
    from ..runtime import cache_directory, shelves

    # The import above registers the shelf of sounds.
    assert SOUNDS in shelves()
    before = sum(shelf.usage()[1] for shelf in shelves())
    for shelf in shelves():
        shelf.clear()
    after = sum(shelf.usage()[1] for shelf in shelves())
    typer.echo(f"{cache_directory()}: {(before - after) / 2**20:.1f} MiB removed")
    if after:
        raise OSError(f"{after / 2**20:.1f} MiB in {cache_directory()} cannot be removed; remove the folder by hand")
