"""Usage and costs of an organisation, by OpenAI's own client."""

from __future__ import annotations

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, PermissionDeniedError

from serve_app.state.spending.ledger import DAY_S, HOUR_S
from tests.gateway.usage.conftest import CHAT, EMBED, START


def client(served, key: str = "operator") -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=served.transport)
    return AsyncOpenAI(admin_api_key=served.keys[key], base_url="http://here/v1", http_client=http, max_retries=0)


async def test_completions(served):
    usage = client(served).admin.organization.usage
    page = await usage.completions(start_time=START, end_time=START + 3 * DAY_S, project_ids=["local"])
    assert page.object == "page" and not page.has_more and page.next_page is None
    assert [bucket.start_time for bucket in page.data] == [START, START + DAY_S, START + 2 * DAY_S]
    first = page.data[0].results[0]
    assert first.object == "organization.usage.completions.result" and first.num_model_requests == 3
    assert (first.input_tokens, first.input_cached_tokens, first.output_tokens) == (300, 120, 30)
    assert first.model is None and first.api_key_id is None and first.batch is None
    grouped = await usage.completions(
        start_time=START, end_time=START + 3 * DAY_S, group_by=["model", "api_key_id", "batch"], project_ids=["local"]
    )
    found = {(r.model, r.api_key_id, r.batch, r.num_model_requests) for bucket in grouped.data for r in bucket.results}
    assert found == {
        (CHAT, "key1", False, 2),
        (CHAT, "key2", False, 1),
        (CHAT, "key1", True, 1),
        (CHAT, "key1", False, 1),
    }
    batches = await usage.completions(start_time=START, end_time=START + 3 * DAY_S, batch=True)
    assert [len(bucket.results) for bucket in batches.data] == [0, 1, 0]
    assert batches.data[1].results[0].num_model_requests == 1
    others = await usage.completions(
        start_time=START, end_time=START + DAY_S, batch=False, api_key_ids=["key2", "key3"]
    )
    assert others.data[0].results[0].num_model_requests == 2
    # The organisation of an operator is everybody.
    everybody = await usage.completions(start_time=START, end_time=START + DAY_S, group_by=["project_id"])
    assert {(r.project_id, r.num_model_requests) for r in everybody.data[0].results} == {("local", 3), ("team", 1)}


async def test_pages_of_buckets_have_all_of_them(served):
    usage = client(served).admin.organization.usage
    asked = {"start_time": START, "end_time": START + DAY_S, "bucket_width": "1h", "limit": 7}
    buckets, page = [], None
    while page is None or page.has_more:
        page = await usage.completions(**asked, **({"page": page.next_page} if page else {}))
        buckets += page.data
    assert [bucket.start_time for bucket in buckets] == [START + hour * HOUR_S for hour in range(24)]
    counts = [sum(result.num_model_requests for result in bucket.results) for bucket in buckets]
    assert counts == [3, 1, *[0] * 22]
    minutes = await usage.completions(start_time=START, end_time=START + HOUR_S + 60, bucket_width="1m", limit=61)
    told = {
        bucket.start_time - START: bucket.results[0].num_model_requests for bucket in minutes.data if bucket.results
    }
    assert told == {0: 2, 59 * 60: 1, 60 * 60: 1}


async def test_embeddings(served):
    page = await client(served).admin.organization.usage.embeddings(
        start_time=START + DAY_S, end_time=START + 2 * DAY_S, group_by=["model"], models=[EMBED]
    )
    (result,) = page.data[0].results
    assert result.object == "organization.usage.embeddings.result"
    assert (result.model, result.input_tokens, result.num_model_requests) == (EMBED, 7, 1)


async def test_costs(served):
    page = await client(served).admin.organization.usage.costs(start_time=START, limit=3, project_ids=["local"])
    assert page.has_more  # up to today
    usd = page.data[0].results[0]
    assert usd.object == "organization.costs.result" and usd.amount.currency == "usd"
    assert usd.amount.value == pytest.approx(0.000066) and page.data[2].results[0].amount.currency == "eur"
    items = await client(served).admin.organization.usage.costs(
        start_time=START + DAY_S, limit=1, group_by=["line_item", "project_id"]
    )
    told = {(r.line_item, r.project_id, r.amount.value) for r in items.data[0].results}
    assert told == {(CHAT, "local", 0.000022), (EMBED, "local", 0.0000055)}


async def test_an_account_sees_its_own(served):
    usage = client(served, "team").admin.organization.usage
    page = await usage.completions(start_time=START, limit=3)
    assert [sum(r.num_model_requests for r in bucket.results) for bucket in page.data] == [1, 0, 1]
    with pytest.raises(PermissionDeniedError):
        await usage.completions(start_time=START, project_ids=["local"])
    with pytest.raises(PermissionDeniedError):
        await client(served, "runs").admin.organization.usage.costs(start_time=START)


async def test_what_is_wrong_is_told(served):
    usage = client(served).admin.organization.usage
    for wrong in (
        {"bucket_width": "1w"},
        {"end_time": START},
        {"limit": 1000},
        {"page": "nothing"},
        {"group_by": ["colour"]},
        {"user_ids": ["somebody"]},
    ):
        with pytest.raises(BadRequestError):
            await usage.completions(start_time=START, **wrong)
    assert (await served.call("GET", "/v1/organization/usage/completions")).status_code == 400
