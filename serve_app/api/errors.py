"""Every error a client can meet, with its Workers AI code, its HTTP status and a message that says what to do.

Codes: Cloudflare's documentation of Workers AI errors; 5006 and 5021 as seen in public answers. Raise one of
these where the cause is known; `serve_app/api/envelopes.py` turns it into JSON.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Sequence
from contextvars import ContextVar

from serve_app.api.retry_after import wait_header

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
# The id of the request at hand, under which its failure is logged and told.
current_request: ContextVar[str] = ContextVar("request_id", default="")


class ApiError(Exception):
    """An error meant for the client.

    ``code`` is the number clients parse, ``status`` the HTTP status, ``retry_after`` seconds or ``None``, ``param`` the
    input field at fault, ``generic`` whether the failure lies outside the model (the envelope's result is then null).
    ``name`` is OpenAI's, "" where that is the number; ``status_elsewhere`` the status in dialects but Cloudflare's.
    """

    code = 8005
    status = 500
    type = "server_error"
    generic = False
    name = ""
    status_elsewhere: int | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else wait_header(self.retry_after)


class InvalidInput(ApiError):
    code, status, type = 5006, 400, "invalid_request_error"


class UnknownModel(ApiError):
    code, status, type = 5007, 400, "invalid_request_error"
    name, status_elsewhere = "model_not_found", 404

    def __init__(self, model: str, known: tuple[str, ...] = ()):
        shown = model if len(model) <= 120 else model[:117] + "..."
        hint = f" Models here: {', '.join(known[:8])}." if known else " GET /ai/models/search lists the models."
        super().__init__(f"No such model {shown} or task.{hint}", param="model")


class MalformedModel(ApiError):
    """A name that no model could have."""

    code, status, type = 3042, 404, "invalid_request_error"
    name = "model_not_found"

    def __init__(self, model: str):
        super().__init__(
            f"{model[:120]!r} is no model's id. Ids look like @cf/author/name; GET /ai/models/search lists them.",
            param="model",
        )


class ModelNotStarted(ApiError):
    code, status, type = 5007, 400, "invalid_request_error"
    name, status_elsewhere = "model_not_found", 404

    def __init__(self, model: str, remedy: str):
        super().__init__(f"Model {model} is in the catalogue but not started here. {remedy}", param="model")


class MissingBody(ApiError):
    code, status, type = 3003, 400, "invalid_request_error"

    def __init__(self, message: str = 'The request has no body. Send a JSON object, for example {"prompt": "Hello"}.'):
        super().__init__(message)


class LoraUnsupported(ApiError):
    code, status, type = 5005, 405, "invalid_request_error"

    def __init__(self, model: str):
        super().__init__(f"Model {model} cannot use LoRA adapters here; leave out the field lora.", param="lora")


class ContextTooLong(ApiError):
    """``max_tokens``: the limit that the client set, or None.

    Clients without a code to read look for the words "prompt is too long" and "maximum context length".
    """

    code, status, type = 5021, 413, "invalid_request_error"
    name, status_elsewhere = "context_length_exceeded", 400

    def __init__(
        self, prompt_tokens: int, max_tokens: int | None, context_window: int, *, at_least: bool = False
    ) -> None:
        prompt = f"{'at least ' if at_least else ''}{prompt_tokens} tokens"
        if max_tokens is None or prompt_tokens >= context_window:
            message = (
                f"The prompt is too long: {prompt}, and the model's maximum context length is {context_window} tokens "
                "with the answer. Shorten the input."
            )
        else:
            message = (
                f"The prompt has {prompt} and max_tokens is {max_tokens}, together more than the model's maximum "
                f"context length of {context_window} tokens. Shorten the input or lower max_tokens."
            )
        super().__init__(message, param="messages")


class InputTooLong(ApiError):
    """A text to encode that does not fit the model."""

    code, status, type = 5021, 413, "invalid_request_error"
    name, status_elsewhere = "context_length_exceeded", 400


class BodyTooLarge(ApiError):
    code, status, type = 3006, 413, "invalid_request_error"

    def __init__(self, limit: int):
        super().__init__(f"The request body is larger than {limit} bytes. Send less in one request.")


class UnknownEncoding(ApiError):
    """A body that is packed in a way that nobody unpacks here."""

    code, status, type = 5006, 415, "invalid_request_error"

    def __init__(self, encoding: str):
        super().__init__(f"Content-Encoding {encoding[:64]!r} is not supported. Send the body as it is, or as gzip.")

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "Accept-Encoding": "gzip"}


class HeadersTooLarge(ApiError):
    code, status, type, generic = 3006, 431, "invalid_request_error", True

    def __init__(self, limit: int):
        super().__init__(f"The request headers are larger than {limit} bytes together. Send smaller or fewer ones.")


class AuthError(ApiError):
    code, status, type, generic = 10000, 401, "authentication_error", True

    def __init__(self, message: str = "Authentication error: send the API key as `Authorization: Bearer <key>`."):
        super().__init__(message)


class AccountForbidden(ApiError):
    code, status, type, generic = 10000, 403, "permission_error", True

    def __init__(self, account: str):
        super().__init__(f"Authentication error: this key does not belong to account {account[:64]}.")


class ScopeMissing(ApiError):
    """A key that may not do this. ``needed``: scopes, any of which would do."""

    code, status, type, generic = 10000, 403, "permission_error", True

    def __init__(self, needed: Sequence[str], has: Sequence[str]):
        asked = " or ".join(needed)
        super().__init__(
            f"Authentication error: this key lacks the scope {asked}; it has {', '.join(has) or 'none'}. "
            "Use another key, or have the account's admin add the scope."
        )


class CrossSite(ApiError):
    """A request with a session's cookie that another page may have sent."""

    code, status, type, generic = 10000, 403, "permission_error", True


class OperatorOnly(ApiError):
    """What only an admin of the account of the settings may do."""

    code, status, type, generic = 10000, 403, "permission_error", True

    def __init__(self, what: str, operator: str):
        super().__init__(
            f"Authentication error: only keys of account {operator} with the scope admin may {what}. Ask the operator."
        )


class BadChange(ApiError):
    """An account, a key or a member that cannot be as asked."""

    code, status, type, generic = 5006, 400, "invalid_request_error", True


class NoSuchObject(ApiError):
    """An account, a key or a member that is not there, or not for this key to see."""

    code, status, type, generic = 7003, 404, "not_found_error", True


class AlreadyThere(ApiError):
    """An account or a member of this name is there already."""

    code, status, type, generic = 5006, 409, "conflict", True


class NotDone(ApiError):
    """What could not be done now, and may be asked again."""

    code, status, generic = 3040, 503, True


class RangeWrong(ApiError):
    """A range of bytes that a file does not have."""

    code, status, type = 5006, 416, "invalid_request_error"

    def __init__(self, size: int) -> None:
        super().__init__(f"The range lies outside of the {size} bytes that there are.", param="range")
        self._size = size

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "Content-Range": f"bytes */{self._size}"}


