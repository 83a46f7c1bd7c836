"""Messages: what is read back, what is refused, and that a change of fields comes with a new version."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from typing import get_type_hints

import msgspec
import pytest
import ray.cloudpickle

import serve_app.wire
from serve_app.sampling_params import SamplingParams
from serve_app.wire.address import InboxAddress
from serve_app.wire.encode import Encoded, read_encode_result
from serve_app.wire.generate import (
    Failed,
    GenerateCall,
    Generated,
    Missing,
    PrefillAt,
    PromptPath,
    read_generate_call,
    read_generate_result,
)
from serve_app.wire.load import LoadReport
from serve_app.wire.message import BadMessage, Message, MessageDecoder, WrongVersion
from serve_app.wire.tokens import TokenItem, Tokens
from tests.wire import released

MODULES = [
    importlib.import_module(f"serve_app.wire.{module.name}") for module in pkgutil.iter_modules(serve_app.wire.__path__)
]
DECLARED = {
    kind.tag(): kind
    for module in MODULES
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, Message) and kind is not Message
}
# The fields of each version: processes of two releases meet during an upgrade.
FIELDS = {
    "ack:1": "streams",
    "all-counters:1": "workers",
    "arriving:1": "id",
    "began:1": "id",
    "bye:1": "",
    "closed:1": "streams",
    "collect:1": "id offset",
    "collected:1": "items",
    "counters:1": "stage pid numbers",
    "decide:1": "id shared branches salt priority share adapter weight origin",
    "decided:1": "logprobs cached replica",
    "encode:3": "ids lengths types pooling normalize dimensions heads raw priority",
    "encoded-tokens:1": "sizes width data",
    "encoded:1": "shape data",
    "ended:1": "streams",
    "enter:2": "model id prompt_tokens keys max_tokens streams tenant known_as weight priority waited_s deadline_s "
    "session reject_if_busy adapter adapter_bytes zone",
    "failed:1": "error refused",
    "foresee:1": "request",
    "foreseen:1": "id cached_tokens wait ttft",
    "generate-many:1": "calls",
    "generate:12": "id ids salt sampling inbox priority resumed prefill prefill_above share adapter weight together "
    "origin media",
    "generated-many:1": "results",
    "generated:4": "finish cached path undelivered replica prompt_logprobs",
    "hello:2": "secret worker_id",
    "listen:4": "inbox lease_s replica role wish plans leaving since",
    "load:8": "replica model stage role node planner gateways queued_tokens running waiting max_seqs used_blocks "
    "total_blocks block_tokens max_batch_tokens step_seconds steps fetches served batch adapters standing "
    "incoming_tokens owner weights evicted pool leaving zone tiers",
    "missing:1": "tokens cached",
    "nothing:1": "",
    "pause:1": "streams",
    "offers:2": "gateway account askers models",
    "resident:1": "id model stage number budget key least likely grows gpu pinned optional ranks replica_pid state "
    "knows ready pid busy idle_s waits waited_s",
    "turn-told:1": "state why",
    "over:1": "id cached output",
    "pass-failed:1": "error",
    "pass:1": "model ids sampling tenant tokenizer session deadline_s reject_if_busy together origin",
    "passed-tokens:1": "ids finish logprobs cached",
    "ping:1": "",
    "pong:1": "",
    "prefill-done:1": "cached node",
    "predict:2": "inputs options priority salt",
    "predicted:1": "results units",
    "progress-told:1": "done steps",
    "progress:1": "watch",
    "prefill:8": "id ids salt priority share adapter weight origin media",
    "prefilled:1": "id cached node",
    "proposals:1": "drafts",
    "propose:2": "queries count over",
    "publish:1": "chunks parts",
    "pulse:1": "pid step_s",
    "queued:1": "id ahead",
    "rank-adapter:1": "place config weights",
    "rank-allocate:2": "blocks slots numbers whole",
    "rank-copy-in:2": "blocks ticket first",
    "rank-copy:1": "sources targets",
    "rank-drop:1": "tickets",
    "rank-export:1": "chunk_id blocks",
    "rank-failed:1": "rank reason",
    "rank-go:1": "ok",
    "rank-graphs:1": "max_num_seqs max_model_len",
    "rank-hello:1": "rank token pid",
    "rank-loaded:5": "rank layers read_bytes held_bytes seconds linears states single node",
    "rank-meeting:2": "host port file",
    "rank-ready:1": "rank ok",
    "rank-record:1": "size adapted",
    "rank-state-in:1": "slot",
    "rank-state-out:1": "slot",
    "rank-state:3": "rank pid memory_bytes seconds together_s waits_s steps busy_s given_bytes "
    "taken_bytes waiting_bytes held_chunks",
    "rank-step:5": "input_ids positions slots query_start seq_lens block_tables sample_rows max_query_len max_seq_len "
    "total_seq_len decodes extended embedded_rows embedded_values ends adapters axes captured states graph",
    "resume:1": "streams",
    "stream-over:1": "id",
    "subscribe:3": "inbox lease_s needed roles plans since",
    "subscribed:2": "replica listens",
    "tokens:2": "items",
    "turned-away:1": "id retry_after reason start_worker",
    "turned:1": "id decode prefill ttft uncached why",
    "visit:1": "secret gateway",
}
# What lies inside of messages; whoever changes one raises the version of the messages that carry it.
INSIDE = {
    "Branch": "ids asked",
    "AdapterAt": "digest size",
    "ChunkFields": "chunk_id root start_token n_tokens block_keys tail_key layout nbytes tenant",
    "InboxAddress": "host port secret",
    "MediaAt": "medium data digest places grid",
    "ModelOffer": "wait base token workers tokenizer weights chunk_tokens cached",
    "Part": "runs away",
    "PrefillAt": "stage replica",
    "PromptPath": "own node disk remote prefilled computed bytes early_bytes handover_s handover_share ttft_s "
    "handover_at_s drafted_tokens accepted_tokens",
    "Query": "id agreed suffix adapter",
    "RankLayer": "layer heads first_head all_heads head_dim shared",
    "RankLinear": "name outputs inputs experts",
    "RankRows": "begin count reads writes index generated",
    "RankStatePart": "layer kind number size dtype",
    "Run": "layer layers head heads sides width",
    "TokenItem": "stream_id offset ids finish logprobs cached",
    "SamplingParams": "max_tokens temperature top_k top_p min_p seed repetition_penalty frequency_penalty "
    "presence_penalty logit_bias logprobs stop_token_ids ignore_eos min_tokens grammar prompt_logprobs",
}

CALL = GenerateCall(
    "r1",
    b"\1\0\0\0",
    b"salt",
    SamplingParams(logit_bias={5: -1.5}, stop_token_ids=(2, 3), grammar="start: /a/"),
    InboxAddress("127.0.0.1", 1234, b"secret"),
    "batch",
    prefill=PrefillAt("prefill", "replica-1"),
)


def test_messages_are_as_written_down() -> None:
    found = {tag: " ".join(kind.__struct_fields__) for tag, kind in DECLARED.items()}
    assert found == FIELDS


def test_of_what_the_last_release_says_nothing_has_changed_but_what_came_behind() -> None:
    """``python -m tests.wire.released`` writes the file anew, with each release."""
    for tag, fields in released.read()["messages"].items():
        if (kind := DECLARED.get(tag)) is not None:
            now = list(kind.__struct_fields__)
            assert now[: len(fields)] == fields, f"{tag}: another version, or two releases"
            added = now[len(fields) :]
            with_default = now[len(now) - len(kind.__struct_defaults__) :]
            assert set(added) <= set(with_default), f"{tag}: a release that has none sends none"
    assert released.read()["tuples"] == released.tuples(), "a tuple takes no further field: add one to the message"


def test_releases_read_each_others_messages() -> None:
    newer = msgspec.msgpack.encode([*msgspec.msgpack.decode(CALL.encode()), "a field of the next release", [1]])
    assert read_generate_call(newer) == CALL
    report = LoadReport("r", "m", "decode", "mixed", "n")
    of_older = msgspec.msgpack.encode(msgspec.msgpack.decode(report.encode())[:10])
    assert MessageDecoder(LoadReport)(of_older) == report
    item = msgspec.msgpack.encode(["tokens:2", [["s", 0, [1], None, [], 0, "new"]], "new"])
    assert MessageDecoder(Tokens)(item).items[0].ids == (1,)


def test_what_lies_inside_of_messages_is_as_written_down() -> None:
    inside = {
        kind.__name__: " ".join(kind.__struct_fields__)
        for module in MODULES
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and not issubclass(kind, Message)
    }
    inside["SamplingParams"] = " ".join(get_type_hints(SamplingParams, localns={"Constraint": object}))
    assert inside == INSIDE


@pytest.mark.parametrize("kind", DECLARED.values(), ids=DECLARED)
def test_a_tag_is_a_name_and_a_version(kind: type[Message]) -> None:
    name, _, version = kind.tag().rpartition(":")
    assert name and int(version) >= 1
    assert sum(other.rpartition(":")[0] == name for other in DECLARED) == 1


def test_calls_and_results_survive() -> None:
    assert read_generate_call(CALL.encode()) == CALL
    path = PromptPath(own=32, computed=8, ttft_s=0.1)
    for result in (Missing(7, 32), Failed("why", True), Generated("stop", 3, path, (TokenItem("s", 0, (1,)),), "r")):
        assert read_generate_result(result.encode()) == result
    rows = read_encode_result(Encoded((1, 2), memoryview(b"12345678")).encode())
    assert isinstance(rows, Encoded) and bytes(rows.data) == b"12345678"


def test_another_version_is_named_with_what_to_do() -> None:
    fields = msgspec.msgpack.decode(CALL.encode())
    for version in ("11", "13"):
        with pytest.raises(WrongVersion, match=f"generate of version {version} .* reads generate:12.*upgrade"):
            read_generate_call(msgspec.msgpack.encode([f"generate:{version}", *fields[1:]]))
    with pytest.raises(WrongVersion, match="missing:1"):
        read_generate_result(msgspec.msgpack.encode(["missing:2", 1, 2, 3]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93", b"\x91" * 2000, msgspec.msgpack.encode({"id": "r1"})])
def test_noise_is_no_other_version(data: bytes) -> None:
    with pytest.raises(BadMessage) as refused:
        read_generate_call(data)
    assert not isinstance(refused.value, WrongVersion)


@pytest.mark.parametrize(
    "change",
    [
        {"resumed": "1"},
        {"priority": "urgent"},
        {"ids": "text"},
        {"prefill": ["prefill", 3]},
        {"inbox": ["h", "p", b""]},
    ],
    ids=str,
)
def test_wrong_fields_are_refused(change: dict[str, object]) -> None:
    fields = dict(zip(("tag", *CALL.__struct_fields__), msgspec.msgpack.decode(CALL.encode()), strict=True))
    with pytest.raises(BadMessage):
        read_generate_call(msgspec.msgpack.encode(list((fields | change).values())))


def test_sampling_is_checked_where_it_is_read() -> None:
    fields = msgspec.msgpack.decode(CALL.encode())
    fields[4]["temperature"] = -1.0
    with pytest.raises(BadMessage, match="temperature must not be negative"):
        read_generate_call(msgspec.msgpack.encode(fields))


def test_ray_can_pickle_what_names_readers() -> None:
    """Ray pickles the classes of actors and deployments by value, with the readers that their methods name."""
    from deployments.batch import Batch
    from deployments.decode import Decode
    from deployments.draft_worker import DraftWorker
    from deployments.encoder_worker import EncoderWorker
    from deployments.gateway import Gateway
    from deployments.worker import EngineWorker

    actors = [actor.__ray_metadata__.modified_class for actor in (EngineWorker, DraftWorker, EncoderWorker)]
    for kind in (*actors, Decode.func_or_class, Gateway.func_or_class, Batch.func_or_class):
        assert ray.cloudpickle.loads(ray.cloudpickle.dumps(kind)).__name__ == kind.__name__
    assert pickle.loads(pickle.dumps(read_generate_call))(CALL.encode()) == CALL
    assert isinstance(pickle.loads(pickle.dumps(WrongVersion("a message"))), WrongVersion)
