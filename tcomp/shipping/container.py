"""A compiled model as a folder from which a container engine (Docker, Podman, Buildah) builds an image that serves it: `tcomp serve`.

The image is a small Python with the packages of requirements.txt, the files of tcomp that serve, which are copied, and the artifact. The
base and the packages are pinned to releases, the process is no superuser, and a health check asks whether it is ready.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tcomp.runtime import Artifact
from tcomp.shipping.c_package import check_version
from tcomp.shipping.folders import new_folder
from tcomp.shipping.runtime_copy import server_files
from tcomp.shipping.wheel import platform_name

BASE = "docker.io/library/python:3.12.11-slim-bookworm"
# What the copied files import: NumPy, the command line's, and those of the extra `serve`.
REQUIREMENTS = """\
numpy==2.4.6
rich==15.0.0
typer==0.29.2
starlette==1.10.0
uvicorn==0.54.0
httptools==0.9.0
uvloop==0.23.0
hpack==4.2.0
protobuf==7.36.2
orjson==3.13.0
prometheus-client==0.26.0
pillow==13.0.0
"""
PORT, GRPC_PORT = 8000, 8001
COMMAND = ["python", "-c", "from tcomp.cli import main; main()", "serve", "/models"]
COMMAND += ["--host", "0.0.0.0", "--port", str(PORT), "--grpc-port", str(GRPC_PORT)]
CHECK = ["python", "-c", f"from urllib.request import urlopen; urlopen('http://127.0.0.1:{PORT}/v2/health/ready', timeout=2)"]


def write_container(
    artifact: Artifact, folder: Path, name: str, version: str = "1.0", weights: Literal["inside", "beside"] = "inside"
) -> list[Path]:
    """Write the folder of an image for a model named `name` (see `c_interface.package_name`); returns its files. With the weights `beside`,
    the image has no model: the artifact is a file of the folder, to be mounted. Raises InputError for a folder that exists, or a bad
    version; TargetError for a machine that the runtime is not for."""
    check_version(version)
    platform_name(artifact.manifest, "in an image")
    beside = weights == "beside"
    texts: dict[str, str] = {
        "Containerfile": _containerfile(name, beside),
        ".containerignore": "*\n!requirements.txt\n!tcomp\n" + f"!{name}.tcomp\n" * (not beside),
        "requirements.txt": REQUIREMENTS,
        "README.md": _readme(name, version, beside),
        **server_files(),
    }
    with new_folder(folder) as root:
        for place, text in texts.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_text(text, "utf-8")
        artifact.save(root / f"{name}.tcomp")
    return [folder / place for place in (f"{name}.tcomp", *texts)]


def _containerfile(name: str, beside: bool) -> str:
    model = "VOLUME /models" if beside else f"COPY {name}.tcomp /models/"
    return f"""\
FROM {BASE}
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app
COPY requirements.txt /tmp/
RUN pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt
COPY tcomp /app/tcomp
{model}
USER 10001:10001
EXPOSE {PORT} {GRPC_PORT}
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD {json.dumps(CHECK)}
STOPSIGNAL SIGTERM
ENTRYPOINT {json.dumps(COMMAND)}
"""


def _readme(name: str, version: str, beside: bool) -> str:
    mount = f" -v $PWD/{name}.tcomp:/models/{name}.tcomp:ro" * beside
    return f"""\
# {name}

A container image that serves the model {name} by HTTP and gRPC, after the open inference protocol (KServe V2).

```
podman build -t {name}:{version} .          # or: docker build -f Containerfile -t {name}:{version} .
podman run --rm --read-only --tmpfs /tmp --cap-drop=ALL -p {PORT}:{PORT} -p {GRPC_PORT}:{GRPC_PORT}{mount} {name}:{version}
curl localhost:{PORT}/v2/models/{name}
```

It is `tcomp serve` on the folder /models. `podman run IMAGE --help` lists its options, which follow the name of the image: batches, limits,
tokens, TLS. Figures for Prometheus are at /metrics, a page for people at /.
"""
