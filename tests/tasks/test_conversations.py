"""Conversations, prompt templates and `truncation` of the Responses dialect, through OpenAI's unmodified client.

The model is one of :class:`tests.tasks.test_backend.EchoBackend`, which says the last message again and notes what it
was asked.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.conversations import Conversation, ConversationItemList

from serve_app.api.fields.content import content_text
from serve_app.api.types import GenerateRequest
from serve_app.tasks.backend import Prepared
from serve_app.tasks.model import ServedModel
from tests.tasks.conftest import KEY
from tests.tasks.test_backend import EchoBackend


class Noting(EchoBackend):
    """Notes the conversations it was asked to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[GenerateRequest] = []

    async def prepare(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> Prepared:
        self.asked.append(request)
        said = request.messages[-1]["content"] if request.messages else request.prompt
        words = content_text(said).split()
        return Prepared(request, len(words), words)

    @property
    def talk(self) -> list[str]:
        return [f"{m['role']}: {content_text(m.get('content'))}" for m in self.asked[-1].messages or ()]


@pytest.fixture
async def server(serve, record):
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model = model
        served.backend = served.gateway.backends[model] = Noting()
        http = httpx.AsyncClient(transport=served.http._transport)
        served.client = AsyncOpenAI(api_key=KEY, base_url="http://here/v1", http_client=http, max_retries=0)
        yield served
        await http.aclose()


async def test_a_conversation_grows_by_its_responses(server) -> None:
    client, model = server.client, server.model
    first = {"type": "message", "role": "developer", "content": "Be brief."}
    made = await client.conversations.create(metadata={"topic": "maths"}, items=[first])
    assert Conversation.model_validate(made.model_dump(), strict=True).metadata == {"topic": "maths"}
    one = await client.responses.create(model=model, input="one", conversation=made.id)
    assert one.conversation and one.conversation.id == made.id and one.output_text == "one"
    stream = await client.responses.create(model=model, input="two", conversation={"id": made.id}, stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"
    assert server.backend.talk == ["system: Be brief.", "user: one", "assistant: one", "user: two"]
    listed = await client.conversations.items.list(made.id, order="asc", limit=3)
    said = [(item.role, item.content[0].type, item.content[0].text) async for item in listed]
    assert said == [
        ("developer", "input_text", "Be brief."),
        ("user", "input_text", "one"),
        ("assistant", "output_text", "one"),
        ("user", "input_text", "two"),
        ("assistant", "output_text", "two"),
    ]
    # Pages of whatever length hold the same, newest first unless told otherwise.
    newest = [item.id async for item in client.conversations.items.list(made.id, limit=2)]
    assert newest == [item.id async for item in client.conversations.items.list(made.id, order="asc")][::-1]
    # From a response of the conversation one goes on with what was there then.
    branch = await client.responses.create(model=model, input="else", previous_response_id=one.id)
    assert server.backend.talk == ["system: Be brief.", "user: one", "assistant: one", "user: else"]
    items = [item async for item in client.responses.input_items.list(branch.id, order="asc")]
    assert [item.content[0].text for item in items] == ["Be brief.", "one", "one", "else"]
    assert len([1 async for _ in client.conversations.items.list(made.id)]) == 5
    deleted = await client.conversations.delete(made.id)
    assert deleted.deleted and deleted.object == "conversation.deleted"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=model, input="x", conversation=made.id)


async def test_items_of_every_kind(server) -> None:
    client = server.client
    made = await client.conversations.create()
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "2"}
    thought = {"type": "reasoning", "id": "mine", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    said = {"role": "user", "content": [{"type": "input_text", "text": "Add."}]}
    added = await client.conversations.items.create(made.id, items=[said, thought, call, result])
    assert ConversationItemList.model_validate(added.model_dump()) and not added.has_more
    assert [item.type for item in added.data] == ["message", "reasoning", "function_call", "function_call_output"]
    assert len({item.id for item in added.data}) == 4 and added.first_id == added.data[0].id != "mine"
    found = await client.conversations.items.retrieve(added.data[2].id, conversation_id=made.id)
    assert found == added.data[2] and found.call_id == "c" and found.status == "completed"
    await client.responses.create(model=server.model, input="so", conversation=made.id)
    roles = [message["role"] for message in server.backend.asked[-1].messages]
    assert roles == ["user", "assistant", "tool", "user"]
    assert server.backend.asked[-1].messages[1]["reasoning_content"] == "so"
    left = await client.conversations.items.delete(added.data[1].id, conversation_id=made.id)
    assert left.id == made.id
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(added.data[1].id, conversation_id=made.id)
    changed = await client.conversations.update(made.id, metadata={"a": "b"})
    assert changed == await client.conversations.retrieve(made.id) and changed.metadata == {"a": "b"}


async def test_what_fails_adds_nothing(server) -> None:
    client = server.client
    made = await client.conversations.create()
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model=server.model, input="busy", conversation=made.id)
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model=server.model, input="break", conversation=made.id)
    # Not stored means that no response of that id is; the conversation goes on.
    kept = await client.responses.create(model=server.model, input="on", conversation=made.id, store=False)
    assert [item.role async for item in client.conversations.items.list(made.id, order="asc")] == ["user", "assistant"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(kept.id)


TEMPLATE = """
versions:
  "1": {instructions: Old.}
  "2":
    instructions: You answer for {{company}}.
    messages: [{role: user, content: "I am {{ name }}."}, {role: assistant, content: Hello.}]
    defaults: {model: MODEL, temperature: 0.25, max_output_tokens: 7}
"""


@pytest.fixture
def template(server, tmp_path):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "support.yaml").write_text(TEMPLATE.replace("MODEL", f'"{server.model}"'))
    (tmp_path / "prompts" / "broken.yaml").write_text("versions: 5")
    return "support"


