"""`serve-app run`: one answer, and a chat whose terminal is the test."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from serve_app.cli.chat import Chat, _printable
from serve_app.client.answers import Answer
from serve_app.client.server import Server


async def test_an_answer_streams_and_tells_its_figures_when_asked(echo, shell):
    out, err = await shell("run", echo.model, "one two three", "--stats", "--temperature", "0", "--seed", "3")
    assert out == "one two three\n"
    assert "3 prompt tokens (1 cached)" in err and "3 tokens" in err and "neurons" in err
    asked = echo.backend.asked[-1]
    assert (asked.sampling.temperature, asked.sampling.seed) == (0, 3)
    out, err = await shell("run", echo.model, "one", "--json")
    assert json.loads(out)["response"] == "one" and not err


@pytest.mark.parametrize("words", [(), ("-",)])
async def test_the_prompt_comes_from_standard_input(echo, shell, monkeypatch, words):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    out, _ = await shell("run", echo.model, *words, "--system", "be brief")
    assert out == "from a pipe\n"
    assert [each["role"] for each in echo.backend.asked[-1].messages] == ["system", "user"]


async def test_what_is_wrong_is_said_with_what_to_do(echo, shell, monkeypatch):
    _, err = await shell("run", "@cf/no/such", "hi", status=1)
    assert "No such model" in err
    _, err = await shell("run", echo.model, "break it", status=1)
    assert err.startswith("serve-app: ") and "Internal server error" in err
    connected = Server.connect()
    connected.http.headers["Authorization"] = "Bearer nobody's key, surely"
    monkeypatch.setattr(Server, "connect", staticmethod(lambda: connected))
    _, err = await shell("status", status=1)
    assert "SERVE_APP_API_KEY" in err


async def test_nobody_answers(shell, monkeypatch, tmp_path):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    monkeypatch.setenv("SERVE_APP_PORT", "9")
    for words in (("run", "@cf/x/y", "hi"), ("status",), ("lora", "list"), ("batch", "list")):
        _, err = await shell(*words, status=1)
        assert "no server answers at http://127.0.0.1:9: start one with `make serve`" in err


class Typed:
    """A terminal at which ``lines`` are typed; an exception among them is raised there. ``stop_at``: Ctrl-C when this
    text is shown.
    """

    def __init__(self, *lines: str | type[BaseException], stop_at: str = "") -> None:
        self.lines = list(lines)
        self.stop_at = stop_at
        self.shown = ""

    def ask(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def say(self, text: str, *, dim: bool = False, end: str = "\n") -> None:
        self.shown += text + end
        if self.stop_at and self.stop_at in text:
            self.stop_at = ""
            raise KeyboardInterrupt


@pytest.fixture
def chat(echo):
    async def typed(*lines, stop_at: str = "", **more) -> tuple[Chat, str]:
        terminal = Typed(*lines, stop_at=stop_at)
        made = Chat(Server.connect(), echo.model, terminal, **more)
        assert await asyncio.to_thread(made.run) == 0
        return made, terminal.shown

    return typed


async def test_a_chat_sends_what_was_said(echo, chat):
    made, shown = await chat("first words", "second words", system="be kind", stats=True)
    assert "first words\n" in shown and "second words\n" in shown and "2 prompt tokens" in shown
    told = [(each["role"], each["content"]) for each in echo.backend.asked[-1].messages]
    turns = [("user", "first words"), ("assistant", "first words"), ("user", "second words")]
    assert told == [("system", "be kind"), *turns]


async def test_ctrl_c_stops_the_answer_and_not_the_chat(echo, chat):
    made, shown = await chat("one two three four", "five", stop_at="two")
    assert "(stopped)" in shown and shown.rstrip().endswith("five")
    assert [each["content"] for each in made.messages] == ["one two three four", "one two", "five", "five"]


async def test_ctrl_c_at_the_prompt_says_how_to_leave(chat):
    made, shown = await chat("one", KeyboardInterrupt, "two", "/exit", "never")
    assert "/exit or Ctrl-D" in shown and made.over and "never" not in shown and len(made.messages) == 4


async def test_messages_of_several_lines(echo, chat):
    made, _ = await chat('"""one', "two", 'three"""', "four\\", "five", "")
    assert [each["content"] for each in made.messages[::2]] == ["one\ntwo\nthree", "four\nfive"]


async def test_a_turn_that_fails_is_no_part_of_the_conversation(echo, chat):
    made, shown = await chat("break", "busy", "good")
    assert [each["content"] for each in made.messages] == ["good", "good"]
    assert shown.count("serve-app: ") == 2


async def test_commands(echo, chat, tmp_path):
    kept = str(tmp_path / "kept.json")
    lines = (
        "one",
        "/set temperature 0.5",
        "/set max_tokens many",
        "/set nonsense 3",
        "/set temperature",
        "/set seed 7",
    )
    made, shown = await chat("/system be brief", *lines, f"/save {kept}", "/reset", "two", "/retry", "/nonsense", "/?")
    assert made.system == "be brief" and made.options == {"seed": 7}
    assert [each["content"] for each in made.messages] == ["two", "two"]
    assert "max_tokens takes a number, not 'many'" in shown and "'nonsense' is no option" in shown
    assert "no command /nonsense" in shown and "/reset" in shown
    assert echo.backend.asked[-1].sampling.seed == 7 and len(echo.backend.asked) == 3
    again, shown = await chat("/load /nowhere", "/load " + kept, "/model @cf/other/model", "/bye")
    assert [each["content"] for each in again.messages] == ["one", "one"]
    assert again.system == "be brief" and again.model == "@cf/other/model" and "/nowhere" in shown


def test_an_answer_cannot_command_the_terminal():
    assert _printable("a\x1b[2Jb\x07\u009bc\n\té") == "a[2Jbc\n\té"


def test_the_rate_leaves_the_first_token_out():
    answer = Answer(usage={"prompt_tokens": 4, "completion_tokens": 11}, first_s=1.0, last_s=3.0)
    assert answer.tokens_per_second == 5.0 and "11 tokens at 5.0/s" in answer.figures()
    assert Answer(usage={"completion_tokens": 1}, first_s=1.0, last_s=1.0).tokens_per_second is None
