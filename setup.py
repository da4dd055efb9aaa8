"""The page of a package index, made of the README: relative links and pictures lead nowhere there.

With ``JACSPARSE_ADDRESS``, as in ``https://example.org/jacsparse/blob/main``, they lead to the repository's files;
without it, links leave their texts and pictures are left out.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ADDRESS = os.environ.get("JACSPARSE_ADDRESS", "").rstrip("/")


def page(text: str, address: str) -> str:
    """The README's text without links that are relative."""

    def whole(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if target.startswith(("https://", "http://", "#")):
            return match[0]
        if address:
            return f"{picture}[{words}]({address}/{target}{'?raw=true' if picture else ''})"
        return "" if picture else words

    return re.sub(r"(!?)\[([^]]*)\]\(([^)]+)\)", whole, text)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=page(readme, ADDRESS), long_description_content_type="text/markdown")
