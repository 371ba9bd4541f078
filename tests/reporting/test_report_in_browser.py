"""The page in a browser: nothing fails, nothing is cut off, wide and narrow, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from saved_runs import write_run

from gqaconvert.reporting.report import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
               None)  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no headless browser here")

# Reads the geometry of the page in a frame of a given width, and leaves it as text.
_PROBE = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" src="report.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<pre id="found"></pre>
<script>
const frame = document.getElementById("frame"), faults = [];
addEventListener("error", event => faults.push(event.message));
frame.addEventListener("load", () => {
  const page = frame.contentDocument, root = page.documentElement;
  const box = each => { const b = each.getBoundingClientRect();
    return [b.left, b.top, b.width, b.height].map(Math.round); };
  const head = page.querySelector("#models tbody th[scope=row]");
  const scroller = page.querySelector(".scroll");
  scroller.scrollLeft = 400;
  const style = frame.contentWindow.getComputedStyle(page.body);
  const text = page.querySelector("figure svg text");
  document.getElementById("found").textContent = JSON.stringify({
    faults, width: root.clientWidth, scrollWidth: root.scrollWidth,
    figures: [...page.querySelectorAll("figure svg")].map(box),
    letters: text.getBoundingClientRect().height,
    firstColumn: box(head), scrolled: scroller.scrollLeft,
    tableWidth: page.querySelector("#models").offsetWidth,
    ground: style.backgroundColor, ink: style.color,
    drawn: frame.contentWindow.getComputedStyle(text).fill,
  });
});
</script>
"""


def look(folder: Path, width: int, *, dark: bool = False) -> dict:
    """Open a report in a frame of `width` pixels and return what its elements measure."""
    probe = folder / f"probe-{width}.html"
    probe.write_text(_PROBE.replace("WIDTH", str(width)), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1600,1000", "--virtual-time-budget=5000", "--dump-dom",
            probe.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("page")
    return report([write_run(base / "run")], base / "report").folder


@pytest.mark.parametrize("width", [360, 1400])
def test_everything_has_room(folder, width):
    seen = look(folder, width)
    assert seen["faults"] == []
    assert seen["width"] == width
    assert seen["scrollWidth"] == width  # the page never scrolls sideways; its tables do
    assert len(seen["figures"]) == 8
    for left, _, wide, high in seen["figures"]:
        assert left >= 0
        assert left + wide <= width
        assert wide > 300
        assert high > 200
    assert seen["letters"] >= 9
    left, _, wide, high = seen["firstColumn"]
    assert 0 <= left < 200
    assert wide > 80
    assert high > 15
    if width == 360:
        assert seen["scrolled"] > 0  # and the first column stayed where it is
        assert wide < width / 2
    else:
        assert seen["tableWidth"] <= 1400


def test_colours_follow_the_reader(folder):
    light, dark = look(folder, 1400), look(folder, 1400, dark=True)
    assert light["ground"] == "rgb(255, 255, 255)"
    assert light["ground"] != dark["ground"]
    for seen in (light, dark):
        assert contrast(seen["ink"], seen["ground"]) > 7
        assert seen["drawn"] == seen["ink"]


def contrast(one: str, other: str) -> float:
    """Ratio of luminances as in WCAG."""
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4
              for each in parts]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
