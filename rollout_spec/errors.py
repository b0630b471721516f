"""Errors that concern one request: the others go on."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served (too long, empty, bad ids, NaN logits). The message says what to change."""
