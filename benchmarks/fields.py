"""Which fields of each API are taken, refused and ignored, found by asking the readers; `--write` makes docs/fields.md.

python -m benchmarks fields [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anthropic.types import message_create_params as anthropic_messages
from openai.types import completion_create_params as openai_completions
from openai.types import embedding_create_params as openai_embeddings
from openai.types import image_generate_params as openai_images
from openai.types.audio import speech_create_params as openai_speech
from openai.types.chat import completion_create_params as openai_chat
from openai.types.conversations import conversation_create_params
from openai.types.responses import response_create_params as openai_responses

from serve_app.api.anthropic.read import parse_messages_request
from serve_app.api.decisions import parse_decide
from serve_app.api.errors import ApiError
from serve_app.api.ollama.read import parse_ollama_chat, parse_ollama_generate
from serve_app.api.openai.drawing import parse_generation
from serve_app.api.openai.read import parse_chat, parse_completions, parse_embeddings
from serve_app.api.openai.speech import parse_speech
from serve_app.api.rerank.read import parse_rerank as parse_rerank_elsewhere
from serve_app.api.responses.conversation import parse_create
from serve_app.api.responses.read import parse_responses
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import ModelLimits
from serve_app.catalog.records import Drawing
from serve_app.gateway.http.app import endpoints
from serve_app.tasks.automatic_speech_recognition.read import parse_transcribe
from serve_app.tasks.image_classification.task import parse_classify
from serve_app.tasks.image_to_text.task import parse_describe
from serve_app.tasks.object_detection.task import parse_detect
from serve_app.tasks.registry import tasks
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.summarization.task import parse_summarise
from serve_app.tasks.task import Body
from serve_app.tasks.text_classification.task import parse_text
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_to_image.read import parse_draw
from serve_app.tasks.text_to_speech.read import parse_speak
from serve_app.tasks.translation.task import parse_translate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fields.md"
TALK = [{"role": "user", "content": "x"}]
# What clients of other servers send beside the published fields.
ELSEWHERE = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "detokenize",
    "documents",
    "ebnf",
    "echo",
    "grammar",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "json_schema",
    "keep_alive",
    "length_penalty",
    "logits_processors",
    "logprob_token_ids",
    "lora",
    "max_tokens",
    "mcp_servers",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "n",
    "options",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "raw",
    "regex",
    "repetition_penalty",
    "request_id",
    "requests",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate",
    "truncate_inputs",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
]


INTRODUCTION = """\
Made from the code by `python -m benchmarks fields --write`; a test compares the two. [api.md](api.md) says what the
fields mean. A field is taken where its reader looks at it, refused where a request with it gets an error that says
so, and ignored, by design, where the answer is the same with it. Fields: what our schemas show, the parameters in
the clients' own packages, and names that clients of other servers send.""".splitlines()


class Strange:
    """A value that no field may have: who looks at the field says so."""


@dataclass(slots=True, frozen=True)
class Dialect:
    """``path``: the route it is known by. ``good``: a right body. ``published``: the parameters that its makers list.
    ``tests``: where its clients are run. ``task``: whose native schema it is, "" where the route shows its own.
    ``parts``: of such a schema with several, the titles of those it is about. ``generates``: whether clients of other
    servers may send fields of theirs.
    """

    name: str
    path: str
    good: dict[str, Any]
    parse: Callable[[dict[str, Any]], Any]
    published: tuple[type, ...] = ()
    tests: tuple[str, ...] = ()
    task: str = ""
    generates: bool = True
    parts: tuple[str, ...] = ()


