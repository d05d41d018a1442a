"""A compiled model as a folder from which a container engine (Docker, Podman, Buildah) builds an image that answers requests by HTTP.

The image is a small Python with NumPy and the wheel of the model; `server.py` in the folder is `container_server.py` here, standard library
alone. The base is pinned to a release, the process is no superuser, and a health check asks whether it answers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from tcomp.runtime import Artifact
from tcomp.shipping.folders import new_folder
from tcomp.shipping.wheel import write_wheel

BASE = "docker.io/library/python:3.12.11-slim-bookworm"
NUMPY = "2.3.5"
PORT = 8000


def write_container(
    artifact: Artifact, folder: Path, name: str, version: str = "1.0", weights: Literal["inside", "beside"] = "inside"
) -> list[Path]:
    """Write the folder of an image for a model named `name` (see `c_interface.package_name`); returns its files. With the weights `beside`,
    the image has none: the artifact is a file of the folder, to be mounted. Raises as `wheel.write_wheel`."""
    with new_folder(folder) as root:
        files = [path.relative_to(root / "model") for path in write_wheel(artifact, root / "model", name, version, weights)]
        for file in files:
            (root / "model" / file).rename(root / file)
        (root / "model").rmdir()
        shutil.copyfile(Path(__file__).with_name("container_server.py"), root / "server.py")
        texts: dict[str, str] = {
            "Containerfile": _containerfile(name, files[0].name, weights == "beside"),
            ".containerignore": f"*\n!server.py\n!{files[0].name}\n",
            "README.md": _readme(name, version, weights == "beside"),
        }
        for place, text in texts.items():
            (root / place).write_text(text, "utf-8")
    return [folder / path for path in map(str, (*files, "server.py", *texts))]


def _containerfile(name: str, wheel: str, beside: bool) -> str:
    weights = f"ENV {name.upper()}_MODEL=/model/{name}.tcomp\nVOLUME /model\n" if beside else ""
    return f"""\
FROM {BASE}
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY {wheel} /tmp/
RUN pip install --no-cache-dir numpy=={NUMPY} && pip install --no-cache-dir --no-deps /tmp/{wheel} && rm /tmp/{wheel}
COPY server.py /app/server.py
{weights}USER 10001:10001
EXPOSE {PORT}
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["python", "/app/server.py", "{name}", "--check"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "/app/server.py", "{name}"]
"""


def _readme(name: str, version: str, beside: bool) -> str:
    mount = f" -v $PWD/{name}.tcomp:/model/{name}.tcomp:ro" * beside
    return f"""\
# {name}

A container image that answers requests to the model {name} by HTTP, after the open inference protocol (KServe V2).

```
podman build -t {name}:{version} .          # or: docker build -f Containerfile -t {name}:{version} .
podman run --rm --read-only --tmpfs /tmp --cap-drop=ALL -p {PORT}:{PORT}{mount} {name}:{version}
curl localhost:{PORT}/v2/models/{name}
```

| request | answer |
|---|---|
| `GET /v2/health/live`, `GET /v2/health/ready` | 200, once the model is loaded |
| `GET /v2/models/{name}` | its inputs and outputs |
| `POST /v2/models/{name}/infer`, JSON | outputs as JSON, after the protocol |
| `POST /v2/models/{name}/infer`, a .npz file (`Content-Type: application/x-npz`) | outputs as a .npz file |

`docker run IMAGE --help` lists its options: the port, threads of a run, requests at the same time, the most bytes of a request.
It batches nothing, and has neither TLS nor users: put it behind a proxy that does.
"""
