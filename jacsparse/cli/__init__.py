"""The command line, with a file for each command."""

from .main import app

__all__ = ["app"]
