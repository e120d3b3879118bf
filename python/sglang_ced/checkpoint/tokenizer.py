"""A small byte-level BPE tokenizer of our own, with the special tokens of the published one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜noise｜>"
LEADING_SPECIALS = (BOS, EOS, PAD)
TRAILING_SPECIALS = (
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜System｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
        "<｜latest_reminder｜>",
    ),
    *(IMAGE, NOISE),
)

# Pieces of common English, each made of two earlier ones; "_" is a space. With the 256 bytes and the special
# tokens they make 512 ids.
FRAGMENTS = tuple(
    """
    _t he in er _a re on _the at nd _s or en _w ou it es is _o an ed _b ing _c _f al ar _to _and _in _p _d
    ion as _of _m ic le _h om st ro ll _is _y _you ha nt ve _be _th ent el ut se il _re _on ch _l _for ly ow
    id _e ad ur ay _n _g _it _wh _that et ig am ot im ce ver _st _with ation ir _i _u _he ol _have ter _an
    ct _are ra us _we if _not ul _me _ha _do ke _de _con ith op ge ess ag ain pe _so _li _but _se _as _what
    ill ers _su ck ld un mp _com __ _can ight ri ust ood _go _from ment our all ine ive ther ab _they _will
    ere able _was _by ac ak _if _one _just _like est art fe ff ies ice ide ity _ma _mo _no _up _she _had
    _were _out _there _when _would _more _some _time _pro _ex ough tion ture very work year ty th _this _al
    _us _or _at _about _your _know _who _how _our _get _say _day _way _man _new _than _then _them _into
    _over _also _any _his _her _its _been Th The What It He ous ard ish
    """.split()
)


def write_byte_tokenizer(path: str | os.PathLike[str], *, extra_merges: Sequence[str] = ()) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json` into the directory `path`; return the number of ids.

    Ids: the three leading special tokens, the 256 bytes, the fragments, the trailing special tokens (image
    placeholder and draft noise last). Any text survives encoding and decoding, as every byte has an id.
    extra_merges: more pieces of text, without a space inside, to have an id of their own.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    fragments = [f.replace("_", " ") for f in FRAGMENTS] + list(extra_merges)
    vocab = {token: i for i, token in enumerate((*LEADING_SPECIALS, *_BYTE_PIECES))}
    merges: list[tuple[str, str]] = []
    for fragment in fragments:
        _learn("".join(_BYTE_PIECES[b] for b in fragment.encode()), vocab, merges)
    for token in TRAILING_SPECIALS:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = (*LEADING_SPECIALS, *TRAILING_SPECIALS)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return len(vocab)


def _byte_pieces() -> tuple[str, ...]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary, as GPT-2 has it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_PIECES = _byte_pieces()


def _learn(piece: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Give `piece` an id, by merging what the merges so far make of it from left to right."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    parts = list(piece)
    while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
        at = list(pairwise(parts)).index(min(pairs, key=ranks.__getitem__))
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    while len(parts) > 1:
        merges.append((parts[0], parts[1]))
        parts[:2] = ["".join(parts[:2])]
        vocab[parts[0]] = len(vocab)