class NoRoute(ApiError):
    code, status, type, generic = 7003, 404, "not_found_error", True

    def __init__(self, method: str, path: str):
        super().__init__(f"Could not route to {method} {path[:200]}, perhaps your object identifier is invalid?")


class MethodNotAllowed(ApiError):
    code, status, type, generic = 7001, 405, "invalid_request_error", True

    def __init__(self, method: str, allowed: str):
        super().__init__(f"Method {method[:32]} is not available for this URI; use {allowed}.")
        self._allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "Allow": self._allowed}


class NotFound(ApiError):
    """A named thing that is not here (a model on the models endpoint, say)."""

    code, status, type = 5007, 404, "not_found_error"

    @property
    def name(self) -> str:  # type: ignore[override]
        return "model_not_found" if self.param == "model" else ""


class Gone(ApiError):
    """A named thing that was here."""

    code, status, type = 5007, 410, "not_found_error"


class OutOfCapacity(ApiError):
    code, status, type = 3040, 429, "rate_limit_error"

    def __init__(self, message: str = "Capacity temporarily exceeded, please try again.", retry_after: float = 1.0):
        super().__init__(message, retry_after=retry_after)


class WorkersLost(OutOfCapacity):
    """Workers were lost over this request, one after another."""

    def __init__(self) -> None:
        super().__init__("The workers of this model were lost repeatedly; please try again.", retry_after=5.0)


