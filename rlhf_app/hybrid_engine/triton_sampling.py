"""The Triton kernels behind `sampling_kernel`; imported only where Triton is present.

A row's vocabulary is cut into blocks. `block_sums` reads all logits once and leaves each block's
largest logit and sum of weights, where a token's weight is exp((logit - largest) / temperature);
`draw` finds block and token in them. Filters need `bounds` between the two, and the sums again.

Ties are the torch sampler's: all tokens equal to the k-th largest stay under top-k, under top-p
the first ones. Only compile-time arguments are annotated: Triton reads annotations as such.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlhf_app.hybrid_engine import decode_state

_TOKEN = tl.constexpr(decode_state.TOKEN)
_POSITION = tl.constexpr(decode_state.POSITION)
_COUNT = tl.constexpr(decode_state.COUNT)
_REQUEST = tl.constexpr(decode_state.REQUEST)
_ALIVE = tl.constexpr(decode_state.ALIVE)
_STOPPED = tl.constexpr(decode_state.STOPPED)
_LIMIT = tl.constexpr(decode_state.LIMIT)


@triton.jit
def _ordered(logits):
    """uint32 keys in the order of the fp32 logits; 0.0 equals -0.0, NaN is the largest."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(logits == logits, keys, -1).to(tl.uint32, bitcast=True)


@triton.jit
def _load(logits, banned, ids, vocabulary, checked, SUPPRESSED: tl.constexpr):
    """fp32 logits of one row; -inf where there is no token, or a suppressed one."""
    inside = ids < vocabulary
    loaded = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if SUPPRESSED:
        hidden = tl.load(banned + ids, mask=inside & checked, other=0)
        loaded = tl.where(hidden != 0, float("-inf"), loaded)
    return loaded


@triton.jit
def _filtered(loaded, ids, least, last, SHIFT: tl.constexpr):
    """-inf for what the filters drop: keys below `least`, and its equals behind id `last`."""
    keys = (_ordered(loaded) >> SHIFT).to(tl.int64)
    kept = (keys > least) | ((keys == least) & (ids <= last))
    return tl.where(kept, loaded, float("-inf"))


@triton.jit
def _weights(loaded, highest, scale):
    """exp((logit - highest) / temperature); `scale` is log2(e) / temperature."""
    # All -inf: a difference would be NaN.
    return tl.exp2((loaded - tl.where(highest == float("-inf"), 0.0, highest)) * scale)


