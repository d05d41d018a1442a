"""Models that come, are replaced, fail and go while the server runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcomp.errors import InputError
from tcomp.runtime import Artifact
from tcomp.serve.options import ModelOptions, read_model_options
from tests.serve.servers import Running, running
from tests.serve.test_http import binary, request

X = np.arange(16, dtype=np.float32).reshape(2, 8) / 8


def replace(artifact: Path, place: Path) -> None:
    """By renaming, as all writers of tcomp do."""
    shutil.copyfile(artifact, place.with_name(".new"))
    os.replace(place.with_name(".new"), place)


def plus(server: Running, version: str = "") -> float:
    """The k of the model plus."""
    status, answer, _ = server.ask("POST", f"/v2/models/plus{version}/infer", request(X))
    assert status == 200, answer
    return float(answer["outputs"][0]["data"][0])


def until(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_changes_of_the_folder_are_served(models: Path, artifacts: dict[str, Path]) -> None:
    with running(models, poll=0.05) as server:
        assert plus(server) == 2
        (models / "plus/10").mkdir()
        replace(artifacts["plus1"], models / "plus/10/m.tcomp")
        until(lambda: plus(server) == 1)  # 10 is higher than 2
        shutil.rmtree(models / "plus/10")
        until(lambda: plus(server) == 2)
        (models / "mlp.tcomp").unlink()
        until(lambda: server.ask("GET", "/v2/models/mlp/ready")[0] == 404)
        # It answers what it still computes; its series end after that.
        until(lambda: b'tcomp_instances{model="mlp"' not in server.ask("GET", "/metrics")[1])
        replace(artifacts["mlp"], models / "mlp.tcomp")
        until(lambda: server.ask("GET", "/v2/models/mlp/ready")[0] == 200)


def test_a_damaged_file_does_not_replace_a_model(models: Path, artifacts: dict[str, Path]) -> None:
    with running(models, management=True) as server:
        content = artifacts["plus1"].read_bytes()
        replace(artifacts["plus1"], models / "plus/2/m.tcomp")
        (models / "plus/2/m.tcomp").unlink()
        (models / "plus/2/m.tcomp").write_bytes(content[: len(content) // 2])
        status, answer, _ = server.ask("POST", "/v2/repository/models/plus/load", b"{}")
        assert status == 422 and "could not be loaded" in answer["error"]
        assert plus(server) == 2 and server.ask("GET", "/v2/health/ready")[0] == 200  # the old one answers
        replace(artifacts["plus1"], models / "plus/2/m.tcomp")
        assert server.ask("POST", "/v2/repository/models/plus/load", b"{}")[0] == 200
        assert plus(server) == 1 and server.ask("GET", "/v2/health/ready")[0] == 200


def test_loading_and_unloading(models: Path) -> None:
    with running(models, management=True, poll=0.02) as server:
        assert server.ask("POST", "/v2/repository/models/plus/unload", b"")[0] == 200
        time.sleep(0.1)  # looking at the folder does not bring it back
        status, answer, _ = server.ask("POST", "/v2/models/plus/infer", request(X))
        assert status == 503 and "unloaded" in answer["error"]
        rows = server.ask("POST", "/v2/repository/index", b"{}")[1]
        assert {"name": "plus", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"} in rows
        assert server.ask("POST", "/v2/repository/models/plus/load", b"{}")[0] == 200
        assert plus(server) == 2 and plus(server, "/versions/1") == 1
        for verb in ("load", "unload"):
            assert server.ask("POST", f"/v2/repository/models/none/{verb}", b"{}")[0] == 404
            assert server.ask("POST", f"/v2/repository/models/..%2f..%2fetc/{verb}", b"{}")[0] == 404


def test_no_request_is_lost_or_wrong_while_a_model_is_replaced(models: Path, artifacts: dict[str, Path]) -> None:
    """Versions 1 and 2 of the file take turns; every answer is that of one of them, for its own input."""
    wrong: list[Any] = []
    counts, stop = [0] * 3, threading.Event()

    def client(number: int, server: Running) -> None:
        generator = np.random.default_rng(number)
        while not stop.is_set():
            x = generator.standard_normal((1 + counts[number] % 3, 8), np.float32)
            status, answer, headers = server.ask("POST", "/v2/models/plus/infer", *binary(x))
            y = np.frombuffer(answer[int(headers["inference-header-content-length"]) :], np.float32) if status == 200 else np.zeros(0)
            if status != 200 or not any(np.array_equal(y, (x + k).ravel()) for k in (np.float32(1), np.float32(2))):
                wrong.append((status, answer))
            counts[number] += 1

    with running(models, poll=0.02) as server:
        threads = [threading.Thread(target=client, args=(n, server)) for n in range(len(counts))]
        for thread in threads:
            thread.start()
        for k in range(12):
            replace(artifacts[f"plus{1 + k % 2}"], models / "plus/2/m.tcomp")
            until(lambda k=k: plus(server) == 1 + k % 2)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong and min(counts) > 5


def test_only_signed_models_are_served(models: Path, artifacts: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need the package cryptography")
    from tcomp.runtime.artifact import read_artifact
    from tcomp.runtime.signing import sign
    from tests.runtime.test_signing import PRIVATE, PUBLIC

    (tmp_path / "public.pem").write_bytes(PUBLIC)
    signed: Artifact = read_artifact(artifacts["plus1"])
    signed.save(models / "signed.tcomp", sign(signed, PRIVATE))
    with running(models, trusted=tmp_path / "public.pem") as server:
        assert server.ask("GET", "/v2/models/signed/ready")[0] == 200
        status, answer, _ = server.ask("POST", "/v2/models/plus/infer", request(X))
        assert status == 503 and "not signed" in answer["error"]
        assert server.ask("GET", "/v2/health/ready")[0] == 503


def test_one_file_is_a_repository_too(artifacts: dict[str, Path]) -> None:
    with running(artifacts["plus1"]) as server:
        assert plus_of(server, "plus1") == 1


def plus_of(server: Running, name: str) -> float:
    return float(server.ask("POST", f"/v2/models/{name}/infer", request(X))[1]["outputs"][0]["data"][0])


def test_a_configuration(tmp_path: Path) -> None:
    path, defaults = tmp_path / "serving.json", ModelOptions(max_queue=7)
    assert read_model_options(path, defaults) is defaults
    path.write_text(json.dumps({"max_batch": 8, "preferred": [1, 8], "image": {"mean": [0.5], "std": [1], "labels": ["cat"]}}))
    found = read_model_options(path, defaults)
    assert (found.max_batch, found.preferred, found.max_queue) == (8, (1, 8), 7)
    assert found.image is not None and found.image.labels == ("cat",) and found.image.top == 5
    for wrong, message in (
        ("{", "JSON"), ("[]", "not an object"), ('{"max_bach": 3}', "unknown option max_bach"), ('{"max_batch": "3"}', "expected an integer"),
        ('{"max_batch": 0}', "from 1 to"), ('{"preferred": [64]}', "preferred sizes"), ('{"image": {"mean": [1, 2]}}', "mean and std"),
        ('{"image": {"x": 1}}', "unknown option image.x"), ('{"image": 3}', "expected an object"), ('{"instances": 1000000}', "instances must be"),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(InputError, match=message):
            read_model_options(path, defaults)


def test_a_wrong_configuration_names_the_file(models: Path) -> None:
    (models / "plus/serving.json").write_text('{"max_batch": -1}')
    with running(models) as server:
        status, answer, _ = server.ask("POST", "/v2/models/plus/infer", request(X))
        assert status == 503 and "could not be loaded" in answer["error"] and "max_batch must be from 1" in answer["error"]
        assert server.ask("GET", "/v2/models/mlp/ready")[0] == 200
