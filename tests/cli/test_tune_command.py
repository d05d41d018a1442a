"""`tcomp tune`, `db`, `report` and `compile --database`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tcomp.autotune.database.entries import Record, Session
from tcomp.autotune.database.store import Database
from tcomp.autotune.measurement.results import Measurement, Outcome
from tcomp.cli.options import parse_time
from tcomp.errors import InputError
from tcomp.schedules.knobs import encode


@pytest.fixture(scope="session")
def tuned(models, cache, tmp_path_factory, command):
    """A database of a tuning of "mlp" with 3 trials, and what was printed."""
    path = tmp_path_factory.mktemp("tuned") / "tune.db"
    options = ("--dim", "batch=8", "--trials", 3, "--threads", 1, "--workers", 1)
    return path, command.json("tune", models["mlp"], "--database", path, *options)


@pytest.mark.parametrize("command", [("tune",), ("report",), ("db", "show"), ("db", "export"), ("db", "import"), ("db", "merge")])
def test_help_has_examples(tcomp, command):
    text = tcomp(*command, "--help").stdout
    assert f"tcomp {' '.join(command)}" in text.partition("Examples:")[2] and "--debug" in text and "--json" in text


def test_tune(tuned):
    path, record = tuned
    assert record["trials"] == 3 and record["ratio"] <= 1 and not record["interrupted"]
    assert {"compile", "build", "measure", "search", "confirm"} <= record["seconds"].keys()
    assert all(k["before"] > 0 and k["calls"] == 1 for k in record["kernels"])
    assert Path(record["database"]) == path


def test_tune_says_what_was_gained(tcomp, models, tuned):
    done = tcomp("tune", models["mlp"], "--dim", "batch=8", "--trials", 1, "--threads", 1, "--workers", 1, "--database", "t.db")
    assert re.search(r"1 trial of \d+ kernels?; ", done.stdout)
    assert "of the untuned model's time" in done.stdout or "the model stays as it is" in done.stdout


def test_resume_needs_no_model(tcomp, tuned, tmp_path):
    path, _ = tuned
    copy = tmp_path / "copy.db"
    tcomp("db", "merge", copy, path)
    assert "nothing to resume" in tcomp("tune", "--resume", "--database", copy, status=2).output  # sessions stay where they are
    assert "give a further trials" in tcomp("tune", "--resume", "--database", path, status=2).output
    record = tcomp.json("tune", "--resume", "--database", path, "--trials", 1)
    assert record["trials"] == 4


def test_mistakes(tcomp, models, tuned):
    assert "there is no model" in tcomp("tune", status=2).output
    assert "`soon` is not a time" in tcomp("tune", models["mlp"], "--budget", "soon", status=2).output
    assert "the size batch is open" in tcomp("tune", models["mlp"], "--trials", 1, status=2).output
    assert "--target comes with a model" in tcomp("tune", "--resume", "--target", "cpu", status=2).output
    assert "there is no file" in tcomp("tune", "--resume", "--database", "none.db", status=2).output
    assert "there is no file" in tcomp("db", "show", "none.db", status=2).output
    assert "is one number" in tcomp("tune", models["mlp"], "--size", "batch=1..4", status=2).output


@pytest.mark.parametrize("text, seconds", [("90", 90), ("60s", 60), ("1.5m", 90), ("2h", 7200)])
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1d", "1e9", "60 s m", "inf", "nan"])
def test_no_times(text):
    with pytest.raises(InputError):
        parse_time(text)


def test_ctrl_c_ends_the_search_and_tells(models, tmp_path):
    command = [
        sys.executable,
        "-m",
        "tcomp",
        "tune",
        models["mlp"],
        "--dim",
        "batch=8",
        "--trials",
        "1000",
        "--threads",
        "1",
        "--workers",
        "1",
    ]
    process = subprocess.Popen(map(str, command), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip
    end = time.monotonic() + 90
    while time.monotonic() < end:
        time.sleep(0.2)
        if (tmp_path / "tune.db").exists():
            with Database(tmp_path / "tune.db") as entries:
                if len(entries.records()) > 1 or process.poll() is not None:
                    break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode in (0, 130)  # 0: the space was searched to its end before
    assert "tune --resume" in output or process.returncode == 0


# ---------------------------------------------------------------- databases


def test_show(tcomp, tuned):
    path, _ = tuned
    rows = tcomp.json("db", "show", path)["tasks"]
    assert rows and all(re.fullmatch("[0-9a-f]{64}", r["key"]) for r in rows)
    table = tcomp("db", "show", path).stdout
    assert all(r["key"][:12] in table for r in rows)
    busy = max(rows, key=lambda r: r["records"])
    detail = tcomp.json("db", "show", path, "--task", busy["key"][:12])
    assert len(detail["entries"]) == busy["records"] >= 2 and detail["entries"][0]["status"] == "ok"
    assert "decisions" in tcomp("db", "show", path, "--task", busy["key"][:12]).stdout
    assert "0 tasks have keys" in tcomp("db", "show", path, "--task", "zz", status=2).output


def test_export_import_merge(tcomp, tuned):
    path, _ = tuned
    count = tcomp.json("db", "export", path, "-o", "out.jsonl")["entries"]
    assert len(Path("out.jsonl").read_text().splitlines()) == count + 1
    assert tcomp.json("db", "import", "new.db", "out.jsonl")["entries"] == count
    assert "up to date: 0 entries" in tcomp("db", "merge", "new.db", path).stdout
    Path("bad.jsonl").write_text(Path("out.jsonl").read_text().replace('"ok"', '"fine"', 1))
    assert re.search(r"bad\.jsonl:\d+", tcomp("db", "import", "new.db", "bad.jsonl", status=2).output)
    Path("bad.db").write_text("x" * 5000)
    assert "bad.db" in tcomp("db", "show", "bad.db", status=2).output


def test_compile_follows_a_database(tcomp, models, tuned):
    path, _ = tuned
    with Database(path) as entries:
        tuned_kernels = sum(entries.choice(t.key) not in (None, "{}") for t in entries.tasks())
    record = tcomp.json("compile", models["mlp"], "--dim", "batch=8", "--threads", 1, "--database", path)
    assert record["tuned"] == tuned_kernels and record["not_followed"] == []
    assert f"scheduled as {path} says" in tcomp("compile", models["mlp"], "--dim", "batch=8", "--threads", 1, "--database", path).stdout
    other = tcomp("compile", models["mlp"], "--dim", "batch=8", "--threads", 2, "--database", path).stdout
    assert "records are for 1 threads, not for 2" in other
    assert "there is no file" in tcomp("compile", models["mlp"], "--database", "none.db", status=2).output


# ---------------------------------------------------------------- the page


class Page(HTMLParser):
    """Checks that a page is well-formed, loads nothing, and runs nothing."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert tag not in ("script", "iframe", "object", "embed", "link", "img", "base", "form")
        assert not [n for n, v in attrs if n.startswith("on") or n in ("src", "href") or "javascript" in (v or "")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def test_report(tcomp, tuned, tmp_path):
    path, _ = tuned
    assert "wrote page.html" in tcomp("report", path, "-o", "page.html").stdout
    page = Page((tmp_path / "page.html").read_text())
    text = " ".join(page.words)
    assert "svg" in page.tags and "polyline" in page.tags and "circle" in page.tags
    assert all(word in text for word in ("Runs", "Kernels", "Convergence", "Measured on", "softmax"))


def test_a_page_about_nothing(tcomp, tmp_path):
    Database(tmp_path / "empty.db").close()
    tcomp("report", "empty.db")
    Page((tmp_path / "report.html").read_text())


def test_what_the_database_says_is_text(tcomp, tuned, tmp_path):
    path, _ = tuned
    tcomp("db", "merge", "evil.db", path)
    with Database(tmp_path / "evil.db") as entries:
        task = entries.tasks()[0]
        evil = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
        for n, measured in enumerate((Measurement(Outcome.CRASH, reason=evil), Measurement(Outcome.OK, (1e-9,)))):
            cost = 1e-9 if measured.seconds else None
            entries.add(Record(task, encode({evil: evil}), "", measured, cost, 1e-9, {evil: evil}, float(n)))
    tcomp("report", "evil.db")
    text = (tmp_path / "report.html").read_text()
    Page(text)
    assert "<script" not in text and "&lt;script&gt;" in text
    json.dumps(tcomp.json("db", "show", "evil.db"))


def test_what_is_shown_while_it_runs(tuned):
    from rich.console import Console

    from tcomp.autotune.progress import Status, TaskStatus
    from tcomp.cli.tuning import _table

    with Database(tuned[0]) as entries:
        task = entries.tasks()[0]
    tasks = [TaskStatus(task, f"conv [{n}] + relu", 1 + n % 2, 1e-3, 4e-3 / (n + 1), n, n // 2, 0.8, known=True) for n in range(20)]
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(_table(Status("search", 12.0, 60.0, 7, None, tasks, tasks[1], 0.13), 150))
    text = console.export_text()
    for part in (
        "search; 12 s of 60 s; 7 trials; 48 s left",
        "off by 13%",
        "conv [0] + relu",
        "2 x conv [1] + relu",
        "31%",
        "<-",
        "8 other kernels",
    ):
        assert part in text, (part, text)


def test_names_are_cut_and_numbers_are_not(tuned):
    from rich.console import Console

    from tcomp.autotune.progress import Status, StopReason, TaskStatus
    from tcomp.cli.tuning import _table

    with Database(tuned[0]) as entries:
        task = entries.tasks()[0]
    long = " + ".join(["conv"] * 40) + "\x1b[31m"
    tasks = [TaskStatus(task, long, 12, 1e-5, 44.4e-6, 123, 17, 0.75, known=True), TaskStatus(task, "new\x1b[0m", 1, 1e-5, 1e-5)]
    tasks[0].stop, tasks[0].stop_detail = StopReason.NOT_MEASURED, "it crashed " * 30
    for width in (80, 120):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(_table(Status("search", 1.0, 60.0, 0, None, tasks), width))
        text = console.export_text()
        assert "44.4 µs" in text and "33.3 µs" in text and "30%" in text and " 123 " in text and "\x1b" not in text, text
        (new,) = (line for line in text.splitlines() if line.startswith("new"))
        assert new.split()[1:] == ["-", "-", "-", "0", "0"] and "0 µs" not in text


def test_a_database_names_no_cluster(tcomp, tuned, tmp_path, models):
    """Who answers there could run anything here."""
    tcomp("db", "merge", "a.db", tuned[0])
    for options, said in ({"cluster": "tcp://127.0.0.1:1"}, None), ({"seed": "x"}, "'seed'"), ({"cheese": 1}, "'cheese'"):
        with Database(tmp_path / "a.db") as entries:
            entries.add(Session("0" * 64, {"model": str(models["mlp"]), "dims": {"batch": 1}} | options, 1.0))
        printed = tcomp("tune", "--resume", "--database", "a.db", "--trials", "1", status=2).output
        assert "nothing to resume" in printed and "Dask" not in printed if said is None else said in printed


def test_the_axes_of_the_report_are_in_the_unit_of_its_tables(tcomp, tuned, tmp_path):
    tcomp("report", tuned[0])
    text = (tmp_path / "report.html").read_text()
    assert "predicted (µs)" in text and "(s)" not in text
