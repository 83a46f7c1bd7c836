"""What a client can meet with an adapter. Codes: see `errors.py`."""

from __future__ import annotations

from serve_app.api.errors import ApiError


class NoAdapter(ApiError):
    """An adapter that is not there, or not for this caller to see, or for another model."""

    code, status, type = 3037, 404, "not_found_error"

    def __init__(self, message: str, *, param: str = "lora"):
        super().__init__(message, param=param)


class AdapterIncomplete(ApiError):
    """An adapter without files that could be used."""

    code, status, type = 3039, 400, "invalid_request_error"


class BadAdapter(ApiError):
    """An adapter, or a file of one, that cannot be as sent; the text says what to do."""

    code, status, type = 5006, 400, "invalid_request_error"


class AdapterNameTaken(BadAdapter):
    status = 409
