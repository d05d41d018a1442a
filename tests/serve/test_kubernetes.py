"""The files for Kubernetes: valid by the schemas of Kubernetes, and options, ports and paths that the server really has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

FOLDER = Path(__file__).parents[2] / "examples/kubernetes"


def documents() -> list[Any]:
    return [document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def named(kind: str) -> Any:
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def test_schemas() -> None:
    """The kinds of Kubernetes itself; KServe's schemas are in no package."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate
    kinds = [document["kind"] for document in documents() if ".kserve.io/" not in document["apiVersion"]]
    assert kinds == ["HorizontalPodAutoscaler", "Deployment", "Service"]
    for document in documents():
        if document["kind"] in kinds:
            validate(document, "1.31", strict=True)


def containers() -> list[Any]:
    return [named("Deployment")["spec"]["template"]["spec"]["containers"][0], named("ServingRuntime")["spec"]["containers"][0]]


def test_containers_run_commands_that_there_are() -> None:
    from tcomp.cli.app import app

    for container in containers():
        assert container["command"][:2] == ["tcomp", "serve"]
        result = CliRunner().invoke(app, ["serve", "/nowhere", *container["args"]])
        assert result.exit_code == 2 and "there are no models" in result.output  # and not "no such option"


def test_probes_ask_what_the_server_answers(server: Any) -> None:
    probes = [probe for container in containers() for name, probe in container.items() if name.endswith("Probe")]
    assert len(probes) == 4
    for probe in probes:
        assert server.ask("GET", probe["httpGet"]["path"])[0] == 200


def test_ports_agree() -> None:
    for container in containers():
        given = dict(argument.lstrip("-").split("=", 1) for argument in container["args"])
        assert str(container["ports"][0]["containerPort"]) == given["port"]
    names = {port["name"] for port in containers()[0]["ports"]}
    assert {port["targetPort"] for port in named("Service")["spec"]["ports"]} == names


def test_the_server_has_time_to_drain() -> None:
    pod = named("Deployment")["spec"]["template"]["spec"]
    given = dict(argument.lstrip("-").split("=", 1) for argument in pod["containers"][0]["args"])
    assert float(given["drain-delay"]) + float(given["drain-timeout"]) < pod["terminationGracePeriodSeconds"]


def test_the_autoscaler_asks_for_a_metric_that_there_is(server: Any) -> None:
    scaler = named("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == named("Deployment")["metadata"]["name"]
    assert f"{scaler['metrics'][0]['pods']['metric']['name']}{{" in server.ask("GET", "/metrics")[1].decode()


def test_what_kserve_asks_of_a_runtime() -> None:
    """https://kserve.github.io: the container's name, formats of models, protocols."""
    runtime, service = named("ServingRuntime"), named("InferenceService")
    assert runtime["apiVersion"] == "serving.kserve.io/v1alpha1" and service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert runtime["spec"]["containers"][0]["name"] == "kserve-container" and set(runtime["spec"]["protocolVersions"]) == {"v2", "grpc-v2"}
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {form["name"] for form in runtime["spec"]["supportedModelFormats"]}
