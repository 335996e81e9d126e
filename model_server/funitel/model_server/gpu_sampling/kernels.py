"""What sampling does to whole rows of scores, as Triton kernels: penalties, filters of rows that are drawn, the choice.

Vocabularies are large, so nothing is sorted. A filter keeps the scores above a threshold, and the threshold is searched
for bit by bit: scores at a temperature are at most 0, so the bits of their absolute values order them. Each pass over a
row decides three bits. Sums of probabilities are taken in another order than torch takes them: a token at
the edge of a nucleus may fall on the other side, as the last bits of a sum decide.

Scores are [rows, vocab_size] float32, contiguous. Loaded, what is not a number is -inf, and +inf the largest number.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_MOST_BITS = tl.constexpr(28)  # the place of the first three that are searched, of 31
_MIX_1, _MIX_2 = tl.constexpr(0x9E3779B1), tl.constexpr(0xED5AD4BB)
_MIX_3, _MIX_4 = tl.constexpr(0xAC4C1B51), tl.constexpr(0x31848BAB)
_MAX_PARTS = 32
_WARP_WARPS = 8  # of a program that filters a row alone: its sums stay in registers


@triton.jit
def penalise_rows(
    scores, rows, counts, places, lengths, repetition, frequency, presence, count, vocab_size, BLOCK: tl.constexpr
):
    """Penalties of one row, in place, over one block of its tokens: those held in all, then those of the completion."""
    line = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = at < vocab_size
    own = scores + tl.load(rows + line) * vocab_size + at
    held = counts + tl.load(places + line) * 2 * vocab_size + at
    x = tl.load(own, mask=is_token, other=0.0)
    seen = tl.load(held, mask=is_token, other=0).to(tl.float32)
    produced = tl.load(held + vocab_size, mask=is_token, other=0).to(tl.float32)
    penalty = tl.load(repetition + line)
    repeated = tl.where(x < 0, x * penalty, x / penalty) - tl.load(frequency + line) * seen / tl.load(lengths + line)
    x = tl.where(seen > 0, repeated, x)
    x = tl.where(produced > 0, x - (tl.load(presence + line) + tl.load(count + line) * produced), x)
    tl.store(own, x, mask=is_token)


@triton.jit
def _load(row, at, vocab_size):
    """Scores of a row; of what is no token, and of what is not a number, -inf."""
    x = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    return tl.minimum(x, _LARGEST_FLOAT)


@triton.jit
def _heated(row, at, vocab_size, best, temperature):
    """Scores at most 0."""
    x = _load(row, at, vocab_size)
    return tl.where(x == float("-inf"), x, (x - best) / temperature)


@triton.jit
def _magnitude(x):
    """What orders numbers of at most 0, the largest first, as int32."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _threshold(row, vocab_size, best, temperature, most, target, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The magnitude with which the tokens of a row come to `target`, and what those before it come to.

    Tokens count one each, or by their weight, the best first; those of a magnitude beyond `most` do not.
    """
    digits = tl.arange(0, 8)
    low = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float32)
    for step in range(11):
        shift = tl.maximum(_MOST_BITS - 3 * step, 0)
        borders = low + (digits << shift)
        sums = tl.zeros([8, BLOCK], tl.float32)
        for begin in range(0, vocab_size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = _heated(row, at, vocab_size, best, temperature)
            magnitude = _magnitude(x)
            weight = tl.exp(x) if IS_MASS else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where((magnitude <= most) & (at < vocab_size), weight, 0.0)
            sums += tl.where(magnitude[None, :] < borders[:, None], weight[None, :], 0.0)
        totals = tl.sum(sums, 1)
        digit = tl.sum((totals < target).to(tl.int32), 0) - 1
        before = tl.sum(tl.where(digits == digit, totals, 0.0), 0)
        low += digit << shift
    return low, before


@triton.jit
def warp_rows(
    scores,
    rows,
    temperatures,
    top_ks,
    top_ps,
    floors,
    vocab_size,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Temperature, top-k, top-p and min-p of one row, in place. A filter that is not wanted keeps everything."""
    line = tl.program_id(0)
    row = scores + tl.load(rows + line) * vocab_size
    temperature, floor = tl.load(temperatures + line), tl.load(floors + line)
    found = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        found = tl.maximum(found, _load(row, begin + tl.arange(0, BLOCK), vocab_size))
    best = tl.max(found, 0)

    most = tl.full([], _MAGNITUDE, tl.int32)
    if HAS_TOP_K:
        k = tl.load(top_ks + line)
        if k < vocab_size:
            most, _ = _threshold(row, vocab_size, best, temperature, most, k.to(tl.float32), False, BLOCK)

    last = most  # of the nucleus; of those as likely only the first `num_ties` are in it
    num_ties = tl.full([], _MAGNITUDE, tl.int32)
    if HAS_TOP_P:
        p = tl.load(top_ps + line)
        if p < 1.0:
            total = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, vocab_size, BLOCK):
                x = _heated(row, begin + tl.arange(0, BLOCK), vocab_size, best, temperature)
                total += tl.where(_magnitude(x) <= most, tl.exp(x), 0.0)
            target = p * tl.sum(total, 0)
            last, before = _threshold(row, vocab_size, best, temperature, most, target, True, BLOCK)
            each = tl.exp(-(last.to(tl.float32, bitcast=True)))
            num_ties = tl.maximum(tl.ceil((target - before) / each), 1.0).to(tl.int32)

    num_seen = tl.zeros([], tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = _heated(row, at, vocab_size, best, temperature)
        magnitude = _magnitude(x)
        is_tie = (magnitude == last) & (at < vocab_size)
        place = num_seen + tl.cumsum(is_tie.to(tl.int32), 0)
        is_kept = ((magnitude < last) | (is_tie & (place <= num_ties))) & (x >= floor)
        num_seen += tl.sum(is_tie.to(tl.int32), 0)
        tl.store(row + at, tl.where(is_kept, x, float("-inf")), mask=at < vocab_size)


@triton.jit
def _gumbel(first, second, at):
    """The noise of tokens, see `noise.gumbel_of`; halves of keys as uint32."""
    x = (at.to(tl.uint32) * _MIX_1) ^ first
    x = x ^ (x >> 17)
    x = x * _MIX_2 + second
    x = x ^ (x >> 11)
    x = x * _MIX_3
    x = x ^ (x >> 15)
    x = x * _MIX_4
    x = x ^ (x >> 14)
    uniform = ((x & _MAGNITUDE).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    rest = 1.0 - uniform
    # log(1 - u) of which no digit is lost where u is small: the rounding of 1 - u is divided out again.
    is_one = rest == 1.0
    log1p = tl.where(is_one, -uniform, tl.log(rest) * (uniform / tl.where(is_one, 1.0, 1.0 - rest)))
    return -tl.log(-log1p)


@triton.jit
def choose_parts(scores, keys, parts, num_rows, vocab_size, HAS_DRAWS: tl.constexpr, BLOCK: tl.constexpr):
    """One part of one row: its best token by score and noise, that one's score and sum, and what the row sums to.

    `keys` [3, rows] int32 say whether a row is drawn, and the halves of its key. `parts` [rows, parts, 5] float32 get
    the largest sum, the score it comes from, the largest score, the sum of exponentials over it, the bits of the token.
    """
    line, part = tl.program_id(0), tl.program_id(1)
    row = scores + line.to(tl.int64) * vocab_size
    num_blocks = tl.cdiv(tl.cdiv(vocab_size, BLOCK), tl.num_programs(1))
    begin, end = part * num_blocks * BLOCK, tl.minimum((part + 1) * num_blocks * BLOCK, vocab_size)
    is_drawn = tl.full([], 0, tl.int32)
    if HAS_DRAWS:
        is_drawn = tl.load(keys + line)
        first = tl.load(keys + num_rows + line).to(tl.uint32, bitcast=True)
        second = tl.load(keys + 2 * num_rows + line).to(tl.uint32, bitcast=True)
    best, score = float("-inf"), float("-inf")
    token = tl.full([], 0, tl.int32) + begin
    largest, total = float("-inf"), 0.0
    for at_first in range(begin, end, BLOCK):
        at = at_first + tl.arange(0, BLOCK)
        x = _load(row, at, vocab_size)
        larger = tl.maximum(largest, tl.max(x, 0))
        level = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - level) + tl.sum(tl.exp(x - level), 0)
        largest = larger
        noisy = x
        if HAS_DRAWS:
            if is_drawn != 0:
                noisy = x + _gumbel(first, second, at)
        found, place = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
        if found > best:
            best = found
            token = at_first + place
            score = tl.sum(tl.where(at == token, x, 0.0), 0)
    out = parts + (line * tl.num_programs(1) + part) * 5
    tl.store(out, best)
    tl.store(out + 1, score)
    tl.store(out + 2, largest)
    tl.store(out + 3, total)
    tl.store(out + 4, token.to(tl.float32, bitcast=True))


@triton.jit
def merge_choices(parts, tokens, scores, normalisers, NUM_PARTS: tl.constexpr):
    """One row: the first of its best parts' tokens [rows] int64, its score, and the log of the sum of exponentials."""
    line = tl.program_id(0)
    own = parts + line * NUM_PARTS * 5
    best, score, token = tl.load(own), tl.load(own + 1), tl.load(own + 4)
    largest, total = float("-inf"), 0.0
    for part in range(NUM_PARTS):
        found = tl.load(own + part * 5)
        if found > best:
            best = found
            score = tl.load(own + part * 5 + 1)
            token = tl.load(own + part * 5 + 4)
        height = tl.load(own + part * 5 + 2)
        larger = tl.maximum(largest, height)
        level = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - level) + tl.load(own + part * 5 + 3) * tl.exp(height - level)
        largest = larger
    tl.store(tokens + line, token.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(scores + line, score)
    is_none = largest == float("-inf")
    tl.store(normalisers + line, tl.where(is_none, largest, largest + tl.log(tl.where(is_none, 1.0, total))))


def block_of(vocab_size: int) -> int:
    """Tokens that a program looks at in a turn."""
    return min(_BLOCK, int(triton.next_power_of_2(vocab_size)))


def penalise(
    scores: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Apply penalties (repetition, frequency, presence, count), in place.

    Args:
        scores: see above.
        rows: [lines] int64, which of them have penalties.
        counts: [places, 2, vocab_size] int32, how often tokens are held in all, and in the completion.
        places: [lines] int64, those of the rows.
        lengths: [lines] float32, tokens that the rows hold.
        penalties: each [lines] float32.
    """
    vocab_size = scores.shape[1]
    block = block_of(vocab_size)
    grid = (len(rows), triton.cdiv(vocab_size, block))
    penalise_rows[grid](scores, rows, counts, places, lengths, *penalties, vocab_size, BLOCK=block)


def warp(
    scores: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    floors: torch.Tensor,
) -> None:
    """Temperature, top-k, top-p and min-p, in place.

    Args:
        scores: see above.
        rows: [lines] int64, which of them are drawn.
        temperatures: [lines] float32.
        top_ks: [lines] int32; those of vocab_size and more keep every token. None where no row has one.
        top_ps: [lines] float32; 1 keeps every token. None where no row has one.
        floors: [lines] float32, the least score after heating.
    """
    vocab_size = scores.shape[1]
    warp_rows[(len(rows),)](
        scores,
        rows,
        temperatures,
        rows if top_ks is None else top_ks,
        temperatures if top_ps is None else top_ps,
        floors,
        vocab_size,
        HAS_TOP_K=top_ks is not None,
        HAS_TOP_P=top_ps is not None,
        BLOCK=block_of(vocab_size),
        num_warps=_WARP_WARPS,
    )


def choose(
    scores: torch.Tensor, keys: torch.Tensor | None, num_processors: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token of every row [rows] int64, its score, and the log of the row's sum of exponentials, each float32.

    Args:
        scores: see above.
        keys: [3, rows] int32, see `choose_parts`; None where no row is drawn.
        num_processors: streaming multiprocessors that programs are to fill.
    """
    num_rows, vocab_size = scores.shape
    block = block_of(vocab_size)
    wanted = min(2 * num_processors // num_rows, -(-vocab_size // block), _MAX_PARTS)
    num_parts = 1 << max(0, wanted.bit_length() - 1) if wanted > 0 else 1
    parts = scores.new_empty(num_rows, num_parts, 5)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    chosen, normalisers = scores.new_empty(2, num_rows)
    has_draws = keys is not None
    choose_parts[(num_rows, num_parts)](
        scores, parts if keys is None else keys, parts, num_rows, vocab_size, HAS_DRAWS=has_draws, BLOCK=block
    )
    merge_choices[(num_rows,)](parts, tokens, chosen, normalisers, NUM_PARTS=num_parts)
    return tokens, chosen, normalisers
