"""A chat at a terminal: what was said so far, commands that begin with a slash, and answers as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from serve_app.client.answers import Answer, ask
from serve_app.client.server import Server, ServerError

QUOTES = '"""'
# What /set knows, and how it is read.
OPTIONS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
}


class Terminal(Protocol):
    """What a chat needs of a terminal. ``ask`` raises EOFError at the end of the input."""

    def ask(self, prompt: str) -> str: ...
    def say(self, text: str, *, dim: bool = False, end: str = "\n") -> None: ...


class Screen:
    """The terminal itself, with line editing. Lines are remembered while the chat lasts and are written nowhere."""

    def __init__(self) -> None:
        import readline

        self._colours = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        names = [f"/{name}" for name in COMMANDS]

        def complete(text: str, state: int) -> str | None:
            found = [name for name in names if name.startswith(text)] if text.startswith("/") else []
            return found[state] if state < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")
        # Several lines that are pasted are one message.
        readline.parse_and_bind("set enable-bracketed-paste on")

    def ask(self, prompt: str) -> str:
        return input(prompt)

    def say(self, text: str, *, dim: bool = False, end: str = "\n") -> None:
        text = _printable(text)
        print(f"\033[2m{text}\033[0m" if dim and self._colours and text else text, end=end, flush=True)


