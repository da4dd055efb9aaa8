"""No page hides code or tables on the screen of a desk, a tablet or a phone; `make docs` first, and Chromium."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parent.parent / "out" / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1400, 1000, 400)
#: Below this width, in pixels, code scrolls sideways in its own box.
NARROW = 900

# What is cut on a page that a frame shows: its kind, and the text that it begins with.
SCRIPT = """
<body><script>
const cut = frame => {
  const page = frame.contentDocument, found = [];
  const style = part => frame.contentWindow.getComputedStyle(part);
  const scrolls = part => ["auto", "scroll"].includes(style(part).overflowX);
  const note = (kind, part) => found.push(`${kind}: ${part.innerText.slice(0, 60)}`);
  const article = page.querySelector(".bd-article-container");
  if (article.scrollWidth > article.clientWidth + 1) found.push(`page: ${article.scrollWidth} pixels wide`);
  for (const code of page.querySelectorAll("article pre"))
    if (code.scrollWidth > code.clientWidth + 1 && (frame.width > NARROW || !scrolls(code))) note("code", code);
  for (const table of page.querySelectorAll("article table"))
    if (table.offsetWidth > table.parentElement.clientWidth + 1 && !scrolls(table.parentElement)) note("table", table);
  const sizes = ["h1", "h2", "h3"].map(rank => page.querySelector(`article ${rank}`)).filter(title => title)
    .map(title => parseFloat(style(title).fontSize));
  if (sizes.some((size, rank) => size >= sizes[rank - 1])) found.push(`titles: ${sizes} pixels high`);
  return found;
};
const measure = async () => {
  const result = {};
  for (const width of WIDTHS) for (const page of NAMES) {
    const frame = Object.assign(document.createElement("iframe"), {width, height: 900, src: page});
    await new Promise(loaded => { frame.onload = loaded; document.body.append(frame); });
    const found = cut(frame);
    if (found.length) result[`${page} at ${width}`] = found;
    frame.remove();
  }
  document.body.innerHTML = "<pre id='result'></pre>";
  document.body.firstChild.textContent = JSON.stringify(result);
};
measure();
</script></body>
"""


class Measured(SimpleHTTPRequestHandler):
    """The pages, and one more that measures them."""

    def do_GET(self) -> None:
        if self.path != "/measure":
            return super().do_GET()
        names = [path.relative_to(PAGES).as_posix() for path in sorted(PAGES.rglob("*.html"))]
        names = [name for name in names if "_static/" not in name and name not in ("search.html", "genindex.html")]
        constants = f"const WIDTHS = {json.dumps(WIDTHS)}, NARROW = {NARROW}, NAMES = {json.dumps(names)};"
        content = SCRIPT.replace("<script>", f"<script>{constants}").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.skipif(not (PAGES / "index.html").exists(), reason="the pages are not built: make docs")
def test_nothing_is_cut_at_any_width(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Measured, directory=str(PAGES))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/measure"
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
        # In the browser's own time, which stands still while a page is loaded.
        command = [str(BROWSER), *options, "--virtual-time-budget=1000000", address]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
        server.shutdown()
    match = re.search(r'<pre id="result">(.*?)</pre>', text, re.DOTALL)
    assert match is not None, text[-500:]
    cut = json.loads(html.unescape(match[1]))
    assert not cut, json.dumps(cut, indent=1)
