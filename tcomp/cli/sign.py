"""`tcomp sign`: an artifact that those who trust a key can tell from all others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tcomp.cli import options as opt, output

_KEY = "The private Ed25519 key, a PEM file (openssl genpkey -algorithm ed25519)."


def sign(
    model: Annotated[Path, opt.argument("MODEL.tcomp", "An artifact that `tcomp compile` wrote.")],
    *,
    key: Annotated[Path, opt.option("--key", "PRIVATE.pem", _KEY)],
    out: Annotated[Path | None, opt.out_file("The signed model. Default: replace the model.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Sign a compiled model.

    `tcomp.load(model, trusted="public.pem")` and `tcomp run --trusted public.pem` run only models that this key signed and that have not
    changed since. The public key: openssl pkey -in private.pem -pubout -out public.pem
    """
    from tcomp.runtime import read_artifact
    from tcomp.runtime.signing import sign

    out = out or model
    artifact = read_artifact(model)
    artifact.save(out, sign(artifact, key))
    output.answer(f"wrote {out}, signed", {"artifact": out}, as_json)