LIMITS = ModelLimits(lora=True)
SEEING = ModelLimits(takes=frozenset({"text", "image"}))
RUN = "/client/v4/accounts/{account}/ai/run/{model}"
DIALECTS = (
    Dialect("Workers AI, text generation", RUN, {"prompt": "x"}, lambda b: parse_generate(b, "m", LIMITS),
            tests=("tests/e2e/test_clients.py", "tests/clients/node/cloudflare.mjs", "tests/clients/test_langchain.py"),
            task="text-generation", parts=("Prompt", "Messages")),
    Dialect("Workers AI, decisions", RUN, {"state": "x", "questions": {"q": {"type": "noul", "instructions": "x"}}},
            lambda b: parse_decide(b, "m", LIMITS), tests=("tests/e2e/test_decisions.py",), task="text-generation",
            generates=False, parts=("Decisions",)),
    Dialect("Workers AI, embeddings", RUN, {"text": "x"}, lambda b: parse_embed(b, "m"),
            tests=("tests/e2e/test_clients.py",), task="text-embeddings", generates=False),
    Dialect("Workers AI, reranking", RUN, {"query": "x", "contexts": [{"text": "x"}]}, lambda b: parse_rerank(b, "m"),
            tests=("tests/e2e/test_clients.py",), task="reranking", generates=False),
    Dialect("Workers AI, text classification", RUN, {"text": "x"}, parse_text,
            tests=("tests/tasks/test_small_tasks.py",), task="text-classification", generates=False),
    Dialect("Workers AI, image classification", RUN, {"image": [1]}, lambda b: parse_classify(Body(b)),
            tests=("tests/tasks/test_small_tasks.py",), task="image-classification", generates=False),
    Dialect("Workers AI, descriptions of pictures", RUN, {"image": [1]}, lambda b: parse_describe(Body(b), "m", SEEING),
            tests=("tests/e2e/test_pictures.py",), task="image-to-text", generates=False),
    Dialect("Workers AI, object detection", RUN, {"image": [1]}, lambda b: parse_detect(Body(b)),
            tests=("tests/tasks/test_small_tasks.py",), task="object-detection", generates=False),
    Dialect("Workers AI, speech recognition", RUN, {"audio": [1]}, lambda b: parse_transcribe(Body(b)),
            tests=("tests/tasks/test_transcripts.py",), task="automatic-speech-recognition", generates=False),
    Dialect("Workers AI, speech from text", RUN, {"prompt": "x"}, parse_speak,
            tests=("tests/tasks/test_speaking.py",), task="text-to-speech", generates=False),
    Dialect("Workers AI, drawing", RUN, {"prompt": "x", "image": [1]}, lambda b: parse_draw(b, Drawing()),
            tests=("tests/tasks/test_drawing.py",), task="text-to-image", generates=False),
    Dialect("Workers AI, translation", RUN, {"text": "x", "target_lang": "fr"}, parse_translate,
            tests=("tests/tasks/test_rewritten.py",), task="translation", generates=False),
    Dialect("Workers AI, summaries", RUN, {"input_text": "x"}, parse_summarise,
            tests=("tests/tasks/test_rewritten.py",), task="summarization", generates=False),
    Dialect("OpenAI chat completions", "/v1/chat/completions", {"model": "m", "messages": TALK}, parse_chat,
            (openai_chat.CompletionCreateParamsBase, openai_chat.CompletionCreateParamsStreaming),
            ("tests/e2e/test_clients.py", "tests/clients/node/openai.mjs", "tests/clients/node/ai.mjs",
             "tests/clients/node/langchain.mjs", "tests/clients/test_langchain.py")),
    Dialect("OpenAI completions", "/v1/completions", {"model": "m", "prompt": "x"}, parse_completions,
            (openai_completions.CompletionCreateParamsBase, openai_completions.CompletionCreateParamsStreaming),
            ("tests/e2e/test_clients.py",)),
    Dialect("OpenAI embeddings", "/v1/embeddings", {"model": "m", "input": "x"}, parse_embeddings,
            (openai_embeddings.EmbeddingCreateParams,), ("tests/e2e/test_clients.py",), generates=False),
    Dialect("OpenAI speech", "/v1/audio/speech", {"model": "m", "input": "x"}, parse_speech,
            (openai_speech.SpeechCreateParams,), ("tests/tasks/test_speaking.py",), generates=False),
    Dialect("OpenAI images", "/v1/images/generations", {"model": "m", "prompt": "x"},
            lambda b: parse_generation(b, Drawing()),
            (openai_images.ImageGenerateParamsBase, openai_images.ImageGenerateParamsStreaming),
            ("tests/tasks/test_drawing_elsewhere.py",), generates=False),
    Dialect("OpenAI Responses", "/v1/responses", {"model": "m", "input": "x"}, parse_responses,
            (openai_responses.ResponseCreateParamsBase, openai_responses.ResponseCreateParamsStreaming),
            ("tests/api/test_responses.py", "tests/e2e/test_dialects.py")),
    Dialect("OpenAI Conversations", "/v1/conversations", {}, parse_create,
            (conversation_create_params.ConversationCreateParams,),
            ("tests/tasks/test_conversations.py", "tests/e2e/test_dialects.py"), generates=False),
    Dialect("Anthropic Messages", "/v1/messages", {"model": "m", "max_tokens": 5, "messages": TALK},
            parse_messages_request,
            (anthropic_messages.MessageCreateParamsBase, anthropic_messages.MessageCreateParamsStreaming),
            ("tests/api/test_anthropic.py", "tests/e2e/test_dialects.py", "tests/clients/node/anthropic.mjs")),
    Dialect("Reranking as Cohere, Jina and TEI have it", "/v1/rerank", {"model": "m", "query": "x", "documents": ["x"]},
            lambda b: parse_rerank_elsewhere(b, "m"), tests=("tests/tasks/test_rerank_dialects.py",),
            generates=False),
    Dialect("Ollama chat", "/api/chat", {"model": "m", "messages": TALK}, lambda b: parse_ollama_chat(b, "m", LIMITS)),
    Dialect("Ollama generate", "/api/generate", {"model": "m", "prompt": "x"},
            lambda b: parse_ollama_generate(b, "m", LIMITS)),
)  # fmt: skip


