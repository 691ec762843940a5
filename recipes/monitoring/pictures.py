"""Pictures of what `watch` shows of runs, now: the page, wide and narrow, and the terminal.

    python recipes/monitoring/pictures.py OUT RUN ...

Needs Playwright and a Chromium (`chromium-headless-shell` on Debian).
"""

import io
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import uvicorn
from playwright.sync_api import sync_playwright
from rich.console import Console, Group

from draftsmith.monitor import terminal, web
from draftsmith.monitor.history import History

SIZES = {"wide": (1280, 760), "narrow": (390, 844)}


def main() -> None:
    out, roots = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    out.mkdir(parents=True, exist_ok=True)
    server = uvicorn.Server(uvicorn.Config(web.app(roots, None), port=0, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(Group(*(terminal.panel(History(root).board(), console) for root in roots)))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell")
        )
        for name, (width, height) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, device_scale_factor=1.5
            )
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("section.run")
            page.screenshot(path=out / f"page-{name}.png", full_page=name == "wide")
        drawing = Path(folder) / "terminal.html"
        drawing.write_text(console.export_html())
        page = browser.new_page(viewport={"width": 980, "height": 200}, device_scale_factor=1.5)
        page.goto(drawing.as_uri())
        page.screenshot(path=out / "terminal.png", full_page=True)
        browser.close()
    server.should_exit = True


if __name__ == "__main__":
    main()
