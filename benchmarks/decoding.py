"""Tokens a second of language models with random weights in few bits: tcomp, llama.cpp, ONNX Runtime GenAI, OpenVINO, in turns.

    pip install gguf safetensors tokenizers llama-cpp-python onnxruntime-genai openvino transformers torch
    python -m benchmarks.decoding --size 0.5B --weights int4,int8 --context 128,2048 --threads 1,2
    python -m benchmarks.decoding --size 0.5B --weights int4,int8 --context 128 --batch 4,16

All have the same decoder, of a size of Qwen2.5, in blocks of 32 numbers: tcomp and llama.cpp int4 (Q4_0) and int8 (Q8_0), ONNX Runtime int4
(accuracy level 4), OpenVINO what `optimum-cli export openvino` makes, the command of `pip install optimum-intel nncf`, which may be in an
environment of its own (int4 in blocks of 32, the last product and int8 by rows), run without GenAI. What is not installed is left out, with
a note. `decode` is a step of one token behind a context, always at the same place (OpenVINO's cache grows by it); `prefill` is that many
tokens into an empty cache. With a `--batch`, so many sequences have a token in each step. Models are kept in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.frontends.language_models.config import DecoderConfig
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.generation.slots import checked_model, new_state, run_tokens
from tcomp.ir.expr import dim
from tcomp.runtime import Module

from .timing import Call, least_times
from .weights import BLOCK, SIZES, VOCABULARY, config_of, decoder, numbers, random_weights, show

GGUF_TYPES = {"int4": "Q4_0", "int8": "Q8_0"}
ROOM = 16  # tokens that a cache has room for behind the context
MOST = 16  # sequences at a time
LLAMA_BATCH = 512  # tokens that llama.cpp is given at a time
Steps = tuple[Call, Call]  # the context into an empty cache; a token behind it


def weights_of(config: DecoderConfig) -> dict[str, np.ndarray]:
    """All weights, by the names of Hugging Face."""
    found = dict[str, np.ndarray]()

    def asked(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return found.setdefault(name, random_weights(name, shape))

    decoder_graph(config, asked)
    return found


def tcomp_steps(config: DecoderConfig, args: argparse.Namespace, kind: str, ids: np.ndarray, threads: int) -> Steps:
    rows, tokens = ids.shape
    path = args.folder / f"{args.size}-{args.layers or 'all'}{'-16' if rows > 1 else ''}-{kind}.tcomp"
    decoder(args.size, kind, args.layers, path, dim("batch", 1, MOST) if rows > 1 else 1)
    state = new_state(checked_model(Module.load(path, threads=threads, mmap=False)), rows, tokens + ROOM)

    def run(length: int, new: np.ndarray) -> None:
        state.truncate(length)
        run_tokens(state, new.tolist(), [0] * rows, None)

    return lambda: run(0, ids), lambda: run(tokens, ids[:, :1])


def llama_steps(config: DecoderConfig, args: argparse.Namespace, kind: str, ids: np.ndarray, threads: int) -> Steps:
    import llama_cpp

    path = args.folder / f"{args.size}-{args.layers or 'all'}-{kind}.gguf"
    if not path.exists():
        write_gguf(path, config, GGUF_TYPES[kind])
    rows, tokens = ids.shape
    llama_cpp.llama_log_set(silent := llama_cpp.llama_log_callback(lambda *_: None), None)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_threads, params.n_threads_batch = rows * (tokens + ROOM), rows, threads, threads
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    context = llama_cpp.llama_init_from_model(model, params)
    memory, places = llama_cpp.llama_get_memory(context), llama_cpp.llama_batch_init(LLAMA_BATCH, 0, 1)

    def run(length: int, new: np.ndarray, _kept: object = silent) -> None:
        llama_cpp.llama_memory_seq_rm(memory, -1, length, -1)
        each = LLAMA_BATCH // rows
        for begin in range(0, new.shape[1], each):
            part = new[:, begin : begin + each]
            places.n_tokens = part.size
            for n, ((row, at), token) in enumerate(np.ndenumerate(part)):
                places.token[n], places.pos[n], places.n_seq_id[n], places.seq_id[n][0] = int(token), length + begin + at, 1, row
                places.logits[n] = begin + at == new.shape[1] - 1
            if llama_cpp.llama_decode(context, places):
                raise RuntimeError("llama.cpp has no room for the tokens")
        llama_cpp.llama_get_logits(context)  # waits for them

    return lambda: run(0, ids), lambda: run(tokens, ids[:, :1])


def ort_steps(config: DecoderConfig, args: argparse.Namespace, kind: str, ids: np.ndarray, threads: int) -> Steps:
    import onnxruntime_genai

    if kind != "int4" or len(ids) > 1:
        raise ImportError("its builder makes int4 for CPUs" if kind != "int4" else "it goes back in one sequence only")
    (ids,) = ids
    path = args.folder / f"{args.size}-{args.layers or 'all'}-{kind}.ort"
    if not (path / "genai_config.json").exists():
        source = args.folder / f"{args.size}-{args.layers or 'all'}.hf"
        write_folder(source, config)
        call = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", path, "-c", args.folder / "hub"]
        extra = ["-p", "int4", "-e", "cpu", "--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
        subprocess.run([*map(str, call), *extra], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    settings = onnxruntime_genai.Config(str(path))
    settings.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(settings)
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + ROOM, do_sample=False)
    generator = onnxruntime_genai.Generator(model, params)

    def run(length: int, tokens: np.ndarray) -> None:
        generator.rewind_to(length)
        generator.append_tokens(tokens.astype(np.int32))

    return lambda: run(0, ids), lambda: run(len(ids), ids[:1])


def openvino_steps(config: DecoderConfig, args: argparse.Namespace, kind: str, ids: np.ndarray, threads: int) -> Steps:
    import openvino

    path, rows = args.folder / f"{args.size}-{args.layers or 'all'}-{kind}.ov", len(ids)
    if not (path / "openvino_model.xml").exists():
        if (exporter := shutil.which("optimum-cli")) is None:
            raise ImportError("the command optimum-cli exports its models")
        source = args.folder / f"{args.size}-{args.layers or 'all'}.hf"
        write_folder(source, config)
        stored = ["--sym", "--group-size", str(BLOCK), "--ratio", "1.0"] if kind == "int4" else []
        call = [exporter, "export", "openvino", "--model", source, "--task", "text-generation-with-past", "--weight-format", kind]
        subprocess.run([*map(str, [*call, *stored, path])], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    core = openvino.Core()
    model = core.read_model(path / "openvino_model.xml")
    product = model.output("logits").get_node()
    while product.get_type_name() != "MatMul":
        product = product.input_value(0).get_node()
    ends = (np.array([n]) for n in (-1, 1 << 31, 1, 1))  # start, stop, step, axis: logits of the last token alone, as all have
    last = openvino.opset13.slice(product.input_value(0), *ends)
    product.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
    request = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads}).create_infer_request()
    held = 0

    def run(new: np.ndarray) -> None:
        nonlocal held
        begin, held = held, held + new.shape[1]
        places = np.broadcast_to(np.arange(begin, held), new.shape)
        given = {"input_ids": new, "attention_mask": np.ones((rows, held), np.int64), "position_ids": places}
        request.infer({**given, "beam_idx": np.arange(rows, dtype=np.int32)})

    def prefill() -> None:
        nonlocal held
        held = 0
        request.reset_state()
        run(ids)

    return prefill, lambda: run(ids[:, :1])


CONTENDERS: dict[str, Callable[[DecoderConfig, argparse.Namespace, str, np.ndarray, int], Steps]] = {
    "tcomp": tcomp_steps, "llama.cpp": llama_steps, "ort-genai": ort_steps, "openvino": openvino_steps,
}  # fmt: skip


def words(count: int) -> list[str]:
    """Names of so many tokens: those of all bytes, as byte-level BPE writes them, come first."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return ([chr(n) for n in kept] + [chr(256 + n) for n in range(256 - len(kept))] + [f"<{n}>" for n in range(count)])[:count]