class RateLimited(ApiError):
    """More in this minute, or at once, than the operator allows; ``headers`` say when there is room again."""

    code, status, type, generic = 971, 429, "rate_limit_error", True

    def __init__(self, message: str, reset_s: float, headers: dict[str, str]):
        super().__init__(message, retry_after=reset_s)
        self._shown = headers

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, **self._shown}


class BudgetSpent(ApiError):
    """A request that could break a budget. Trying again soon would change nothing, which OpenAI's clients are told."""

    code, status, type = 3036, 429, "rate_limit_error"
    name = "insufficient_quota"

    def __init__(self, message: str, reset_s: float):
        super().__init__(message, retry_after=reset_s)

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "x-should-retry": "false"}


class PaidPlanNeeded(ApiError):
    code, status, type = 5035, 403, "permission_error"

    def __init__(self, model: str, account: str):
        super().__init__(
            f"Model {model[:120]} needs the paid plan, and account {account[:64]} has the free one. Its operator can "
            f"change that: serve-app accounts change {account[:64]} --limit plan=paid.",
            param="model",
        )


class ModelLoading(ApiError):
    code, status = 3040, 503

    def __init__(self, model: str, retry_after: float = 5.0, how: str = "is still loading, please try again"):
        super().__init__(f"Model {model} {how}.", retry_after=retry_after)


class StoreAway(ApiError):
    """What is asked for lies in the store, and that cannot be reached."""

    code, status = 3040, 503

    def __init__(
        self,
        message: str = "The server's store cannot be reached at the moment, please try again. Generation goes on.",
    ) -> None:
        super().__init__(message, retry_after=2.0)


class BooksClosed(ApiError):
    """What a request uses cannot be written down, so that it could not be charged."""

    code, status = 3040, 503

    def __init__(self) -> None:
        super().__init__(
            "The server cannot write down what requests use, so it answers none; please try again. Its operator finds "
            "the cause in the server's log and in GET /health.",
            retry_after=5.0,
        )


class Stopped(ApiError):
    """The request was ended before its answer was complete, because its client said so or stayed away."""

    code, status, type = 3040, 409, "cancelled"

    def __init__(self, message: str = "The request was cancelled."):
        super().__init__(message)


class KeyReused(ApiError):
    code, status, type = 5006, 422, "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("This Idempotency-Key was used for another request. Take a new key for each request.")


class KeyInUse(ApiError):
    code, status, type = 3040, 409, "conflict"

    def __init__(self) -> None:
        super().__init__("The request of this Idempotency-Key is still under way, please try again.", retry_after=1.0)


class Timeout(ApiError):
    code, status, type = 3007, 408, "timeout_error"

    def __init__(self, message: str = "Request timeout."):
        super().__init__(message)


class Internal(ApiError):
    """Whatever we did not foresee. Shows only an id, under which the log holds the cause."""

    def __init__(self, request_id: str | None = None):
        self.request_id = request_id or current_request.get() or str(uuid.uuid4())
        super().__init__(f"Internal server error. The server's log has details under the id {self.request_id}.")


def as_api_error(error: BaseException, request_id: str | None = None) -> ApiError:
    """``error`` itself if it is meant for clients, otherwise one that tells no more of it than that a disk is full."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return StoreAway("The server cannot write files at the moment, please try again.")
    return error if isinstance(error, ApiError) else Internal(request_id)
