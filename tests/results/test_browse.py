"""`pdsim report --serve`: a sweep is explored in a browser, on loopback alone."""

import http.client
import re
import signal
import subprocess
import sys
import threading

import pytest

from pdsim.cli import browse, kept
from pdsim.cli.main import main
from tests.support.browser import MISSING, Browser

SMALL = ["hw=2xh200", "model=qwen3-8b", "parallel=tp1", "workload=smoke"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    output = tmp_path_factory.mktemp("swept")
    words = [*SMALL, "workload.rate=1,4,8", "executor.workers=1", "--quiet", f"output={output}"]
    assert main(["sweep", *words]) == 0
    return next(output.iterdir())


@pytest.fixture(scope="module")
def port(sweep):
    with browse.server(sweep, kept._content) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        yield pages.server_port
        pages.shutdown()
        thread.join(10)


def get(port, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def names(sweep):
    return sorted(path.name for path in sweep.iterdir() if path.is_dir())


def test_the_sweep_and_each_point_have_a_page(sweep, port):
    status, text = get(port, "/")
    assert status == 200
    for name in names(sweep):
        assert f'<option value="{name}">' in text
        point = get(port, f"/point?name={name}")[1]
        assert "pdsim report of a run" in point
        assert f'<option value="{name}" selected>' in point


def test_another_slo_ranks_anew_and_other_sites_get_nothing(port):
    assert "ttft &lt;= 1 ms" in get(port, "/?slo=ttft=1ms")[1]
    assert get(port, "/?slo=ttft")[0] == 400
    assert get(port, "/", host="evil.example")[0] == 403


@pytest.mark.parametrize("path", ["/point?name=../..", "/point?name=.", "/point", "/run.json", "//etc/passwd"])
def test_nothing_but_pages_of_the_sweep_is_served(port, path):
    assert get(port, path) == (404, "no such page; the report is at /")


def test_the_command_prints_where_and_ends_by_ctrl_c(sweep):
    command = [sys.executable, "-m", "pdsim", "report", str(sweep), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = process.stdout.readline()
    port = int(re.match(r"http://127\.0\.0\.1:(\d+) ", address)[1])
    assert get(port, "/")[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(MISSING, reason="Chromium or Playwright is not installed")
def test_a_click_on_a_point_opens_its_report(sweep, port):
    browser = Browser()
    try:
        browser.open(f"http://127.0.0.1:{port}/", width=360)
        seen = "[...document.querySelectorAll('#explore *')].every(it => it.getBoundingClientRect().right < 360)"
        assert browser.evaluate(seen)
        browser.open(f"http://127.0.0.1:{port}/", width=800)
        for point in browser.page.locator(".plot .points path").all():
            browser.page.mouse.move(0, 0)
            browser.page.wait_for_selector(".hovertext", state="detached")
            assert not point.evaluate("it => it.closest('[clip-path]')")
            point.evaluate("it => it.scrollIntoView({block: 'center', behavior: 'instant'})")
            box = point.bounding_box()
            place = round(box["x"] + box["width"] / 2), round(box["y"] + box["height"] / 2)
            browser.page.mouse.move(*place)
            shown = browser.page.text_content(".hovertext")
            assert shown.endswith(tuple(names(sweep)))
        browser.page.mouse.click(*place)
        browser.page.wait_for_url(re.compile("/point[?]"))
        assert browser.evaluate("new URLSearchParams(location.search).get('name')") in names(sweep)
        browser.page.click("#explore a")
        browser.page.wait_for_url(f"http://127.0.0.1:{port}/")
        browser.page.fill("[name=slo]", "ttft=2s")
        browser.page.click("#explore form button")
        browser.page.wait_for_url(re.compile("slo=ttft%3D2s$"))
        assert browser.complaints == []
    finally:
        browser.close()