async def test_a_template_says_what_the_request_does_not(server, template) -> None:
    client, name = server.client, {"type": "input_text", "text": "{{company}} <|im_end|>"}
    asked = {"id": template, "variables": {"company": "ACME", "name": name}}
    first = await client.responses.create(prompt=asked, input="Hi.")
    said = ["user: I am {{company}} <|im_end|>.", "assistant: Hello."]
    assert server.backend.talk == ["system: You answer for ACME.", *said, "user: Hi."]
    assert first.model == server.model and first.temperature == 0.25 and first.max_output_tokens == 7
    assert first.prompt and first.prompt.version == "2" and first.prompt.variables["company"] == "ACME"
    assert first.instructions == "You answer for ACME."
    # The request's own words count, and the template belongs to this request alone, as instructions do.
    second = await client.responses.create(model=server.model, input="So?", previous_response_id=first.id)
    assert server.backend.talk == ["user: Hi.", "assistant: Hi.", "user: So?"] and second.prompt is None
    await client.responses.create(prompt={**asked, "version": "1", "variables": {}}, model=server.model, input="x",
                                  instructions="New.", temperature=1)  # fmt: skip
    assert server.backend.talk == ["system: New.", "user: x"] and server.backend.asked[-1].sampling.temperature == 1
    # The template's messages may be all there is to answer.
    alone = await client.responses.create(prompt=asked)
    assert alone.output_text == "Hello."


BAD_PROMPTS: list[tuple[Any, int, str]] = [
    ("support", 400, "prompt must be an object"),
    ({}, 400, "prompt.id"),
    ({"id": 5}, 400, "prompt.id"),
    ({"id": "../../etc/passwd"}, 400, "prompt.id must be"),
    ({"id": "support\n"}, 400, "prompt.id must be"),
    ({"id": "x" * 65}, 400, "prompt.id must be"),
    ({"id": "none"}, 404, "no prompt template none"),
    ({"id": "support", "version": "9"}, 404, "in version 9"),
    ({"id": "support", "version": 2}, 400, "prompt.version|version must be a string"),
    ({"id": "broken"}, 400, "broken: versions"),
    ({"id": "support"}, 400, "lacks company, name"),
    ({"id": "support", "variables": {"company": "x"}}, 400, "lacks name"),
    ({"id": "support", "variables": []}, 400, "prompt.variables must be"),
    ({"id": "support", "variables": {"company": 5, "name": "x"}}, 400, "prompt.variables.company"),
    ({"id": "support", "variables": {"company": "x", "name": "y", "z": "z"}}, 400, "no variable z"),
    ({"id": "support", "variables": {"name": {"type": "input_image", "image_url": "x"}}}, 400, "only text"),
    ({"id": "support", "variables": {"name": {"type": "input_text"}}}, 400, "variables.name.text"),
    ({"id": "support", "variables": {str(i): "x" for i in range(300)}}, 400, "at most 256"),
]


@pytest.mark.parametrize(("prompt", "status", "words"), BAD_PROMPTS)
async def test_bad_prompts(server, template, prompt, status, words) -> None:
    answer = await server.http.post("/v1/responses", json={"model": server.model, "input": "x", "prompt": prompt})
    assert answer.status_code == status and re.search(words, answer.json()["error"]["message"])


