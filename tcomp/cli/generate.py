"""`tcomp generate`: text of a language model after a prompt."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tcomp.cli import options as opt, output
from tcomp.errors import InputError, printable

_FOLDER = "A Hugging Face folder: config.json, tokenizer.json, safetensors."
_ARTIFACT = "The artifact that `tcomp compile FOLDER --state auto` wrote. Default: compile the folder."
_AUDIO = "A WAV file that a Whisper model transcribes, instead of a prompt."
_KIND = "Store weights as int8, int4, w8a8, w4a8, bf16 or fp16 when the folder is compiled."


def generate(
    folder: Annotated[Path, opt.argument("FOLDER", _FOLDER)],
    *,
    prompt: Annotated[str, opt.option("--prompt", "TEXT", "The text to continue; - reads it from stdin.")] = "-",
    audio: Annotated[Path | None, opt.option("--audio", "FILE", _AUDIO)] = None,
    artifact: Annotated[Path | None, opt.option("--artifact", "FILE", _ARTIFACT)] = None,
    weights: Annotated[str | None, opt.option("--weights", "KIND", _KIND)] = None,
    max_tokens: Annotated[
        int, opt.option("--max-tokens", "N", "The largest number of tokens to generate.", min=1, show_default=True)
    ] = 128,
    temperature: Annotated[
        float, opt.option("--temperature", "T", "Randomness of the choice; 0: always the likeliest token.", show_default=True)
    ] = 0.0,
    top_k: Annotated[int, opt.option("--top-k", "N", "Choose among the N likeliest tokens; 0: all.", show_default=True)] = 0,
    top_p: Annotated[
        float, opt.option("--top-p", "P", "Choose among the likeliest tokens whose probabilities add up to P.", show_default=True)
    ] = 1.0,
    min_p: Annotated[
        float, opt.option("--min-p", "P", "Choose among tokens at least P times as likely as the likeliest.", show_default=True)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, opt.option("--repetition-penalty", "X", "Make tokens that occurred before less likely; 1: no change.", show_default=True)
    ] = 1.0,
    stop: Annotated[list[str] | None, opt.option("--stop", "TEXT", "Stop before this text. May be repeated.")] = None,
    seed: Annotated[int | None, opt.option("--seed", "N", "Seed of the random numbers. Default: a new one each time.")] = None,
    schema: Annotated[Path | None, opt.option("--json-schema", "FILE", "The text is JSON that fits this schema.")] = None,
    threads: opt.Threads = None,
    chat: Annotated[bool, opt.flag("--chat", "The prompt is a message, written as the folder's template for chats says.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Generate text with a language model, printed as it is computed.

    The prompt is continued as it is, unless it is a message of a chat.
    """
    from tcomp.api import compile
    from tcomp.generation import Generator, Grammar, LogMel, Sampling, SequenceToSequence, read_wave
    from tcomp.generation.sequence_to_sequence import reads_source
    from tcomp.runtime import LoadedModel, Module

    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder", hint=_FOLDER)
    if artifact is not None:
        opt.check_file(artifact, "--artifact")
        if weights is not None:
            raise InputError("--weights is for folders that are compiled", hint="leave out --artifact")
    if audio is not None:
        opt.check_file(audio, "--audio")
    if schema is not None:
        opt.check_file(schema, "--json-schema")
    grammar = None if schema is None else Grammar("json_schema", schema.read_text("utf-8", errors="replace"))
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed=seed)
    start = time.perf_counter()
    with output.progress() as tell:
        if artifact is not None:
            model: LoadedModel = Module.load(artifact, threads=threads, mmap=False)
        else:
            model = compile(folder, weights=weights, progress=tell, state="auto", threads=threads)
        if isinstance(model, Module) and reads_source(model.manifest):
            if chat or grammar is not None:
                raise InputError("models with an encoder have no chats or grammars", hint="leave out --chat and --json-schema")
            generator: Generator | SequenceToSequence = SequenceToSequence.load(folder, model)
        else:
            generator = Generator.load(folder, model)
    if audio is not None and not isinstance(generator, SequenceToSequence):
        raise InputError("this model takes no sound", hint="leave out --audio")
    given = "" if audio is not None else sys.stdin.read() if prompt == "-" else prompt
    loaded = time.perf_counter()
    text: Any = given if audio is None else LogMel.load(folder).features(*read_wave(audio))
    if chat and isinstance(generator, Generator):
        text = generator.chat_prompt([{"role": "user", "content": given}])
    options: dict[str, Any] = {"sampling": sampling, "stop": tuple(stop or ()), **({} if grammar is None else {"grammar": grammar})}
    if as_json:
        found = generator.complete(text, max_tokens, top_logprobs=0, **options)
        record = {"text": found.text, "finish": found.finish, "prompt_tokens": found.prompt_tokens}
        record |= {"tokens": [{"token": p.token, "text": p.text, "logprob": p.logprob} for p in found.pieces]}
        return output.print_json(record | {"sampling": asdict(sampling), "seconds": time.perf_counter() - loaded})
    times = [time.perf_counter()]
    for piece in generator.stream(text, max_tokens, **options):
        print(printable(piece.text), end="", flush=True)
        times.append(time.perf_counter())
    print()
    first, rest = times[min(1, len(times) - 1)] - times[0], times[-1] - times[min(1, len(times) - 1)]
    rate = f"; then {(len(times) - 2) / rest:.1f} tokens/s" if len(times) > 2 and rest > 0 else ""
    output.message(f"loaded in {output.seconds(loaded - start)}; first token after {output.seconds(first)}{rate}")
