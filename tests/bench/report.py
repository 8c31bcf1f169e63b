"""The report of a long run: how long it takes to make, how large it is, and whether a browser stays quick with it.

    python -m tests.bench.report [--small]

The run has 5,000 updates, 100,000 responses kept as text, and the events of four actors; it is made up
(`tests/launch/tools/report/folder.py`). Without a Chromium the browser's part is left out.
"""

import pathlib
import resource
import tempfile
import time

from absl import app

from launch.tools.report.build import write_report
from tests.bench.harness import result
from tests.launch.tools.report.browser import PROGRAM, Page, browser
from tests.launch.tools.report.folder import make_folder

TEXT = "the sum of the first numbers is found by adding them one after the other so that nothing is left over "
AIMS = {"make_s": 60.0, "bytes": 6_000_000, "open_s": 10.0, "search_s": 1.0, "round_s": 1.0, "problems": 0}


def main(argv: list[str]) -> None:
    """Makes and opens a report, writes the results, prints the JSON line."""
    del argv
    steps, num_responses = (50, 1000) if result.SMALL.value else (5000, 100_000)
    texts = tuple(TEXT[i % 7 :] * (1 + i % 5) for i in range(11))
    with tempfile.TemporaryDirectory() as root:
        folder = make_folder(pathlib.Path(root) / "run", steps=steps, groups=num_responses // 8, actors=4, texts=texts)
        target = pathlib.Path(root) / "report.html"
        start_s = time.monotonic()
        num_bytes = write_report([folder], target)
        values: dict[str, float | int | bool] = {
            "steps": steps,
            "responses": num_responses,
            "make_s": time.monotonic() - start_s,
            "bytes": num_bytes,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "run_folder_mib": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20,
        }
        if PROGRAM is not None:
            with browser() as page:
                values |= use(page, target)
    aims = {name: result.at_most(bound, "ours") for name, bound in AIMS.items() if name in values}
    result.finish("report", __doc__, values=values, aims=aims, beside="nothing else of ours")


def use(page: Page, target: pathlib.Path) -> dict[str, float | int | bool]:
    """Opens the report, searches it and turns to another round, each timed in the browser."""
    start_s = time.monotonic()
    page.open(target.as_uri())
    open_s = time.monotonic() - start_s
    search = (
        "(async () => { const at = (id) => document.getElementById(id);"
        " const box = at('sample-search'), count = at('sample-count');"
        " const before = count.textContent, start = performance.now(); box.value = 'question 96: ';"
        " box.dispatchEvent(new Event('input'));"
        " while (count.textContent === before) await new Promise((f) => setTimeout(f, 5));"
        " return (performance.now() - start) / 1000; })()"
    )
    turn = (
        "(async () => { const start = performance.now(); document.getElementById('round-before').click();"
        " await new Promise((f) => requestAnimationFrame(() => setTimeout(f, 0)));"
        " return (performance.now() - start) / 1000; })()"
    )
    return {
        "open_s": open_s,
        "search_s": page.run(search),
        "round_s": page.run(turn),
        "responses_shown": int(
            page.run("document.getElementById('sample-count').textContent.match(/of ([\\d,]+)/)[1]").replace(",", "")
        ),
        "thinned_said": page.run("document.querySelectorAll('.thinned').length > 0"),
        "problems": len(page.problems),
    }


if __name__ == "__main__":
    app.run(main)
