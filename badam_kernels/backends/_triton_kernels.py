"""The Triton kernels: formats.py and rules.py once more, for a GPU.

``norm``     sums of squared gradients, one pair per chunk
``finish``   one program: norm, clip factor, non-finite flag, step counters, and every row's scalars
``update``   one step of one rule, over all rows of one weight codec and gradient dtype

Codecs and rules are functions that ``update`` takes as constants. Everything that changes between steps is read from device
memory, so nothing here compiles twice. Element offsets are int64 throughout.

A row is a run of columns in an int64 table (see the constants below). Its first ``16 * BOUND`` elements are accessed as
vectors; BOUND is 0 where an address is not divisible by 16. The rest, one element per thread.
"""

import triton
import triton.language as tl

__all__ = ["CODECS", "GRADS", "RULES", "SCALARS", "WIDTH", "finish", "norm", "update"]

# Columns of the device's table, and how many there are. The first ones are visit.py's.
PARAM, AUXILIARY, M, V, GRAD, NUMEL, CODEC, GRAD_DTYPE, GROUP, STEP, BOUND, FIRST, FIRST_NORM = map(tl.constexpr, range(13))
WIDTH = tl.constexpr(13)
# Columns of the scalars, fp32, one line per row.
GRAD_SCALE, STEP_SIZE, BETA1, ONE_MINUS_BETA1, ONE_MINUS_BETA2, ROOT_SCALE, EPS, DECAY = map(tl.constexpr, range(8))
SCALARS = tl.constexpr(8)
# Squares of gradients above 2**50 are summed apart, scaled down, so that no finite gradient overflows.
LARGE, SHRINK, GROW = tl.constexpr(2.0**50), tl.constexpr(2.0**-96), tl.constexpr(2.0**192)


# --- codecs: (parameter, auxiliary) -> fp32, and back ---------------------------------------------------------------


@triton.jit
def _round_to_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def _round_to_fp16(x):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # A subnormal result counts units of 2**-24: the significand, shifted right until its last bit weighs that much.
    shift = 126 - tl.minimum(tl.maximum(magnitude >> 23, 101), 112)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    subnormal = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    rounded = tl.minimum(tl.where(magnitude < 0x38800000, subnormal, normal), 0x7C00)
    return (((bits >> 16) & 0x8000) | rounded).to(tl.uint16)


@triton.jit
def _nan_like(x, NAN: tl.constexpr):
    # NaN is tested before any rounding: one made by a GPU is 0x7fffffff, which rounding would carry into the sign.
    return (((x.to(tl.uint32, bitcast=True) >> 16) & 0x8000) | NAN).to(tl.uint16)


@triton.jit
def _bf16_to_fp32(half):
    return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _decode_fp32(param, auxiliary):
    return param


@triton.jit
def _encode_fp32(w):
    return w, w


@triton.jit
def _decode_master_bf16(param, auxiliary):
    agrees = (_round_to_bf16(auxiliary) == param) & (auxiliary == auxiliary)
    return tl.where(agrees, auxiliary, _bf16_to_fp32(param))


@triton.jit
def _encode_master_bf16(w):
    return tl.where(w == w, _round_to_bf16(w), _nan_like(w, 0x7FC0)), w


@triton.jit
def _decode_master_fp16(param, auxiliary):
    # Only compared, so the device's own conversion, to nearest even, will do: it saves the registers of a third more threads.
    agrees = (auxiliary.to(tl.float16).to(tl.uint16, bitcast=True) == param) & (auxiliary == auxiliary)
    return tl.where(agrees, auxiliary, param.to(tl.float16, bitcast=True).to(tl.float32))


@triton.jit
def _encode_master_fp16(w):
    return tl.where(w == w, _round_to_fp16(w), _nan_like(w, 0x7E00)), w