def write_gguf(path: Path, config: DecoderConfig, kind: str) -> None:
    """The decoder as a GGUF file: matrices of a type such as Q4_0, the others float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_rope_freq_base(config.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words(config.vocabulary))
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocabulary)
    writer.add_token_merges([" ".join(words(2))])  # llama.cpp wants one at least
    for added in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        added(config.vocabulary - 1)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    names, type_ = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.layers), gguf.GGMLQuantizationType[kind]
    for name, a in weights_of(config).items():
        theirs, floats = names.get_name(name, (".weight", ".bias")), a.astype(np.float32)
        assert theirs is not None, name
        ending = name.rpartition(".")[2]
        theirs = theirs if theirs.endswith(ending) else f"{theirs}.{ending}"
        if a.ndim == 2:
            writer.add_tensor(theirs, gguf.quantize(floats, type_), raw_dtype=type_)
        else:
            writer.add_tensor(theirs, floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(path: Path, config: DecoderConfig) -> None:
    """The decoder as a folder of Hugging Face, in float16."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    path.mkdir(parents=True, exist_ok=True)
    save_file({name: a.astype(np.float16) for name, a in weights_of(config).items()}, path / "model.safetensors", {"format": "pt"})
    given = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": config.vocabulary, "hidden_size": config.hidden,
        "intermediate_size": config.intermediate, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "max_position_embeddings": config.positions, "rms_norm_eps": config.epsilon,
        "rope_theta": config.theta, "tie_word_embeddings": config.tied, "torch_dtype": "float16", "hidden_act": "silu",
        "eos_token_id": config.vocabulary - 1, "bos_token_id": config.vocabulary - 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    tokens = {word: n for n, word in enumerate(words(config.vocabulary))}
    Tokenizer(models.BPE(tokens, [])).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words(config.vocabulary)[-1]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of threads, kind of weights, number of sequences and context."""
    config = config_of(args.size, args.layers)
    args.folder.mkdir(parents=True, exist_ok=True)
    for threads, kind, rows, context in product(args.threads, args.weights, args.batch, args.context):
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, context))
        steps = dict[str, Steps]()
        for name in args.contenders:
            try:
                steps[name] = CONTENDERS[name](config, args, kind, ids, threads)
            except ImportError as error:
                print(f"without {name}: {error}", file=sys.stderr)
        prefill = least_times({name: first for name, (first, _) in steps.items()}, 0.0, 1)
        decode = least_times({name: step for name, (_, step) in steps.items()}, args.seconds, args.rounds)
        yield {
            "threads": threads, "weights": kind, "batch": rows, "context": context,
            **{f"{name} decode": rows / s for name, s in decode.items()},
            **{f"{name} prefill": rows * context / s for name, s in prefill.items()},
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoding", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--layers", type=int, help="default: all of them")
    parser.add_argument("--weights", type=lambda t: t.split(","), default=["int4", "int8"], help="some of int4, int8")
    parser.add_argument("--context", type=numbers, default=[128, 2048])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--batch", type=numbers, default=[1], help="sequences at a time, up to 16")
    parser.add_argument("--contenders", type=lambda t: t.split(","), default=list(CONTENDERS), help=f"some of {', '.join(CONTENDERS)}")
    parser.add_argument("--folder", type=Path, default=Path("build/weights"), help="where models are kept")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    rows = list(measured(args))
    show(rows, args.json, "tokens a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
