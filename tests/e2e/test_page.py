"""The page in a real browser, beside real runs."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
from lab import TRAIN, Run
from runs import environment

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def serve(*roots, port=0):
    """`draftsmith watch --web`; the process and the address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", "watch", *map(str, roots), "--web", str(port)],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_the_page_follows_a_run_shows_why_it_failed_and_outlives_its_server(
    extracted, browser, tmp_path
):
    run = Run(extracted, tmp_path / "run", train={**TRAIN, "epochs": 6}).start("not_finite@60")
    run.training(2)
    server, url = serve(run.root)
    page = browser.new_page(viewport={"width": 390, "height": 844})
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.on("request", lambda r: None if r.url.startswith((url, "data:")) else errors.append(r.url))
    page.goto(url)
    page.wait_for_selector(".TRAINING .facts")
    first = page.inner_text(".facts b")
    page.wait_for_function(
        "text => document.querySelector('.facts b').textContent != text", arg=first
    )
    page.wait_for_selector("figure polyline")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing sticks out"
    page.wait_for_selector(".FAILED .failure", timeout=60_000)
    assert re.match("not finite: .*sample", page.inner_text(".failure b"))
    assert "FAILED" in page.title()
    assert run.end() == 2

    server.send_signal(signal.SIGTERM)
    server.wait(10)
    page.wait_for_selector("#link.lost")
    assert run.again() == 0
    server, again = serve(run.root, port=int(re.findall(r":(\d+)/", url)[0]))
    assert again == url
    page.wait_for_selector(".DONE", timeout=20_000)
    page.wait_for_selector("#link:not(.lost)")
    page.click("text=report")
    page.wait_for_load_state()
    assert "tau" in page.content()
    assert not errors, errors
    server.kill()


def test_several_runs_on_one_page(extracted, browser, tmp_path):
    (tmp_path / "other").mkdir()
    shutil.copytree(extracted, tmp_path / "other" / "one")
    server, url = serve(tmp_path / "other" / "one", extracted)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    page.wait_for_selector("section:nth-of-type(2)")
    assert page.locator("section.run").count() == 2
    server.kill()
