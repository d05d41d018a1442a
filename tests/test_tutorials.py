"""The tutorials run, and say what they promise; so does the session in docs/schedules.md."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
LAST_WORDS = {
    "01": "outside its range of 1 to 64",
    "02": "right",
    "03": "95-program.txt",
    "04": "The same bits: True",
    "05": "of the peak",
    "06": "of the peak",
    "07": "right result: True",
    "08": "shorten the loop, or enlarge the array",
    "09": "right; tiles",
    "10": "plain C computes the same",
    "11": "the loss is below 0.01",
}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_tutorial(path, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TCOMP_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert LAST_WORDS[path.name[:2]] in done.stdout.splitlines()[-1], done.stdout[-500:]


def test_page_of_schedules():
    """The session in docs/schedules.md prints what the page shows."""
    text = (ROOT / "docs/schedules.md").read_text()
    section = text.split("## Write your own schedule")[1].split("\n## ")[0]
    examples = doctest.DocTestParser().get_doctest(section, {}, "schedules", "docs/schedules.md", 0)
    report = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=report.append)
    assert not failed and tried > 10, "".join(report)
