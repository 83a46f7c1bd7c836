"""``serve-app batch``: many requests at once to the running server, with progress, and again after Ctrl-C."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.cli.groups import Group, can_show, served, show
from serve_app.cli.usage import bar
from serve_app.client.batches import ENDED, Batches
from serve_app.client.server import Server, ServerError

BAR = 24
# Of a file, what an estimate looks at.
SAMPLE_BYTES = 1_000_000
_ABOUT = """\
A batch is a file of requests, one JSON object a line. They are run with what interactive users leave of the machine,
and each is answered, whatever is lost meanwhile. Two forms are known:
  bodies of one model, which --model names:
    {"prompt": "What does math.sqrt do?", "external_reference": "row-1"}
  OpenAI's, of any models:
    {"custom_id": "row-1", "method": "POST", "url": "/v1/completions", "body": {"model": "@cf/...", "prompt": "..."}}

examples:
  serve-app batch submit in.jsonl --model @cf/pico/pico-instruct --watch
  serve-app batch estimate in.jsonl --model @cf/pico/pico-instruct      what it would cost, without running it
  serve-app batch watch ID                                              again, after Ctrl-C or from elsewhere
  serve-app batch results ID -o out.jsonl                               what is done so far, or everything
  serve-app batch retry ID --watch                                      run what did not succeed again