@triton.jit
def block_sums(
    logits, banned, touched, least, last, highest, sums, row_stride, vocabulary, scale,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SHIFT: tl.constexpr,
    SUPPRESSED: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Largest logit and sum of weights of `BLOCKS` blocks of one row."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    checked = True
    if SUPPRESSED:
        checked = tl.load(touched + part) != 0
    loaded = _load(logits + row * row_stride, banned, ids, vocabulary, checked, SUPPRESSED)
    if FILTERED:
        loaded = _filtered(loaded, ids, tl.load(least + row), tl.load(last + row), SHIFT)
    top = tl.max(loaded, 1)
    total = tl.sum(_weights(loaded, top[:, None], scale), 1)
    at = row * tl.num_programs(0) * BLOCKS + block
    tl.store(highest + at, top)
    tl.store(sums + at, total)


@triton.jit
def draw(
    logits, banned, least, last, highest, sums, state, uniforms, stop_ids, tokens, logprobs,
    row_stride, field_stride, column_stride, vocabulary, blocks, stops, scale,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STOPS: tl.constexpr, SHIFT: tl.constexpr,
    GREEDY: tl.constexpr, SUPPRESSED: tl.constexpr, FILTERED: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    """Draw one row's token by its uniform; with `RECORD` also advance the row."""
    row = tl.program_id(0).to(tl.int64)
    place = row
    if RECORD:
        count = tl.load(state + _COUNT * field_stride + row)
        request = tl.load(state + _REQUEST * field_stride + row)
        place = request * column_stride + count

    # 1. The block: sums in fp64, as the tail of a large vocabulary is below fp32's spacing.
    block = tl.arange(0, SPAN)
    known = block < blocks
    tops = tl.load(highest + row * blocks + block, mask=known, other=float("-inf"))
    totals = tl.load(sums + row * blocks + block, mask=known, other=0.0)
    top = tl.max(tops, 0)
    mass = (totals * _weights(tops, top, scale)).to(tl.float64)
    total = tl.sum(mass, 0)
    share = 0.0
    if GREEDY:
        chosen = tl.min(tl.where(tops == top, block, SPAN), 0)
    else:
        target = tl.load(uniforms + place) * total
        reached = (tl.cumsum(mass, 0) > target) & (mass > 0.0)
        chosen = tl.min(tl.where(reached, block, SPAN), 0)
        # Rounding may put the target at the very end.
        final = tl.max(tl.where(mass > 0.0, block, -1), 0)
        chosen = tl.where(chosen < SPAN, chosen, final)
        before = tl.sum(tl.where(block < chosen, mass, 0.0), 0)
        own = tl.sum(tl.where(block == chosen, mass, 0.0), 0)
        share = (target - before) / own
    chosen = tl.minimum(tl.maximum(chosen, 0), blocks - 1)

    # 2. The token in it.
    ids = chosen * BLOCK + tl.arange(0, BLOCK)
    loaded = _load(logits + row * row_stride, banned, ids, vocabulary, True, SUPPRESSED)
    if FILTERED:
        loaded = _filtered(loaded, ids, tl.load(least + row), tl.load(last + row), SHIFT)
    if GREEDY:
        token = tl.min(tl.where(loaded == top, ids, vocabulary), 0)
    else:
        local = _weights(loaded, tl.max(loaded, 0), scale).to(tl.float64)
        reached = (tl.cumsum(local, 0) > share * tl.sum(local, 0)) & (local > 0.0)
        token = tl.min(tl.where(reached, ids, vocabulary), 0)
        token = tl.where(token < vocabulary, token, tl.max(tl.where(local > 0.0, ids, -1), 0))
    # Only rows of NaN, or of nothing, get here with another total: the index stays legal, the
    # NaN log-prob tells the rest.
    sound = total > 0.0
    token = tl.where(sound & (token >= 0) & (token < vocabulary), token, vocabulary - 1)
    logit = tl.max(tl.where(ids == token, loaded, float("-inf")), 0)
    logprob = (logit - top) * (scale * 0.6931471805599453) - tl.log(total.to(tl.float32))
    logprob = tl.where(sound, logprob, float("nan"))

    # 3. The row.
    token = token.to(tl.int64)
    tl.store(tokens + place, token)
    tl.store(logprobs + place, logprob)
    if RECORD:
        alive = tl.load(state + _ALIVE * field_stride + row)
        position = tl.load(state + _POSITION * field_stride + row)
        limit = tl.load(state + _LIMIT * field_stride + row)
        stopped = tl.load(state + _STOPPED * field_stride + row)
        stop = alive * 0
        if STOPS > 0:
            stop_at = tl.arange(0, STOPS)
            ends = tl.load(stop_ids + stop_at, mask=stop_at < stops, other=-1)
            stop = tl.max((ends == token).to(tl.int64), 0) * alive
        goes_on = alive * (1 - stop) * (count + alive < limit).to(tl.int64)
        tl.store(state + _TOKEN * field_stride + row, token)
        tl.store(state + _POSITION * field_stride + row, position + alive)
        tl.store(state + _COUNT * field_stride + row, count + alive)
        tl.store(state + _STOPPED * field_stride + row, stopped | stop)
        tl.store(state + _ALIVE * field_stride + row, goes_on)


@triton.jit
def _measured(
    logits, banned, vocabulary, top, scale, least, first, second, third,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, SUPPRESSED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """What has keys of at least each of three, and of `least`: tokens, or their weights."""
    lane = tl.arange(0, BLOCK)
    one = tl.zeros([BLOCK], tl.float32)
    two = tl.zeros([BLOCK], tl.float32)
    three = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lane
        loaded = _load(logits, banned, ids, vocabulary, True, SUPPRESSED)
        keys = (_ordered(loaded) >> SHIFT).to(tl.int64)
        if COUNTED:
            value = tl.where(ids < vocabulary, 1.0, 0.0)
        else:
            value = tl.where(keys >= least, _weights(loaded, top, scale), 0.0)
        one += tl.where(keys >= first, value, 0.0)
        two += tl.where(keys >= second, value, 0.0)
        three += tl.where(keys >= third, value, 0.0)
    return (
        tl.sum(one.to(tl.float64), 0),
        tl.sum(two.to(tl.float64), 0),
        tl.sum(three.to(tl.float64), 0),
    )


@triton.jit
def _largest_key(
    logits, banned, vocabulary, top, scale, least, goal,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
    SUPPRESSED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The largest key that tokens worth `goal` reach: two bits of it a pass."""
    key = tl.zeros([], tl.int64)
    for level in range(BITS // 2):
        digit = (key * 0 + 1) << (BITS - 2 - 2 * level)
        one, two, three = _measured(
            logits, banned, vocabulary, top, scale, least,
            key + digit, key + 2 * digit, key + 3 * digit,
            BLOCK, SHIFT, SUPPRESSED, COUNTED,
        )  # fmt: skip
        passed = (
            (one >= goal).to(tl.int64) + (two >= goal).to(tl.int64) + (three >= goal).to(tl.int64)
        )
        key += digit * passed
    return key


@triton.jit
def bounds(
    logits, banned, highest, least, last, goals, row_stride, vocabulary, blocks, scale,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
    SUPPRESSED: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Smallest key that one row's filters keep, and the last id that is kept of its equals."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    block = tl.arange(0, SPAN)
    tops = tl.load(highest + row * blocks + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(tops, 0)
    key = tl.zeros([], tl.int64)
    end = key + vocabulary
    if TOP_K:
        key = _largest_key(
            logits, banned, vocabulary, top, scale, key, tl.load(goals),
            BLOCK, SHIFT, BITS, SUPPRESSED, True,
        )  # fmt: skip
    if TOP_P:
        _, _, mass = _measured(
            logits, banned, vocabulary, top, scale, key, key, key, key,
            BLOCK, SHIFT, SUPPRESSED, False,
        )  # fmt: skip
        goal = tl.load(goals + 1) * mass
        found = _largest_key(
            logits, banned, vocabulary, top, scale, key, goal,
            BLOCK, SHIFT, BITS, SUPPRESSED, False,
        )  # fmt: skip
        if found >= key:
            key = found
            upto, above, _ = _measured(
                logits, banned, vocabulary, top, scale, key, key, key + 1, key + 1,
                BLOCK, SHIFT, SUPPRESSED, False,
            )  # fmt: skip
            # Equals weigh alike. One stays when the mass before it is below the goal.
            lane = tl.arange(0, BLOCK)
            ties = tl.zeros([], tl.int64)
            for start in range(0, vocabulary, BLOCK):
                ids = start + lane
                loaded = _load(logits, banned, ids, vocabulary, True, SUPPRESSED)
                equal = (_ordered(loaded) >> SHIFT).to(tl.int64) == key
                ties += tl.sum((equal & (ids < vocabulary)).to(tl.int64), 0)
            wanted = tl.ceil((goal - above) / (upto - above) * ties.to(tl.float64))
            if (wanted < ties.to(tl.float64)) & (ties > 0):
                kept = tl.maximum(wanted.to(tl.int64), 1)
                seen = tl.zeros([], tl.int64)
                end = tl.zeros([], tl.int64)
                for start in range(0, vocabulary, BLOCK):
                    ids = start + lane
                    loaded = _load(logits, banned, ids, vocabulary, True, SUPPRESSED)
                    equal = (_ordered(loaded) >> SHIFT).to(tl.int64) == key
                    equal = (equal & (ids < vocabulary)).to(tl.int64)
                    here = (seen + tl.cumsum(equal, 0) == kept) & (equal == 1)
                    end = tl.maximum(end, tl.max(tl.where(here, ids, 0), 0).to(tl.int64))
                    seen += tl.sum(equal, 0)
    tl.store(least + row, key)
    tl.store(last + row, end)
