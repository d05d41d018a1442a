"""The page of a WebAssembly package: a trained network tells in a browser which way up a picture of a text is."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.shipping.wasm_package import write_wasm_package

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ABSENT = [name for name in ("ziglang", "PIL", "rapidocr_onnxruntime") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")
def test_a_page_classifies_pictures(tmp_path: Path) -> None:
    from PIL import Image, ImageDraw, ImageFont

    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    assert spec is not None and spec.origin is not None and BROWSER is not None
    network = Path(spec.origin).parent / "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
    artifact = compile_model(network, CompileOptions(target="wasm32", shapes={"x": [1, 3, 48, 192]}))[0]
    write_wasm_package(artifact, tmp_path / "page", "direction")
    (tmp_path / "page/labels.txt").write_text("upright\nupside down\n")
    picture = Image.new("RGB", (192, 48), "white")
    ImageDraw.Draw(picture).text((12, 4), "Hello World", fill="black", font=ImageFont.load_default(32))
    picture.save(tmp_path / "page/0.png")
    picture.rotate(180).save(tmp_path / "page/180.png")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path / "page")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, expected in (("0", "upright"), ("180", "upside down")):
            url = f"http://127.0.0.1:{server.server_address[1]}/index.html?picture={name}.png&mean=0.5&scale=0.5"
            # Virtual time does not wait for the compilation of the module: where it runs out before, the page gets more of it.
            for budget in (60, 600, 6000, 60000):
                options = ["--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={budget * 1000}"]
                command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", url]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
                if rows := re.findall(r"<td>([^<]*)</td><td[^>]*>([\d.]+) %", done.stdout):
                    break
            assert rows and rows[0][0] == expected and float(rows[0][1]) > 90, done.stdout[-3000:]
        server.shutdown()
