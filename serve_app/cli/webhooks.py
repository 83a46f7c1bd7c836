"""``serve-app webhooks list | add | remove | replay``, on the store itself, whether or not a server runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from serve_app.cli.groups import Group, open_store
from serve_app.config import load_settings
from serve_app.state.callers.audit import local_actor
from serve_app.state.deferred.events import KINDS, EventsError, Subscription, iso

if TYPE_CHECKING:
    from serve_app.state.store.sql import SqlStore

_ABOUT = f"""\
A webhook is told of what happens to an account: each event is posted to its URL, signed as Standard Webhooks has it
(https://www.standardwebhooks.com), and tried again for 72 hours until it is answered with 2xx. Events:
  {chr(10).join("  " + kind for kind in KINDS).strip()}
`*` stands for any characters.

examples:
  serve-app webhooks add https://example.com/hook --events 'batch.*'   prints the secret, once
  serve-app webhooks list                                              webhooks, and what could not be delivered
  serve-app webhooks replay 5f0c...                                    send again what was not taken
  serve-app webhooks replay 5f0c... --all --since 2027-01-31           send everything since then again
"""


def add_parser(commands: Any) -> None:
    webhooks = Group(commands, "webhooks", "who is told of events by a signed webhook, and sending them again", _ABOUT)
    listed = webhooks.action("list", "webhooks, with what they were sent last", _list, json=True)
    listed.add_argument("--account", help="of this account only (default all)")
    add = webhooks.action("add", "a new webhook; its secret is printed once", _add)
    add.add_argument("url", help="a http or https URL")
    add.add_argument("--events", default="*", help="comma-separated kinds of events (default *, all)")
    add.add_argument("--account", help="whose events (default: the account of the settings)")
    add.add_argument("--name", default="", help="what people call it")
    add.add_argument("--model", default="", help="only events about this model")
    remove = webhooks.action("remove", "end a webhook, with what is on its way to it", _remove)
    remove.add_argument("id", help="the webhook's id")
    replay = webhooks.action("replay", "send again what was not taken in 72 hours, under the ids it had", _replay)
    replay.add_argument("id", help="the webhook's id")
    replay.add_argument("--all", action="store_true", help="what was taken as well")
    replay.add_argument("--since", metavar="TIME", help="only events since then: 2027-01-31, or how long ago: 7d, 12h")
    replay.add_argument("--delivery", default="", metavar="ID", help="only the delivery of this id (msg_...)")


def _list(arguments: argparse.Namespace) -> int:
    with open_store() as store:
        found = [each for each in store.events.subscriptions(arguments.account) if each.url]
        sent = {each.id: store.events.deliveries(each.id, limit=20) for each in found}
    if arguments.json:
        shown = [
            {
                **{name: getattr(each, name) for name in ("id", "account", "name", "url", "model", "enabled")},
                "events": each.kinds,
                "deliveries": [
                    {"id": one.id, "event": one.kind, "at": iso(one.at), "status": one.status, "error": one.trouble}
                    for one in sent[each.id]
                ],
            }
            for each in found
        ]
        print(json.dumps(shown, indent=2))
        return 0
    for each in found:
        off = "" if each.enabled else "  switched off"
        print(f"{each.id}  {each.account:16} {','.join(each.kinds)}  {each.url}{off}  {each.name}".rstrip())
        for one in sent[each.id]:
            if one.status != "delivered":
                when = f"again at {iso(one.due)}" if one.due is not None else "dead"
                print(f"  {one.id}  {one.kind}  of {iso(one.at)}  {when}  {one.trouble}".rstrip())
    return 0


def _add(arguments: argparse.Namespace) -> int:
    if not arguments.url.startswith(("http://", "https://")):
        raise EventsError(f"{arguments.url[:80]!r} is no URL. Use https://HOST/PATH.")
    account = arguments.account or load_settings().account_id
    with open_store() as store:
        kinds = [kind.strip() for kind in arguments.events.split(",") if kind.strip()]
        fields = {"kinds": kinds, "url": arguments.url, "name": arguments.name, "model": arguments.model}
        made = store.events.subscribe(account, time.time(), **fields, by=local_actor("cli"))
    print(made.secret)
    print(f"The secret of webhook {made.id} is shown once; it is told of events from now on.", file=sys.stderr)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    with open_store() as store:
        known = _find(store, arguments.id)
        store.events.unsubscribe(known.account, known.id, by=local_actor("cli"))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from serve_app.state.spending.usage import moment

    now = time.time()
    try:
        since = 0 if arguments.since is None else moment(arguments.since, now)
    except ValueError as error:
        raise EventsError(f"--since: {error}") from None
    with open_store() as store:
        known = _find(store, arguments.id)
        which = {"delivery_id": arguments.delivery, "everything": arguments.all}
        count = store.events.replay(known.id, now, since=since, **which)
    print(f"{count} sent again by the running server")
    return 0


def _find(store: SqlStore, webhook_id: str) -> Subscription:
    found = next((each for each in store.events.subscriptions(None) if each.id == webhook_id and each.url), None)
    if found is None:
        raise EventsError(f"There is no webhook {webhook_id[:64]!r}. `serve-app webhooks list` shows them.")
    return found
