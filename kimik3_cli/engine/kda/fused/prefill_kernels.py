"""The two kernels of the fused prefill: what each chunk does by itself, and the walk that carries the state over them.

Letters: B batch, T time, H heads, K key channels, V value channels, C chunk, N chunks, M = B*H*N; KP is K filled up to
a power of two, BV a block of value channels.

With S the state that enters a chunk and G_i the sum of its log decays up to token i (Kimi Linear, arXiv 2510.26692,
section 3):

    u   = T diag(beta) (v - k_in S)             k_in_i  = e^{G_i} k_i             T = (I + diag(beta) a)^-1
    o   = q_in S + b u                          q_in_i  = e^{G_i} q_i
    S'  = Diag(e^{G_C}) S + k_out^T u           k_out_j = e^{G_C - G_j} k_j

    a_ij = sum_d k_i k_j e^{G_i - G_j} for j < i,    b_ij = sum_d q_i k_j e^{G_i - G_j} for j <= i

`chunk_local` computes k_in, q_in, k_out, T diag(beta), b and G_C; `chunk_walk` the three lines on the left.
"""

import triton
import triton.language as tl

from kimik3_cli.engine.kda.fused.device_functions import decay_state, gate_rate, l2_normalise, log_decay


@triton.jit(do_not_specialize=["T", "H", "N", "q_heads", "k_heads", "z_heads"])
def chunk_local(
    q,  # [B*T,q_heads,K]: of each row the first H heads are q's
    k,  # [B*T,k_heads,K]
    z,  # [B*T,z_heads,K], before dt_bias
    beta_logits,  # [B*T,H]
    a_log,  # [H]
    dt_bias,  # [H,K]
    k_in,  # out, [M,C,KP]
    q_in,  # out, [M,C,KP]
    k_out,  # out, [M,C,KP]
    solve,  # out, T diag(beta), [M,C,C]
    scores,  # out, b, [M,C,C]
    g_sum,  # out, G_C, [M,KP]
    T,
    H,
    N,
    K,
    q_heads,
    k_heads,
    z_heads,
    lower_bound,
    q_scale,
    BOUNDED: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
):
    """Prepare one chunk of one head, row by row.

    No decay over several tokens is ever an exponential of a difference: `to_here` [C,KP] keeps k_j times the decay
    from j to the current row and is multiplied by one token's decay a row, so nothing overflows for any g <= 0. Rows
    that are not reached yet are zero there, which is the causal mask. Row i of T diag(beta) follows by substitution:
    beta_i (e_i - sum_{j<i} a_ij (T diag(beta))_j), exact for correlated keys.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = chunk // N % H
    batch = chunk // N // H
    start = (chunk % N) * C
    row = tl.arange(0, C)
    channel = tl.arange(0, KP)
    rate = gate_rate(tl.load(a_log + head))
    bias = tl.load(dt_bias + head * K + channel, mask=channel < K, other=0.0)

    since_start = tl.full([KP], 1.0, tl.float32)
    total = tl.zeros([KP], tl.float32)
    to_here = tl.zeros([C, KP], tl.float32)
    solved = tl.zeros([C, C], tl.float32)
    for i in range(C):
        # a token after the last one is not read and counts as k = q = 0, beta = 0, g = 0: it changes nothing
        there = start + i < T
        token = batch * T + start + i
        wanted = there & (channel < K)
        k_i = l2_normalise(tl.load(k + (token * k_heads + head) * K + channel, mask=wanted, other=0.0).to(tl.float32))
        q_i = l2_normalise(tl.load(q + (token * q_heads + head) * K + channel, mask=wanted, other=0.0).to(tl.float32))
        q_i = q_i * q_scale
        z_i = tl.load(z + (token * z_heads + head) * K + channel, mask=wanted, other=0.0).to(tl.float32) + bias
        g_i = tl.where(wanted, log_decay(z_i, rate, lower_bound, BOUNDED), 0.0)
        logit = tl.load(beta_logits + token * H + head, mask=there, other=0.0).to(tl.float32)
        beta_i = tl.where(there, tl.sigmoid(logit), 0.0)

        decay = tl.exp(g_i)
        since_start = since_start * decay
        total += g_i
        to_here = to_here * decay[None, :]
        a_i = tl.sum(to_here * k_i[None, :], axis=1)  # [C], zero from j = i on
        to_here = tl.where(row[:, None] == i, k_i[None, :], to_here)
        b_i = tl.sum(to_here * q_i[None, :], axis=1)  # [C], zero from j = i + 1 on
        solved_i = beta_i * (tl.where(row == i, 1.0, 0.0) - tl.sum(a_i[:, None] * solved, axis=0))
        solved = tl.where(row[:, None] == i, solved_i[None, :], solved)

        tl.store(k_in + (chunk * C + i) * KP + channel, since_start * k_i)
        tl.store(q_in + (chunk * C + i) * KP + channel, since_start * q_i)
        tl.store(scores + (chunk * C + i) * C + row, b_i)

    tl.store(k_out + (chunk * C + row[:, None]) * KP + channel[None, :], to_here)
    tl.store(solve + (chunk * C + row[:, None]) * C + row[None, :], solved)
    tl.store(g_sum + chunk * KP + channel, total)


@triton.jit(do_not_specialize=["T", "H", "N", "K", "v_heads"])
def chunk_walk(
    k_in,  # [M,C,KP]
    q_in,  # [M,C,KP]
    k_out,  # [M,C,KP]
    solve,  # [M,C,C]
    scores,  # [M,C,C]
    g_sum,  # [M,KP]
    v,  # [B*T,v_heads,V]: of each row the first H heads are v's
    initial_state,  # [B*H,K,V]
    o,  # out, [B*T,H,V]
    final_state,  # out, [B*H,K,V]
    T,
    H,
    N,
    K,
    V,
    v_heads,
    C: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry BV value channels of one head's state over its N chunks; value channels do not see each other.

    The state is held transposed, so that every product has its longer side along the columns, which the warps share
    out. Addresses are a 64-bit base plus 32-bit offsets inside a tile; wider ones would not leave enough registers.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = sequence % H
    batch = sequence // H
    row = tl.arange(0, C)
    channel = tl.arange(0, KP)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    initial_state += sequence * K * V
    final_state += sequence * K * V
    place = channel[None, :] * V + value[:, None]  # [BV,KP]
    in_state = (value[:, None] < V) & (channel[None, :] < K)
    state = tl.load(initial_state + place, mask=in_state, other=0.0)  # S^T
    for n in range(N):
        chunk = sequence * N + n
        keys = chunk * C * KP + (row[:, None] * KP + channel[None, :])  # [C,KP]
        pairs = chunk * C * C + (row[:, None] * C + row[None, :])  # [C,C]
        time = n * C + row[:, None]
        token = batch * T + time
        there = (time < T) & (value[None, :] < V)

        known = tl.dot(tl.load(k_in + keys), tl.trans(state), input_precision=PRECISION)  # [C,BV]
        v_n = tl.load(v + (token * v_heads + head) * V + value[None, :], mask=there, other=0.0).to(tl.float32)
        u = tl.dot(tl.load(solve + pairs), v_n - known, input_precision=PRECISION)
        o_n = tl.dot(tl.load(scores + pairs), u, input_precision=PRECISION)
        o_n = tl.dot(tl.load(q_in + keys), tl.trans(state), acc=o_n, input_precision=PRECISION)
        tl.store(o + (token * H + head) * V + value[None, :], o_n, mask=there)
        state = decay_state(state, tl.load(g_sum + chunk * KP + channel)[None, :])
        state = tl.dot(tl.trans(u), tl.load(k_out + keys), acc=state, input_precision=PRECISION)
    tl.store(final_state + place, state, mask=in_state)
