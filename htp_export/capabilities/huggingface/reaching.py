"""A quick check of the hub: its client retries for a minute, and then reports that there is no such model."""

from __future__ import annotations

__all__ = ["why_unreachable"]

_SECONDS = 5.0


def why_unreachable() -> str:
    """Return why the hub cannot be reached; ``""`` if it answers, with any status."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # the client has changed its HTTP library, and with it the errors
        return f"{constants.ENDPOINT}: {error}"
    return ""
