"""The report in a real browser, where one is installed: it fits a phone, asks nothing of the outside, and is quiet."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_page import QUICK

from hotset.analysis.analyse import analyse
from hotset.analysis.page import to_page
from hotset.trace.synth import SynthConfig, synthesise

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (400, 1200)
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "reference-experts.html"
ASK = """
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(each => ({
    width: each.clientWidth,
    needed: each.contentDocument.documentElement.scrollWidth,
    resources: each.contentWindow.performance.getEntriesByType("resource").map(one => one.name),
    figures: each.contentDocument.querySelectorAll("svg").length,
  }));
  document.body.dataset.found = JSON.stringify(found);
});
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.parametrize("source", ["drawn", "example"])
def test_the_page_fits_and_asks_for_nothing(tmp_path: Path, source: str) -> None:
    page = EXAMPLE.read_text(encoding="utf-8")
    if source == "drawn":
        trace = synthesise(SynthConfig(layers=4, experts=16, top_k=2, requests=6, prompt_tokens=8, new_tokens=24))
        page = to_page(analyse("drawn", trace, QUICK))[0]
    frames = [f'<iframe width="{width}" height="800" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS]
    (tmp_path / "frames.html").write_text(f"<!doctype html><body>{''.join(frames)}{ASK}</body>", encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
               f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frames.html'}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = re.search(r'data-found="([^"]*)"', done.stdout)
    assert told is not None, done.stderr[-2000:]
    found = json.loads(html.unescape(told[1]))
    assert [each["width"] for each in found] == list(WIDTHS)
    for each in found:
        assert each["needed"] <= each["width"], "the page is wider than its window"
        assert each["resources"] == []
        assert each["figures"] > 5
    assert ":CONSOLE" not in done.stderr, done.stderr