def _printable(text: str) -> str:
    """Without control characters, by which a model's answer could command the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


class Chat:
    """A conversation with one model. ``options``: of every request."""

    def __init__(
        self,
        server: Server,
        model: str,
        terminal: Terminal,
        system: str = "",
        options: dict[str, Any] | None = None,
        *,
        stats: bool = False,
    ) -> None:
        self._server = server
        self._terminal = terminal
        self.model = model
        self.system = system
        self.options = dict(options or {})
        self.stats = stats
        self.messages: list[dict[str, str]] = []
        self.over = False

    def run(self) -> int:
        """Until /exit or Ctrl-D. Ctrl-C ends an answer, or a line, and not the chat."""
        self._terminal.say(f"{self.model}: /help lists commands, {QUOTES} begins several lines, Ctrl-D ends", dim=True)
        while not self.over:
            try:
                text = self._read()
            except EOFError:
                self._terminal.say("")
                break
            except KeyboardInterrupt:
                self._terminal.say("\n/exit or Ctrl-D ends the chat", dim=True)
                continue
            if text.startswith("/"):
                self.command(text)
            elif text.strip():
                self.say(text)
        return 0

    def _read(self) -> str:
        text = self._terminal.ask(">>> ")
        if text.startswith(QUOTES):
            text = text[len(QUOTES) :]
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._terminal.ask("... ")
            return text.rstrip()[: -len(QUOTES)].strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._terminal.ask("... ")
        return text

    def say(self, text: str) -> None:
        """One turn. An answer that is stopped stays in the conversation as far as it came; a turn that fails does
        not.
        """
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer, thinking, stopped = Answer(), False, False
        inputs = {"messages": system + self.messages, **self.options}
        try:
            with closing(ask(self._server, self.model, inputs, answer, self._waits)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    if thinking and not piece.reasoning:
                        self._terminal.say("\n")
                    thinking = piece.reasoning
                    self._terminal.say(piece.text, dim=piece.reasoning, end="")
        except KeyboardInterrupt:
            stopped = True
        except ServerError as error:
            self.messages.pop()
            self._terminal.say(f"\nserve-app: {error}" if answer.first_s is not None else f"serve-app: {error}")
            return
        self._terminal.say("\n(stopped)" if stopped else "", dim=stopped)
        for call in answer.tool_calls:
            self._terminal.say(json.dumps(call), dim=True)
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            # Two messages of a user in a row are refused by some templates.
            self.messages.pop()
        if answer.finish == "length" and not stopped:
            self._terminal.say("(max_tokens is reached: /set max_tokens N allows more)", dim=True)
        if self.stats and answer.figures():
            self._terminal.say(answer.figures(), dim=True)

    def _waits(self, why: str) -> None:
        self._terminal.say(f"({why})", dim=True)

    # -- commands ------------------------------------------------------------------------------------------------

    def command(self, line: str) -> None:
        """Does what a line with a slash says."""
        name, _, rest = line[1:].partition(" ")
        name = SAME.get(name, name)
        if name not in COMMANDS:
            self._terminal.say(f"There is no command /{name}; /help lists them. A message may begin with a space.")
            return
        try:
            COMMANDS[name][1](self, rest.strip())
        except (OSError, ValueError) as error:
            self._terminal.say(f"serve-app: {error}")

    def help(self, rest: str) -> None:
        for name, (said, _) in COMMANDS.items():
            self._terminal.say(f"  /{name:14} {said}")
        self._terminal.say(f"  {QUOTES}...{QUOTES}         a message of several lines; so does \\ at the end of a line")
        self._terminal.say("  Ctrl-C          stops the answer; Ctrl-D ends the chat")

    def reset(self, rest: str) -> None:
        self.messages.clear()
        self._terminal.say("(a new conversation)", dim=True)

    def set_system(self, rest: str) -> None:
        if rest:
            self.system = "" if rest in ("none", '""') else rest
            self.messages.clear()
        self._terminal.say(f"(system prompt: {self.system or 'none'})", dim=True)

    def set_option(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name and name not in OPTIONS:
            raise ValueError(f"{name!r} is no option. There are {', '.join(OPTIONS)}.")
        if name and value:
            try:
                self.options[name] = OPTIONS[name](value)
            except ValueError:
                raise ValueError(f"{name} takes a number, not {value!r}") from None
        elif name:
            self.options.pop(name, None)
        shown = ", ".join(f"{name} {value}" for name, value in self.options.items()) or "all as the model has them"
        self._terminal.say(f"({shown})", dim=True)

    def use_model(self, rest: str) -> None:
        self.model = rest or self.model
        self._terminal.say(f"({self.model})", dim=True)

    def retry(self, rest: str) -> None:
        """The last question once more."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if self.messages:
            self.say(self.messages.pop()["content"])

    def toggle_stats(self, rest: str) -> None:
        self.stats = not self.stats
        self._terminal.say(f"(figures {'on' if self.stats else 'off'})", dim=True)

    def save(self, rest: str) -> None:
        if not rest:
            raise ValueError("name a file: /save FILE")
        kept = {"model": self.model, "system": self.system, "options": self.options, "messages": self.messages}
        Path(rest).expanduser().write_text(json.dumps(kept, indent=2) + "\n")
        self._terminal.say(f"({len(self.messages)} messages in {rest})", dim=True)

    def load(self, rest: str) -> None:
        if not rest:
            raise ValueError("name a file: /load FILE")
        try:
            kept = json.loads(Path(rest).expanduser().read_text())
            messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in kept["messages"]]
            self.system, self.options = str(kept.get("system") or ""), dict(kept.get("options") or {})
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{rest} holds no conversation of /save") from None
        self.messages[:] = messages
        self._terminal.say(f"({len(messages)} messages)", dim=True)

    def leave(self, rest: str) -> None:
        self.over = True


COMMANDS: dict[str, tuple[str, Callable[[Chat, str], None]]] = {
    "help": ("these lines", Chat.help),
    "reset": ("begin a new conversation; the system prompt stays (also /clear)", Chat.reset),
    "system": ("TEXT: another system prompt, and a new conversation; none: without one", Chat.set_system),
    "set": ("NAME VALUE: temperature, max_tokens, top_p, seed and others; without VALUE: as before", Chat.set_option),
    "model": ("NAME: go on with another model", Chat.use_model),
    "retry": ("answer the last question again", Chat.retry),
    "stats": ("show time to first token, tokens/s and cost after each answer, or no more", Chat.toggle_stats),
    "save": ("FILE: write the conversation as JSON", Chat.save),
    "load": ("FILE: go on with one that was saved", Chat.load),
    "exit": ("end (also /bye, /quit)", Chat.leave),
}
# What people know from other programs.
SAME = {"?": "help", "clear": "reset", "bye": "exit", "quit": "exit"}