@triton.jit
def _decode_split(param, auxiliary):
    high, low = param.to(tl.uint32), auxiliary.to(tl.int32)
    low = tl.where(((high & 0x7FFF) == 0) & (low < 0), 0, low)
    return ((high << 16) + low.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_split(w):
    bits = w.to(tl.uint32, bitcast=True)
    high = tl.where(w == w, (bits + 0x8000) >> 16, _nan_like(w, 0x7FC0).to(tl.uint32))
    low = tl.where(w == w, bits - (high << 16), 0)
    return high.to(tl.uint16), low.to(tl.int16)


# --- rules: (w, g, m, v, scalars) -> (w, m, v) ----------------------------------------------------------------------


@triton.jit
def _moments(g, m, v, s):
    m = m + tl.load(s + ONE_MINUS_BETA1) * (g - m)
    v = v + tl.load(s + ONE_MINUS_BETA2) * (g * g - v)
    return m, v


@triton.jit
def _adaptive_step(m, v, s):
    # Exact division and root: the approximate ones flush subnormals, and v is often subnormal early in training.
    root = tl.sqrt_rn(v) * tl.load(s + ROOT_SCALE) + tl.load(s + EPS)
    return tl.load(s + STEP_SIZE) * tl.div_rn(m, root)


@triton.jit
def _adamw(w, g, m, v, s):
    m, v = _moments(g, m, v, s)
    return w - (_adaptive_step(m, v, s) + tl.load(s + DECAY) * w), m, v


@triton.jit
def _adam(w, g, m, v, s):
    m, v = _moments(g + tl.load(s + DECAY) * w, m, v, s)
    return w - _adaptive_step(m, v, s), m, v


@triton.jit
def _sgd(w, g, m, v, s):
    m = tl.load(s + BETA1) * m + (g + tl.load(s + DECAY) * w)
    return w - tl.load(s + STEP_SIZE) * m, m, v


# --- update ---------------------------------------------------------------------------------------------------------


@triton.jit
def _pointer(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if VECTOR:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update_elements(
    row, s, offsets, mask, VECTOR: tl.constexpr, RULE: tl.constexpr, MOMENTS: tl.constexpr, DECODE: tl.constexpr,
    ENCODE: tl.constexpr, PARAM_TYPE: tl.constexpr, AUXILIARY_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr,
):  # fmt: skip
    params = _pointer(row, PARAM, PARAM_TYPE, VECTOR) + offsets
    param = tl.load(params, mask)
    auxiliary = param
    if AUXILIARY_TYPE is not None:
        auxiliaries = _pointer(row, AUXILIARY, AUXILIARY_TYPE, VECTOR) + offsets
        auxiliary = tl.load(auxiliaries, mask)
    g = tl.load(_pointer(row, GRAD, GRAD_TYPE, VECTOR) + offsets, mask).to(tl.float32) * tl.load(s + GRAD_SCALE)
    ms = _pointer(row, M, tl.float32, VECTOR) + offsets
    m = tl.load(ms, mask)
    v = m
    if MOMENTS == 2:
        vs = _pointer(row, V, tl.float32, VECTOR) + offsets
        v = tl.load(vs, mask)
    w, m, v = RULE(DECODE(param, auxiliary), g, m, v, s)
    param, auxiliary = ENCODE(w)
    tl.store(params, param, mask)
    if AUXILIARY_TYPE is not None:
        tl.store(auxiliaries, auxiliary, mask)
    tl.store(ms, m, mask)
    if MOMENTS == 2:
        tl.store(vs, v, mask)


@triton.jit
def update(
    table, scalars, result, chunks, RULE: tl.constexpr, MOMENTS: tl.constexpr, DECODE: tl.constexpr, ENCODE: tl.constexpr,
    PARAM_TYPE: tl.constexpr, AUXILIARY_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i updates BLOCK elements of row ``chunks[i]``; 4 per thread, so that every stream moves in whole vectors."""
    chunk = tl.program_id(0)
    index = tl.load(chunks + chunk).to(tl.int64)
    row, s = table + index * WIDTH, scalars + index * SCALARS
    if (tl.load(row + GRAD) != 0) & (tl.load(result + 1) == 0):
        start = (chunk - tl.load(row + FIRST)) * BLOCK
        bound = tl.load(row + BOUND) * 16
        stop = tl.minimum(start + BLOCK, tl.load(row + NUMEL))
        # The rest comes first: after the vectors its addresses would take registers while they are computed.
        for at in range(tl.maximum(start, bound), stop, BLOCK // 4):
            rest = at + tl.arange(0, BLOCK // 4)
            _update_elements(
                row, s, rest, rest < stop, False, RULE, MOMENTS, DECODE, ENCODE, PARAM_TYPE, AUXILIARY_TYPE, GRAD_TYPE
            )
        if start < bound:
            offsets = start + tl.arange(0, BLOCK)
            _update_elements(
                row, s, offsets, offsets < bound, True, RULE, MOMENTS, DECODE, ENCODE, PARAM_TYPE, AUXILIARY_TYPE, GRAD_TYPE
            )


# --- norm -----------------------------------------------------------------------------------------------------------


@triton.jit
def _add_squares(grads, offsets, mask, total, large):
    g = tl.load(grads + offsets, mask, other=0).to(tl.float32)
    small = tl.abs(g) < LARGE
    kept, shrunk = tl.where(small, g, 0.0), tl.where(small, 0.0, g * SHRINK)
    return total + kept * kept, large + shrunk * shrunk


@triton.jit
def _sum_squares(row, start, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    bound = tl.load(row + BOUND) * 16
    stop = tl.minimum(start + CHUNK, tl.load(row + NUMEL))
    grads = _pointer(row, GRAD, TYPE, True)
    total, large = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for at in range(start, tl.minimum(stop, bound), BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        total, large = _add_squares(grads, offsets, offsets < bound, total, large)
    sums = tl.sum(total), tl.sum(large)
    grads = _pointer(row, GRAD, TYPE, False)
    total, large = tl.zeros([BLOCK // 8], tl.float32), tl.zeros([BLOCK // 8], tl.float32)
    for at in range(tl.maximum(start, bound), stop, BLOCK // 8):
        offsets = at + tl.arange(0, BLOCK // 8)
        total, large = _add_squares(grads, offsets, offsets < stop, total, large)
    return sums[0] + tl.sum(total), sums[1] + tl.sum(large)


@triton.jit
def norm(table, partials, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Program i sums the squares of CHUNK gradients of row ``chunks[i]`` in a fixed order: (small, large) into partials."""
    chunk = tl.program_id(0)
    row = table + tl.load(chunks + chunk).to(tl.int64) * WIDTH
    start = (chunk - tl.load(row + FIRST_NORM)) * CHUNK
    total, large = 0.0, 0.0
    if tl.load(row + GRAD) != 0:
        code = tl.load(row + GRAD_DTYPE)
        if code == 0:
            total, large = _sum_squares(row, start, CHUNK, BLOCK, tl.float32)
        elif code == 1:
            total, large = _sum_squares(row, start, CHUNK, BLOCK, tl.bfloat16)
        else:
            total, large = _sum_squares(row, start, CHUNK, BLOCK, tl.float16)
    pair = partials + 2 * chunk.to(tl.int64)
    tl.store(pair, total)
    tl.store(pair + 1, large)


# --- finish ---------------------------------------------------------------------------------------------------------


@triton.jit
def _total(partials, count, BLOCK: tl.constexpr):
    total, large = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for at in range(0, count, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        total += tl.load(partials + 2 * chunk, chunk < count, other=0).to(tl.float64)
        large += tl.load(partials + 2 * chunk + 1, chunk < count, other=0).to(tl.float64)
    return tl.sum(total) + tl.sum(large) * GROW


@triton.jit
def _power(base, exponent):
    power = base * 0 + 1
    for _ in range(32):
        power = tl.where((exponent & 1) != 0, power * base, power)
        base *= base
        exponent >>= 1
    return power


@triton.jit
def _store_scalars(s, mask, group, step, factor, ADAPTIVE: tl.constexpr, DECOUPLED: tl.constexpr):
    """``rules.scalars`` in fp64, rounded to fp32 once."""
    lr, beta1, beta2 = tl.load(group, mask, other=0), tl.load(group + 1, mask, other=0), tl.load(group + 2, mask, other=0)
    eps, decay = tl.load(group + 3, mask, other=0), tl.load(group + 4, mask, other=0)
    step_size, root_scale = lr, lr * 0 + 1
    if ADAPTIVE:
        step_size = lr / (1 - _power(beta1, step))
        root_scale = 1 / tl.sqrt(1 - _power(beta2, step))
    if DECOUPLED:
        decay *= lr
    tl.store(s + GRAD_SCALE, (lr * 0 + factor).to(tl.float32), mask)
    tl.store(s + STEP_SIZE, step_size.to(tl.float32), mask)
    tl.store(s + BETA1, beta1.to(tl.float32), mask)
    tl.store(s + ONE_MINUS_BETA1, (1 - beta1).to(tl.float32), mask)
    tl.store(s + ONE_MINUS_BETA2, (1 - beta2).to(tl.float32), mask)
    tl.store(s + ROOT_SCALE, root_scale.to(tl.float32), mask)
    tl.store(s + EPS, eps.to(tl.float32), mask)
    tl.store(s + DECAY, decay.to(tl.float32), mask)


@triton.jit(do_not_specialize=["rows", "count"])
def finish(
    hyper, table, steps, scalars, result, partials, scale, found_inf, rows, count, ADAPTIVE: tl.constexpr,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. ``hyper``: scale, max_norm, then HYPER of every group, fp64. ``result``: norm, and 1 if not finite.

    `partials`, the tensors `scale` (a factor beside the one in `hyper`) and `found_inf` are each None where there is none.
    """
    factor = tl.load(hyper)
    if scale is not None:
        factor *= tl.load(scale).to(tl.float64)
    finite = rows >= 0
    if partials is not None:
        length = tl.sqrt(_total(partials, count, BLOCK)) * tl.abs(factor)
        finite = length < float("inf")
        factor *= tl.minimum(1.0, tl.load(hyper + 1) / (length + 1e-6))
        tl.store(result, length.to(tl.float32))
    if found_inf is not None:
        finite &= tl.load(found_inf) == 0
    tl.store(result + 1, 1.0 - finite.to(tl.float32))
    for at in range(0, rows, BLOCK):
        index = at + tl.arange(0, BLOCK)
        mask = index < rows
        row = table + index.to(tl.int64) * WIDTH
        updated = (tl.load(row + GRAD, mask, other=0) != 0).to(tl.int64) * finite.to(tl.int64)
        step = tl.load(steps + index, mask, other=0) + updated
        tl.store(steps + index, step, mask)
        group = hyper + 2 + 5 * tl.load(row + GROUP, mask, other=0)
        _store_scalars(scalars + index * SCALARS, mask, group, tl.maximum(step, 1), factor, ADAPTIVE, DECOUPLED)


RULES = {"adamw": (_adamw, 2), "adam": (_adam, 2), "sgd": (_sgd, 1)}
"""(function, number of moments) of each rule."""
CODECS = (
    (_decode_fp32, _encode_fp32, tl.float32, None),
    (_decode_split, _encode_split, tl.uint16, tl.int16),
    (_decode_master_bf16, _encode_master_bf16, tl.uint16, tl.float32),
    (_decode_master_fp16, _encode_master_fp16, tl.uint16, tl.float32),
)
"""(decode, encode, parameter type, auxiliary type) in the order of formats.WEIGHT_CODECS."""
GRADS = (tl.float32, tl.bfloat16, tl.float16)
"""Gradient types in the order of formats.PARAM_DTYPES."""