"""


def add_parser(commands: Any) -> None:
    batch = Group(commands, "batch", "run a file of requests on the running server", _ABOUT)

    submit = batch.action("submit", "send a file of requests; prints the batch's id", _with(_submit), json=True)
    submit.add_argument("file", type=Path, help="one JSON object a line")
    submit.add_argument("--model", help="the model of all requests, where they are bodies of one model")
    submit.add_argument("--watch", action="store_true", help="show the progress until it has ended")
    submit.add_argument("--key", default="", help="one key makes one batch, however often it is sent")

    estimate = batch.action(
        "estimate", "what a file would use and cost, without running it", _with(_estimate), json=True
    )
    estimate.add_argument("file", type=Path, help="one JSON object a line")
    estimate.add_argument("--model", help="the model of all requests, where they are bodies of one model")

    listed = batch.action("list", "batches of the account, the newest first", _with(_list), json=True)
    listed.add_argument("--limit", type=int, default=20, help="at most so many, up to 100 (default 20)")
    listed.add_argument("--after", default="", metavar="ID", help="those before this one")

    for name, said, command in (
        ("status", "how far a batch is", _status),
        ("watch", "show the progress of a batch until it has ended", _watch),
        ("cancel", "cancel a batch; what is done stays", _cancel),
        ("delete", "forget a batch that has ended, with its results", _delete),
    ):
        batch.action(name, said, _with(command), json=True).add_argument("id", help="the batch's id")

    results = batch.action(
        "results", "answers of a batch, one JSON object a line, in the order of the file", _with(_results), json=True
    )
    results.add_argument("id", help="the batch's id")
    results.add_argument("-o", "--output", type=Path, help="write them to this file")
    results.add_argument("--errors", action="store_true", help="what did not succeed (of a file in OpenAI's form)")

    retry = batch.action("retry", "run what did not succeed again, as a new batch", _with(_retry), json=True)
    retry.add_argument("id", help="the batch's id")
    retry.add_argument("--watch", action="store_true", help="show the progress until it has ended")


def _with(command: Callable[[argparse.Namespace, Batches], int]) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace, server: Server) -> int:
        return command(arguments, Batches(server))

    return served(run)


def _submit(arguments: argparse.Namespace, batches: Batches) -> int:
    endpoint = _endpoint(arguments.file, arguments.model)
    if endpoint:
        made = batches.submit_file(arguments.file, endpoint, key=arguments.key)
    else:
        with arguments.file.open("rb") as lines:
            made = batches.submit_lines(arguments.model, lines, key=arguments.key)
    if arguments.watch:
        return _follow(batches, made["id"], as_json=arguments.json)
    return show(made, arguments.json, made["id"])


def _estimate(arguments: argparse.Namespace, batches: Batches) -> int:
    endpoint, total = _endpoint(arguments.file, arguments.model), sum(1 for _ in _lines(arguments.file))
    every, size, sample = -(-arguments.file.stat().st_size // SAMPLE_BYTES), 0, []
    for place, line in enumerate(_lines(arguments.file)):
        _read(line, place + 1)
        if place % every == 0 and size + len(line) <= SAMPLE_BYTES:
            sample.append(line.strip())
            size += len(line)
    found = batches.estimate(sample, arguments.model, endpoint)
    whole = total / len(sample)
    neurons = {case: amount * whole for case, amount in found["neurons"].items()}
    units = {case: {kind: round(n * whole) for kind, n in had.items()} for case, had in found["units"].items()}
    cost = found["cost"] and {
        case: amount if case == "currency" else str(float(amount) * whole) for case, amount in found["cost"].items()
    }
    finish = dict(found["finish_s"])
    if finish["least"] is not None:
        finish["least"] = round(finish["least"] * whole, 1)
    shown = {"requests": total, "looked_at": len(sample), "wrong": round(found["wrong"] * whole)}
    shown |= {"units": units, "neurons": neurons, "cost": cost, "cached_share": found["cached_share"]}
    shown["finish_s"] = finish
    return show(shown, arguments.json, _said(shown))


def _said(estimate: dict[str, Any]) -> str:
    total, neurons, cost, finish = (estimate[name] for name in ("requests", "neurons", "cost", "finish_s"))
    said = [f"{total} requests: {neurons['expected']:,.2f} neurons ({neurons['least']:,.2f} to {neurons['most']:,.2f})"]
    if cost:
        amounts = [f"{float(cost[case]):,.6g}" for case in ("expected", "least", "most")]
        said.append(f"{amounts[0]} {cost['currency']} ({amounts[1]} to {amounts[2]})")
    said += [f"{amount:,} {kind.replace('_', ' ')}" for kind, amount in estimate["units"]["expected"].items()]
    least = "?" if finish["least"] is None else f"{finish['least']:,.0f} s"
    said.append(f"done in {least} to {finish['most'] / 3600:g} h")
    if estimate["wrong"]:
        said.append(f"{estimate['wrong']} are wrong")
    if estimate["looked_at"] < total:
        said.append(f"by {estimate['looked_at']} of them")
    return ", ".join(said)


def _list(arguments: argparse.Namespace, batches: Batches) -> int:
    found, more = batches.page(after=arguments.after, limit=arguments.limit)
    if arguments.json:
        return show(found, True, "")
    for each in found:
        made = datetime.fromtimestamp(each["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
        counts = each["requests"]
        print(
            f"{each['id']}  {made}  {each['status']:10} {each['progress']['done']:>8} of {counts['total']:<8} "
            f"{each['model'] or ''}".rstrip()
        )
    if more:
        print(f"more: --after {found[-1]['id']}", file=sys.stderr)
    return 0


def _status(arguments: argparse.Namespace, batches: Batches) -> int:
    found = batches.get(arguments.id)
    return show(found, arguments.json, described(found))


def _watch(arguments: argparse.Namespace, batches: Batches) -> int:
    return _follow(batches, arguments.id, as_json=arguments.json)


def _cancel(arguments: argparse.Namespace, batches: Batches) -> int:
    found = batches.cancel(arguments.id)
    return show(found, arguments.json, described(found))


def _delete(arguments: argparse.Namespace, batches: Batches) -> int:
    if batches.get(arguments.id)["status"] not in ENDED:
        raise ServerError(f"the batch has not ended; `serve-app batch cancel {arguments.id}` first", 400)
    return show(batches.delete(arguments.id), arguments.json, f"{arguments.id} is forgotten")


def _results(arguments: argparse.Namespace, batches: Batches) -> int:
    lines = batches.lines(arguments.id, errors=arguments.errors)
    if arguments.output is None:
        for line in lines:
            print(line)
        return 0
    # Whole or not at all: half a file would look like all results.
    partial = arguments.output.with_name(arguments.output.name + ".part")
    with partial.open("w", encoding="utf-8") as file:
        count = sum(1 for line in lines if file.write(line + "\n"))
    partial.replace(arguments.output)
    print(f"{count} results in {arguments.output}", file=sys.stderr)
    return 0


def _retry(arguments: argparse.Namespace, batches: Batches) -> int:
    made = batches.retry(arguments.id)
    if arguments.watch:
        return _follow(batches, made["id"], as_json=arguments.json)
    return show(made, arguments.json, made["id"])


def _follow(batches: Batches, batch_id: str, *, as_json: bool) -> int:
    """Shows progress; Ctrl-C leaves the batch running, and says how to come back."""
    live = sys.stderr.isatty() and not as_json

    def told(batch: dict[str, Any]) -> None:
        if live:
            columns = shutil.get_terminal_size().columns
            print("\r" + progress(batch)[: columns - 1].ljust(columns - 1), end="", file=sys.stderr, flush=True)

    print(f"batch {batch_id}", file=sys.stderr)
    try:
        ended = batches.wait(batch_id, told)
    except KeyboardInterrupt:
        print(f"\nThe batch goes on. Come back with: serve-app batch watch {batch_id}", file=sys.stderr)
        print(f"End it with: serve-app batch cancel {batch_id}", file=sys.stderr)
        return 130
    if live:
        print(file=sys.stderr)
    show(ended, as_json, described(ended))
    return 0 if ended["status"] == "completed" and not ended["requests"]["failed"] else 1


def progress(batch: dict[str, Any]) -> str:
    """One line: a bar, how many are done, the rate, and the time that is left."""
    total, done = batch["requests"]["total"], batch["progress"]["done"]
    share = done / total if total else 0.0
    said = f"{batch['status']:10} "
    if total:
        said += f"{bar(share, BAR, blocks=can_show('█')).ljust(BAR)} {share:4.0%}  {done:,} of {total:,}"
    if rate := batch["progress"]["requests_per_second"]:
        said += f"  {rate:,.1f}/s"
    if (left := batch["progress"]["seconds_left"]) and batch["status"] not in ENDED:
        said += f"  {duration(left)} left"
    if failed := batch["requests"]["failed"]:
        said += f"  {failed:,} failed"
    return said


def described(batch: dict[str, Any]) -> str:
    """A few lines for people."""
    counts, used, cost = batch["requests"], batch["usage"], batch["cost"]
    names = ("succeeded", "failed", "cancelled", "expired")
    ends = ", ".join(f"{counts[name]:,} {name}" for name in names if counts[name])
    lines = [f"batch {batch['id']}", f"  {progress(batch).rstrip()}"]
    if ends:
        lines.append(f"  {ends}")
    if used["input_tokens"] or used["output_tokens"]:
        read = f"{used['input_tokens']:,} tokens read ({used['cached_tokens']:,} cached)"
        money = f", {cost['amount']} {cost['currency']}" if cost else ""
        lines.append(f"  {read}, {used['output_tokens']:,} written, {batch['neurons']:,.2f} neurons{money}")
    problems = batch["problems"]
    for problem in problems[:10]:
        where = f"line {problem['line']}: " if problem.get("line") else ""
        lines.append(f"  {where}{problem.get('message', problem)}")
    if len(problems) > 10:
        lines.append(f"  and {len(problems) - 10} more")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def _endpoint(path: Path, model: str | None) -> str:
    """What a file in OpenAI's form is for; "" for bodies of one model."""
    first = _read(next(_lines(path), b""), 1)
    if {"custom_id", "url", "body"} <= first.keys():
        return str(first["url"])
    if not model:
        raise ServerError(f"{path} holds bodies of one model: name it with --model", 400)
    return ""


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _read(line: bytes, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ServerError(f"line {number} is no JSON: {error}", 400) from None
    if not isinstance(found, dict):
        raise ServerError(f"line {number} is no JSON object", 400)
    return found
