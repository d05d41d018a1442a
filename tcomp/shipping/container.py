"""A compiled model as a folder from which a container engine (Docker, Podman, Buildah) builds an image that serves it: `tcomp serve`.

The image is a small Python with the packages of requirements.txt, the files of tcomp that serve, which are copied, and the artifact; of a
language model also its tokenizer and template of chats. The base and the packages are pinned to releases, the process is not root, and
a health check asks whether it is ready.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tcomp.errors import InputError
from tcomp.generation.folder import TEXT_FILES, TOKENIZER
from tcomp.generation.slots import continues_text
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
# What text needs besides: templates of chats, tokens, grammars.
TEXT_REQUIREMENTS = """\
jinja2==3.1.6
tokenizers==0.23.3
llguidance==1.9.1
"""
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}  # as engines call them
PORT, GRPC_PORT = 8000, 8001
COMMAND = ["python", "-c", "from tcomp.cli import main; main()", "serve", "/models"]
COMMAND += ["--host", "0.0.0.0", "--port", str(PORT), "--grpc-port", str(GRPC_PORT)]
CHECK = ["python", "-m", "tcomp.serve.health", str(PORT)]


def write_container(
    artifact: Artifact,
    folder: Path,
    name: str,
    version: str = "1.0",
    weights: Literal["inside", "beside"] = "inside",
    text_folder: Path | None = None,
) -> list[Path]:
    """Write the folder of an image for a model named `name` (see `c_interface.package_name`); returns its files. With the weights `beside`,
    the image has no model: its folder `models` is to be mounted. `text_folder`: that of a language model, with the tokenizer, which goes
    with it. Raises InputError for a folder that exists, a bad version, a model that writes no text or a folder without tokenizer;
    TargetError for a machine that the runtime is not for."""
    check_version(version)
    platform_name(artifact.manifest, "in an image")
    platform = _PLATFORMS[artifact.manifest.triple.partition("-")[0]]
    beside = weights == "beside"
    texts: dict[str, str] = {
        "Containerfile": _containerfile(beside),
        ".containerignore": "*\n!requirements.txt\n!tcomp\n" + "!models\n" * (not beside),
        "requirements.txt": REQUIREMENTS + TEXT_REQUIREMENTS * (text_folder is not None),
        "README.md": _readme(name, version, platform, beside, text_folder is not None),
        **server_files(),
    }
    files: dict[str, bytes] = {place: text.encode() for place, text in texts.items()}
    model = f"models/{name}.tcomp"
    if text_folder is not None:
        model = f"models/{name}/1/{name}.tcomp"
        files |= {f"models/{name}/1/{file}": data for file, data in _text_files(artifact, text_folder).items()}
    with new_folder(folder) as root:
        for place, data in files.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_bytes(data)
        (root / model).parent.mkdir(parents=True, exist_ok=True)
        artifact.save(root / model)
        for path in root.rglob("*"):  # the process of the image is another user than who builds it, whatever the umask is here
            path.chmod(0o755 if path.is_dir() else 0o644)
    return [folder / place for place in (model, *files)]


def _text_files(artifact: Artifact, folder: Path) -> dict[str, bytes]:
    """The files of a language model that make text of tokens."""
    if not continues_text(artifact.manifest):
        why = "it does not take `ids` and state, and give `logits`"
        raise InputError("a tokenizer is given for a model that is not a language model", why=why, hint="compile it with --state auto")
    if not (folder / TOKENIZER).is_file():
        raise InputError(
            f"there is no {TOKENIZER} in {folder}", where="--tokenizer", hint="give the language model's folder of Hugging Face"
        )
    try:
        return {file: (folder / file).read_bytes() for file in TEXT_FILES if (folder / file).is_file()}
    except OSError as problem:
        raise InputError(f"the tokenizer in {folder} cannot be read", why=problem.strerror or str(problem)) from problem


def _containerfile(beside: bool) -> str:
    return f"""\
FROM {BASE}
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app
COPY requirements.txt /tmp/
RUN pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt
COPY tcomp /app/tcomp
{"VOLUME /models" if beside else "COPY models /models"}
USER 10001:10001
EXPOSE {PORT} {GRPC_PORT}
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD {json.dumps(CHECK)}
STOPSIGNAL SIGTERM
ENTRYPOINT {json.dumps(COMMAND)}
"""


def _readme(name: str, version: str, platform: str, beside: bool, text: bool) -> str:
    mount = " -v $PWD/models:/models:ro" * beside
    chat = f"""
It writes text by OpenAI's protocol as well:

```
curl localhost:{PORT}/v1/chat/completions -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
```
"""
    return f"""\
# {name}

A container image that serves the model {name} by HTTP and gRPC, after the open inference protocol (KServe V2).

```
podman build --format docker --platform {platform} -t {name}:{version} .
docker build --platform {platform} -f Containerfile -t {name}:{version} .    # or by Docker
podman run --rm --read-only --tmpfs /tmp --cap-drop=ALL -p {PORT}:{PORT} -p {GRPC_PORT}:{GRPC_PORT}{mount} {name}:{version}
curl localhost:{PORT}/v2/models/{name}
```
{chat * text}
(Podman leaves the health check out without `--format docker`, as OCI's format of images has none.)

It is `tcomp serve` on the folder /models. `podman run IMAGE --help` lists its options, which follow the name of the image: batches, limits,
tokens, TLS. Figures for Prometheus are at /metrics, a page for people at /.
"""
