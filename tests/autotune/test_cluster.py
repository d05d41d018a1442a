"""Measuring on the workers of a Dask cluster: a local one, of separate processes, some of which are lost."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason="needs the package `distributed`")

from tcomp.autotune.measurement.measurer import Cluster as Address, ClusterMeasurer
from tcomp.autotune.measurement.results import Limits, Measurement
from tcomp.errors import InputError
from tcomp.target import Target
from tests.autotune.faults import task

HOST = Target.host()
LIMITS = Limits(building=120, running=60, rounds=100_000, seconds=1.0)  # a candidate takes a second


class Cluster:
    """A scheduler and workers, which are started one by one."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self._options = options
        self._file, self.processes = folder / "scheduler.json", list[subprocess.Popen[bytes]]()
        self._start("scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(self._file))
        end = time.monotonic() + 60
        while not self._file.exists() and time.monotonic() < end:
            time.sleep(0.05)

    @property
    def address(self) -> str:
        return str(json.loads(self._file.read_text())["address"])

    def worker(self, name: str) -> subprocess.Popen[bytes]:
        options = (
            "--nthreads",
            "1",
            "--no-nanny",
            "--no-dashboard",
            "--worker-port",
            "0",
            "--name",
            name,
            "--resources",
            f"{HOST.machine}=1",
        )
        return self._start("worker", "--scheduler-file", str(self._file), *options)

    def _start(self, kind: str, *options: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DASK_LOGGING__DISTRIBUTED": "critical"}
        command = [sys.executable, "-m", "distributed.cli.dask_" + kind, "--host", "127.0.0.1", *self._options, *options]
        self.processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_worker_is_killed_in_the_middle(cluster: Cluster) -> None:
    first = cluster.worker("first")
    with ClusterMeasurer(cluster.address, builders=2, limits=LIMITS) as measurer:
        found: list[Measurement] = []
        results = measurer.measure_each(
            task(), [{}, {"fault": "segfault"}, {"fault": "wrong"}, {"fault": "refusing"}, {"fault": "printing"}, {}]
        )
        found.append(next(results))
        assert found[0].status == "ok" and len(found[0].seconds) > 100, found
        rest = threading.Thread(target=lambda: found.extend(results))
        rest.start()
        time.sleep(0.3)  # a job is at work
        first.send_signal(signal.SIGKILL)
        cluster.worker("second")
        rest.join(120)
        assert [m.status for m in found] == ["ok", "crash", "wrong", "refused", "ok", "ok"], found


def test_nobody_is_such_a_machine(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcomp.autotune.measurement.measurer._POLL", 0.2)
    measurer = ClusterMeasurer(cluster.address, builders=1, limits=LIMITS)
    measurer._patience = 3  # the cluster answers within that time on a busy machine, too
    with measurer:
        (got,) = measurer.measure(task(), [{}])
        assert (got.status, got.reason) == ("error", f"no worker of the cluster is a `{HOST.machine}`")


def test_there_is_no_cluster() -> None:
    with pytest.raises(InputError, match="there is no Dask cluster at tcp://127.0.0.1:1"):
        ClusterMeasurer("tcp://127.0.0.1:1", builders=1, patience=0.5)


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(InputError, match="there is no Dask cluster at") as raised:
            ClusterMeasurer(f"tcp://127.0.0.1:{server.getsockname()[1]}", builders=1, patience=0.5)
        assert "no answer within 1 s" in str(raised.value)


def test_failed_clients_are_not_left_to_the_garbage_collector() -> None:
    """Dask's clients close themselves when they are collected, which is a deadlock while another client is starting."""
    from distributed import Client

    gc.disable()
    try:
        with pytest.raises(InputError, match="there is no Dask cluster at"):
            Address("tls://127.0.0.1:1").connect(0.5)  # no certificates: a TypeError before any connection
        assert all(one.status == "closed" for one in gc.get_objects() if isinstance(one, Client))
    finally:
        gc.enable()


# ---------------------------------------------------------------- TLS


def certificates(folder: Path, *names: str) -> None:
    """An authority (`ca.pem`), and certificates that it signed, `NAME.pem` and `NAME.key`. Made by OpenSSL."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    folder.mkdir()
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "1", "-subj", "/CN=authority")
    for name in names:
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_an_encrypted_cluster(tmp_path: Path) -> None:
    """A client with a certificate of the cluster's authority measures there; one of another authority, or without, gets no connection."""
    certificates(tmp_path / "ours", "cluster", "client")
    certificates(tmp_path / "others", "client")

    def address(url: str, folder: str) -> Address:
        return Address(url, *(str(tmp_path / folder / name) for name in ("ca.pem", "client.pem", "client.key")))

    files = {"ca-file": "ca.pem", "cert": "cluster.pem", "key": "cluster.key"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}", str(tmp_path / "ours" / file))]
    cluster = Cluster(tmp_path, ["--protocol", "tls", *options])
    try:
        cluster.worker("first")
        url = cluster.address
        assert url.startswith("tls://")
        with ClusterMeasurer(address(url, "ours"), builders=1, limits=LIMITS) as measurer:
            (got,) = measurer.measure(task(), [{}])
            assert got.status == "ok", got
        for wrong in (address(url, "others"), Address(url), Address(url.replace("tls", "tcp"))):
            with pytest.raises(InputError, match="there is no Dask cluster at"):
                ClusterMeasurer(wrong, builders=1, patience=2.0)
    finally:
        cluster.close()


def test_certificates_that_are_of_no_use(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--cluster-cert, --cluster-key is missing"):
        Address("tls://127.0.0.1:1", ca="ca.pem").connect(0.5)
    with pytest.raises(InputError, match=r"tcp://127\.0\.0\.1:1 is not encrypted"):
        Address("tcp://127.0.0.1:1", "ca.pem", "a.pem", "a.key").connect(0.5)
    with pytest.raises(InputError, match=r"there is no Dask cluster at tls://"):
        Address("tls://127.0.0.1:1", *(str(tmp_path / name) for name in ("ca.pem", "a.pem", "a.key"))).connect(0.5)
