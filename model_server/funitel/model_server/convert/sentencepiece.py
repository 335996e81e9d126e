"""Rebuild SentencePiece's BPE as a fast tokenizer: the pair of neighbours with the best joined score merges first."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

PIECE_SPACE = "\u2581"  # SentencePiece writes a space as this letter


def sentencepiece_bpe(
    scores: Mapping[str, float],
    tokens: Sequence[str],
    *,
    unknown: str | None,
    adds_space: bool = True,
) -> Tokenizer:
    """A tokenizer with merges in the order of `scores`; byte tokens stand for letters that `tokens` lack.

    Rank order stands for score order, so every way to cut a token in two known tokens becomes a merge. Of a token
    listed twice the first id counts. `adds_space` puts a space before each text.
    """
    vocab = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda token: (-scores[token], vocab[token]))
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prepend: list[normalizers.Normalizer] = [normalizers.Prepend(PIECE_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", PIECE_SPACE)])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(PIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