def listed() -> list[tuple[str, str, Operation]]:
    """Method, path and description of every route."""
    return [(e.method, e.path.replace(":path", ""), e.about) for e in endpoints(None)]  # type: ignore[arg-type]


def candidates(dialect: Dialect) -> list[str]:
    """Names that somebody might send: what is published, what our schema shows, and other servers' fields."""
    names = {
        name for kind in dialect.published for base in kind.__mro__ for name in getattr(base, "__annotations__", ())
    }
    if dialect.task:
        schema = tasks()[dialect.task].schema()["input"]
        chosen = [part for part in schema.get("oneOf", ()) if part.get("title") in dialect.parts]
        names |= set(_properties({"oneOf": chosen} if dialect.parts else schema))
    else:
        names |= {name for _, path, op in listed() if path == dialect.path for name in _properties(op.body or {})}
    return sorted(names | set(dialect.good) | set(ELSEWHERE if dialect.generates else ()))


def _properties(schema: dict[str, Any]) -> list[str]:
    inner = [_properties(part) for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
    return [*schema.get("properties", ()), *(name for part in inner for name in part)]


def verdicts(dialect: Dialect) -> dict[str, list[str]]:
    """Fields by what becomes of them: ``taken``, ``refused`` or ``ignored``."""
    dialect.parse(dict(dialect.good))
    found: dict[str, list[str]] = {"taken": [], "refused": [], "ignored": []}
    for name in candidates(dialect):
        try:
            dialect.parse({**dialect.good, name: Strange()})
        except ApiError as error:
            honoured = "not supported" not in error.message and "not available" not in error.message
            found["taken" if honoured and error.code != 5005 else "refused"].append(name)
        else:
            found["ignored"].append(name)
    return found


def page() -> str:
    """docs/fields.md."""
    routes = listed()
    lines = [
        "# Routes and fields",
        "",
        *INTRODUCTION,
    ]
    for dialect in DIALECTS:
        verdict = verdicts(dialect)
        same = [about for _, path, about in routes if path == dialect.path][0]
        paths = [path for method, path, about in routes if about is same and method == "POST"] or [dialect.path]
        lines += ["", f"## {dialect.name}", "", "| | |", "| --- | --- |"]
        lines.append(f"| routes | {_ticked([f'POST {path}' for path in paths])} |")
        lines += [f"| {kind} | {_ticked(names) or 'none'} |" for kind, names in verdict.items()]
        if dialect.tests:
            lines.append(f"| clients run in | {_ticked(list(dialect.tests))} |")
    lines += ["", "## Every route", "", "| method and path | what |", "| --- | --- |"]
    lines += [f"| `{method} {path}` | {about.summary} |" for method, path, about in routes]
    return "\n".join(lines) + "\n"


def _ticked(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks fields", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/fields.md instead of printing it")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