GONE = "conv_" + "0" * 32
MESSAGE = {"role": "user", "content": "x"}
# Method, path, body, status.
BAD: list[tuple[str, str, Any, int]] = [
    *(("POST", "", body, 400) for body in (
        b"", b"{", b"[]", b"null", b"\xff", {"items": "x"}, {"items": {}}, {"items": [5]}, {"items": [None]},
        {"items": [{}]}, {"items": [{"role": "wizard", "content": "x"}]}, {"items": [{"role": "user"}]},
        {"items": [{"role": "user", "content": 5}]}, {"items": [{"role": "user", "content": [{"type": "x"}]}]},
        {"items": [{"type": "web_search_call", "id": "x"}]}, {"items": [{"type": 5}]},
        {"items": [{"type": "item_reference", "id": "msg_1"}]},
        {"items": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        {"items": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
        {"items": [{"type": "function_call_output", "call_id": "c"}]},
        {"items": [{"type": "reasoning", "content": "x"}]}, {"items": [MESSAGE] * 4097},
        {"items": [{"type": "compaction", "encrypted_content": "x"}]},
        {"metadata": "x"}, {"metadata": []}, {"metadata": {"k": {}}}, {"metadata": {"k" * 65: "x"}},
        {"metadata": {"k": "x" * 513}}, {"metadata": {str(i): "x" for i in range(17)}},
    )),
    *(("POST", "/ID", body, 400) for body in (b"", b"[]", {}, {"metadata": None}, {"metadata": 5},
                                               {"metadata": {"k": []}})),
    *(("POST", "/ID/items", body, 400) for body in (
        b"", {}, {"items": None}, {"items": "x"}, {"items": []}, {"items": [{"role": "user", "content": None}]},
        {"items": [MESSAGE, 5]},
    )),
    *(("GET", f"/ID/items?{query}", None, 400) for query in (
        "limit=0", "limit=101", "limit=x", "limit=-1", "limit=1.5", "limit=" + "9" * 30, "order=up", "order=DESC",
        "limit=%00")),
    *(("GET", f"/ID/items?after={after}", None, 404) for after in ("msg_none", "%00", "%ff", "x" * 300)),
    *(("GET", f"/ID/items/{name}", None, 404) for name in ("msg_none", "%00", "%C3%A9", "x" * 300, "'")),
    *(("DELETE", f"/ID/items/{name}", None, 404) for name in ("msg_none", "%00")),
    *((method, f"/{name}", None, 404) for method in ("GET", "DELETE") for name in (GONE, "x", "%00", "conv_", "'")),
    ("POST", f"/{GONE}", {"metadata": {}}, 404), ("POST", f"/{GONE}/items", {"items": [MESSAGE]}, 404),
    ("GET", f"/{GONE}/items", None, 404), ("GET", f"/{GONE}/items/x", None, 404),
    ("GET", "", None, 405), ("PUT", "/ID", {}, 405), ("PATCH", "/ID", {}, 405), ("DELETE", "/ID/items", None, 405),
    ("POST", "/ID/items/x", {}, 405), ("GET", "/ID/other", None, 404),
]  # fmt: skip


async def test_bad_input_is_refused_and_changes_nothing(server) -> None:
    made = (await server.http.post("/v1/conversations", json={"items": [MESSAGE], "metadata": {"a": "b"}})).json()
    assert len(BAD) > 70
    for method, path, body, status in BAD:
        sent = {"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}
        url = f"/v1/conversations{path.replace('ID', made['id'])}"
        answer = await server.http.request(method, url, **sent)
        assert answer.status_code == status, (method, path, str(body)[:80], answer.text[:200])
        assert answer.json()["error"]["message"] and answer.json()["errors"][0]["code"]
    left = (await server.http.get(f"/v1/conversations/{made['id']}/items")).json()
    assert [item["content"][0]["text"] for item in left["data"]] == ["x"]
    assert (await server.http.get(f"/v1/conversations/{made['id']}")).json() == made


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"conversation": 5}, 400, "conversation must be a string"),
        ({"conversation": {}}, 400, "conversation must be a string"),
        ({"conversation": ""}, 400, "conversation must be the id"),
        ({"conversation": "conv_1"}, 400, "conversation must be the id"),
        ({"conversation": GONE + "\n"}, 400, "conversation must be the id"),
        ({"conversation": GONE}, 404, GONE),
        ({"conversation": {"id": GONE}}, 404, GONE),
        ({"conversation": GONE, "previous_response_id": "resp_" + "0" * 32}, 400, "exclude each other"),
        ({"truncation": "middle"}, 400, "truncation must be one of"),
        ({"truncation": True}, 400, "truncation must be one of"),
    ],
)
async def test_bad_fields_of_responses(server, fields, status, words) -> None:
    answer = await server.http.post("/v1/responses", json={"model": server.model, "input": "x", **fields})
    assert answer.status_code == status and words in answer.json()["error"]["message"]


async def test_truncation_is_told_and_asked_for(server) -> None:
    shown = await server.client.responses.create(model=server.model, input="x", truncation="auto")
    assert shown.truncation == "auto" and server.backend.asked[-1].drop_oldest
    shown = await server.client.responses.create(model=server.model, input="x")
    assert shown.truncation == "disabled" and not server.backend.asked[-1].drop_oldest
