"""Requests that cannot be served are refused with a 400 before they reach the scheduler.

Without these hooks SGLang drops media of `/generate` silently: a text model has no processor for them
(managers/tokenizer_manager.py:1155).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_ced.plugin import seams

NO_VISION = "this server has no vision: image, video and audio input is not supported for this model; send text only"


def install() -> None:
    """Hook the launcher's request checks. The launch is known to be ours."""
    seams.apply_hooks(
        {
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": (
                _before_validate,
                "BEFORE",
            ),
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._validate_media_content": (
                _after_media_check,
                "AFTER",
            ),
        },
        seams.LAUNCHER,
    )


def _before_validate(manager: Any, request: Any, input_ids: Sequence[int] | None, *_: Any, **__: Any) -> None:
    """Raise ValueError, which SGLang answers with 400 (entrypoints/http_server.py)."""
    image_token = getattr(manager.model_config.hf_config, "image_token_id", None)
    check(request, input_ids, manager.model_config.vocab_size, image_token)


def check(request: Any, input_ids: Sequence[int] | None, vocab_size: int, image_token: int | None) -> None:
    """Raise ValueError where the model cannot run `request`, whose token ids are `input_ids`."""
    if any(getattr(request, name, None) for name in ("image_data", "video_data", "audio_data")):
        raise ValueError(NO_VISION)
    if getattr(request, "input_embeds", None) is not None:
        raise ValueError("input_embeds: this model hashes token ids (Engram), so it needs text or input_ids")
    if not input_ids:
        return
    if image_token in input_ids:
        raise ValueError(f"token id {image_token} is the image placeholder; {NO_VISION}")
    if min(input_ids) < 0 or max(input_ids) >= vocab_size:
        bad = next(token for token in input_ids if not 0 <= token < vocab_size)
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")


def _after_media_check(refusal: str | None, *_: Any, **__: Any) -> str | None:
    return NO_VISION if refusal is not None else None
