"""``serve-app run``: one answer, or a chat where no prompt is given at a terminal."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from pathlib import Path
from typing import Any

from serve_app.cli.chat import Chat, Screen
from serve_app.cli.groups import add_command, served
from serve_app.client.answers import Answer, ask
from serve_app.client.server import Server

_ABOUT = """\
Prints what a model of the running server answers, as it comes. Without a prompt: a chat at a terminal; otherwise the
prompt is read from standard input.

examples:
  serve-app run @cf/pico/pico-instruct "What does math.sqrt do?"
  cat notes.txt | serve-app run @cf/pico/pico-instruct --system "Summarise this."
  serve-app run @cf/pico/pico-instruct                     a chat; /help lists its commands
  serve-app run @cf/openai/whisper --audio talk.wav        what is said in a file; --json for its times
  serve-app run @cf/pico/pico-shapes --image x.png
  serve-app run @cf/pico/pico-describer "How many are there?" --image x.png
  serve-app run @cf/qwen/qwen2-audio "What is heard?" --audio talk.wav
  serve-app run @cf/pico/pico-speaker "Good morning." --out morning.mp3
  serve-app run @cf/black-forest-labs/flux-1-schnell "A lighthouse at dawn" --seed 7 --out lighthouse.jpg
  serve-app run @cf/pico/pico-instruct@my-adapter --stats  with an adapter; tokens per second and cost after the answer
"""


def add_parser(commands: Any) -> None:
    run = add_command(commands, "run", "ask a model of the running server, or chat with it", _ABOUT)
    run.add_argument("model", help="model id, e.g. @cf/pico/pico-instruct")
    run.add_argument("prompt", nargs="?", help="the prompt, or - to read it from standard input; none: a chat")
    run.add_argument("--audio", type=Path, help="a file with sound, for models that hear")
    run.add_argument("--image", type=Path, help="a file with a picture, for models that see")
    run.add_argument("--mask", type=Path, help="a file whose white parts are drawn anew in the picture")
    run.add_argument("--out", type=Path, help="where the sound or picture goes that a model makes of the prompt")
    run.add_argument("--system", help="the system prompt: what the model is to be")
    run.add_argument("--max-tokens", type=int, help="most tokens to generate")
    run.add_argument("--temperature", type=float, help="0 for the most likely answer")
    run.add_argument("--top-p", type=float, help="choose among the most likely tokens that make up this share")
    run.add_argument("--seed", type=int, help="the same seed gives the same answer")
    run.add_argument("--raw", action="store_true", help="send the prompt without the model's chat template")
    run.add_argument("--json", action="store_true", help="print the whole result as JSON instead of streaming text")
    run.add_argument("--stats", action="store_true", help="after an answer: time to first token, tokens/s, cost")
    run.set_defaults(command=served(_run))


def _run(arguments: argparse.Namespace, server: Server) -> int:
    if arguments.audio or arguments.image or arguments.mask or arguments.out:
        return _run_files(arguments, server)
    options = _options(arguments)
    prompt = arguments.prompt
    if prompt is None and sys.stdin.isatty():
        if arguments.json or arguments.raw or not sys.stdout.isatty():
            print("serve-app: a prompt is missing: name it, or - to read it from standard input", file=sys.stderr)
            return 2
        return Chat(server, arguments.model, Screen(), arguments.system or "", options, stats=arguments.stats).run()
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    inputs: dict[str, Any] = {"prompt": prompt, **({"raw": True} if arguments.raw else {}), **options}
    if arguments.system:
        roles = [("system", arguments.system), ("user", prompt)]
        inputs = {"messages": [{"role": role, "content": text} for role, text in roles], **options}
    if arguments.json:
        result = server.result("POST", f"{server.ai}/run/{arguments.model}", json=inputs, timeout=None)
        print(json.dumps(result, indent=2))
        return 0
    answer = Answer()
    for piece in ask(server, arguments.model, inputs, answer):
        if not piece.reasoning:
            print(piece.text, end="", flush=True)
    print()
    for call in answer.tool_calls:
        print(json.dumps(call))
    if arguments.stats:
        print(answer.figures(), file=sys.stderr)
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _run_files(arguments: argparse.Namespace, server: Server) -> int:
    """Files go along with the prompt, and come back in its place."""
    given = {name: getattr(arguments, name) for name in ("audio", "image", "mask") if getattr(arguments, name)}
    try:
        inputs: dict[str, Any] = {name: base64.b64encode(path.read_bytes()).decode() for name, path in given.items()}
    except OSError as error:
        print(f"serve-app: {error.filename} can't be read: {error.strerror}", file=sys.stderr)
        return 2
    if arguments.prompt is not None:
        inputs["prompt"] = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.system:
        roles = [("system", arguments.system), ("user", inputs.pop("prompt", ""))]
        inputs["messages"] = [{"role": role, "content": text} for role, text in roles]
    inputs |= _options(arguments)
    sent = {"json": inputs, "headers": {"Accept": "application/json"}}
    result = server.result("POST", f"{server.ai}/run/{arguments.model}", **sent, timeout=None)
    if arguments.out is not None:
        made = [result.get(name) for name in ("audio", "image")] if isinstance(result, dict) else []
        file = next((one for one in made if isinstance(one, str)), None)
        if file is None:
            print("serve-app: the model answers without sound or a picture; leave --out out", file=sys.stderr)
            return 1
        arguments.out.write_bytes(base64.b64decode(file))
        return 0
    said = (
        []
        if arguments.json or not isinstance(result, dict)
        else [result.get(name) for name in ("text", "response", "description")]
    )
    text = next((text for text in said if isinstance(text, str)), None)
    print(json.dumps(result, indent=2) if text is None else text)
    return 0
