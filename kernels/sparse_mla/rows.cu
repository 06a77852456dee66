// Sparse MLA over selected FP8 cache rows: 64 heads of one query row (and one share of its selection) a block.
//
//   warpgroup 3  gathers 64 cache rows a tile into registers, turns e4m3 into bf16 by moving bits (exactly: 4 significant
//                bits times a power of two) and writes them swizzled into one of two stages, where they serve as keys and
//                as values; it works ahead of the others by half a tile in registers
//   warpgroup 0  scores = Q K^T (Q stays in shared memory), running maximum, exponentials; P and the factor by which older
//                sums shrink go to shared memory
//   warpgroup 1, 2  out[:, 256 columns each] = out * factor + P V
//
// Within every four values the stored order is 0, 2, 1, 3, because the bytes of a word unpack pairwise that way; queries
// are stored alike and outputs put back in order.
#include "sm90.cuh"

constexpr int HEADS = 64, KEYS = 64, LATENT = 512, WIDTH = 576;
constexpr int BLOCK_BYTES = 64 * 128, TILE_BYTES = WIDTH / 64 * BLOCK_BYTES;  // [64 rows][64 bf16], swizzled; 9 of them
constexpr int THREADS = 512, LOADERS = 384;
constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int QUERY = 0, TILES = TILE_BYTES, WEIGHTS = 3 * TILE_BYTES, FACTORS = WEIGHTS + BLOCK_BYTES;
constexpr int VALID = FACTORS + HEADS * 4, BARRIERS = VALID + 16;
constexpr int FULL = BARRIERS, EMPTY = FULL + 16, P_FULL = EMPTY + 32, P_EMPTY = P_FULL + 8, LAST = P_EMPTY + 8;
constexpr int OUT_STRIDE = LATENT * 4 + 32;
static_assert(HEADS * OUT_STRIDE <= 2 * TILE_BYTES, "outputs leave through the stages");

struct Problem {
    const float *q;  // of this row and the first head
    const uint8_t *plane;
    const int *selection;
    const long long *table;
    float *out, *lse;
    long long head_stride;
    int heads, begin, end, tiles;
    float scale_log2;
};

__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(factor));
    return out;
}

// Four e4m3 codes -> values 0, 2 and values 1, 3 as bf16, times `factor`. Codes become bf16 of 2^-120 times their value.
__device__ __forceinline__ void unpack(uint32_t codes, uint32_t factor, uint32_t &even, uint32_t &odd) {
    even = times(((codes << 4) & 0x07F007F0) | ((codes << 8) & 0x80008000), factor);
    odd = times(((codes >> 4) & 0x07F007F0) | (codes & 0x80008000), factor);
}

// Two bf16 of 2^120 times a power of two from the bits of its fp32; from 2^8 on that is too large for bf16.
constexpr uint32_t LARGE_SCALE = 135u << 23, ONE = 127u << 23;
__device__ __forceinline__ uint32_t factor_of(uint32_t scale_bits) { return ((scale_bits >> 16) + (120 << 7)) * 0x10001u; }

struct Token {
    uint4 codes[4], scales, rope;
};

// Lane -> which 16 codes of every 128 (8 of them), and which of 4 tokens: 8 lanes that store together meet all banks.
__device__ __forceinline__ int piece_of(int lane) { return (lane & 3) | (lane >> 1 & 4); }
__device__ __forceinline__ int token_of(int lane) { return (lane >> 2 & 1) | (lane >> 3 & 2); }

template <bool TILED> __device__ __forceinline__ void load_token(Token &t, const uint8_t *plane, int place, int piece) {
    constexpr int ROW_BYTES = TILED ? 656 : 576;
    // A branch here would make every load wait for every other: row 0 is read instead of none, and not used.
    const uint8_t *row = plane + (long long)max(place, 0) * ROW_BYTES;
#pragma unroll
    for (int g = 0; g < 4; g++) t.codes[g] = load16(row + g * 128 + piece * 16);
    if (TILED) {
        t.scales = load16(row + 512);
        t.rope = load16(row + 528 + piece * 16);
    } else {
        uint2 codes = load8(row + 512 + piece * 8);
        t.rope = make_uint4(codes.x, codes.y, 0, 0);
    }
}

// The 16 codes of one piece of 128, at their place in a tile. LARGE: the scale is applied in two steps.
template <bool LARGE>
__device__ __forceinline__ void store_codes(const uint4 &codes, uint32_t scale, uint32_t there, uint32_t to, int chunk,
                                            int turn) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    const uint32_t factor = factor_of(LARGE ? ONE : scale) & there;
    uint32_t values[8];
#pragma unroll
    for (int i = 0; i < 4; i++) unpack(words[i], factor, values[2 * i], values[2 * i + 1]);
    if (LARGE)
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = times(values[i], (scale >> 16) * 0x10001u & there);
    store16(to + ((chunk ^ turn) << 4), values[0], values[1], values[2], values[3]);
    store16(to + (((chunk + 1) ^ turn) << 4), values[4], values[5], values[6], values[7]);
}

// `there` is all ones, or zero for a row that is not there: its values are zero, whatever was loaded.
template <bool TILED>
__device__ __forceinline__ void store_token(const Token &t, uint32_t tile, int key, int piece, uint32_t there) {
    const uint32_t line = tile + key * 128, block = piece >> 2;
    const int turn = key & 7, chunk = (piece & 3) * 2;
    const uint32_t scales[4] = {TILED ? t.scales.x : ONE, TILED ? t.scales.y : ONE, TILED ? t.scales.z : ONE,
                                TILED ? t.scales.w : ONE};
    const bool large = TILED && max(max(scales[0], scales[1]), max(scales[2], scales[3])) >= LARGE_SCALE;
    if (TILED && __any_sync(ALL, large)) {
#pragma unroll
        for (int g = 0; g < 4; g++)
            store_codes<true>(t.codes[g], scales[g], there, line + (2 * g + block) * BLOCK_BYTES, chunk, turn);
    } else {
#pragma unroll
        for (int g = 0; g < 4; g++)
            store_codes<false>(t.codes[g], scales[g], there, line + (2 * g + block) * BLOCK_BYTES, chunk, turn);
    }
    const uint32_t to = line + 8 * BLOCK_BYTES + ((piece ^ turn) << 4);
    if (TILED) {
        store16(to, t.rope.x & there, t.rope.y & there, t.rope.z & there, t.rope.w & there);
    } else {
        uint32_t factor = factor_of(ONE) & there, v[4];
        unpack(t.rope.x, factor, v[0], v[1]);
        unpack(t.rope.y, factor, v[2], v[3]);
        store16(to, v[0], v[1], v[2], v[3]);
    }
}

// Cache row of a selected row, or -1.
__device__ __forceinline__ int place_of(const Problem &p, int chosen) {
    if (chosen < 0) return -1;
    int slot = (int)p.table[chosen / 64];
    return slot < 0 ? -1 : slot * 64 + chosen % 64;
}

template <bool TILED> __device__ __forceinline__ void gather(const Problem &p, uint32_t base, int warp, int lane) {
    const int piece = piece_of(lane), token = token_of(lane);
    // Lane l of 16 looks up key 8 warp + l % 8 of half l / 8; step s of a tile stores 4 keys of half s / 2.
    const int mine = lane % 16, offset = mine / 8 * 32 + warp * 8 + mine % 8;
    auto chosen = [&](int tile) {
        int index = p.begin + tile * KEYS + offset;
        return index < p.end ? p.selection[index] : -1;
    };
    auto load = [&](Token &t, int places, int step) {
        load_token<TILED>(t, p.plane, __shfl_sync(ALL, places, step * 4 + token), piece);
    };
    // Loads are issued for two tokens at once, because all that are under way are waited for together. Rows are called
    // into the second-level cache two tiles ahead.
    Token even, odd;
    int places = place_of(p, chosen(0)), places1 = place_of(p, chosen(1)), next = chosen(2);
    load(even, places, 0);
    load(odd, places, 1);
    for (int tile = 0; tile < p.tiles; tile++) {
        const int stage = tile & 1, parity = (tile >> 1 & 1) ^ 1;
        const uint32_t to = base + TILES + stage * TILE_BYTES, empty = base + EMPTY + stage * 16;
        const int places2 = place_of(p, next);
        next = chosen(tile + 3);
        const unsigned valid = __ballot_sync(ALL, places >= 0);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const int key = half * 32 + warp * 8 + token;
            const unsigned mask = valid >> (half * 8 + token);
            barrier_wait(empty + 8 * half, parity);
            if (half == 0 && lane < 2)
                asm volatile("st.shared.u8 [%0], %1;" ::"r"(base + VALID + stage * 8 + lane * 4 + warp), "r"(valid >> 8 * lane));
            store_token<TILED>(even, to, key, piece, 0u - (mask & 1));
            store_token<TILED>(odd, to, key + 4, piece, 0u - (mask >> 4 & 1));
            load(even, half ? places1 : places, half ? 0 : 2);
            load(odd, half ? places1 : places, half ? 1 : 3);
        }
        fence_async();
        barrier_arrive(base + FULL + stage * 8);
        if (lane < 16 && places2 >= 0)
            prefetch_bytes(p.plane + (long long)places2 * (TILED ? 656 : 576), TILED ? 656 : 576);
        places = places1;
        places1 = places2;
    }
}

template <bool TILED> __device__ __forceinline__ void load_query(const Problem &p, uint32_t to, int thread) {
#pragma unroll 4
    for (int i = thread; i < HEADS * WIDTH / 8; i += LOADERS) {
        int head = i / (WIDTH / 8), chunk = i % (WIDTH / 8);
        float4 a = make_float4(0, 0, 0, 0), b = a;
        if (head < p.heads) {
            const float4 *from = reinterpret_cast<const float4 *>(p.q + head * p.head_stride + chunk * 8);
            a = from[0], b = from[1];
        }
        const uint32_t at = to + chunk / 8 * BLOCK_BYTES + head * 128 + (((chunk & 7) ^ (head & 7)) << 4);
        if (TILED && chunk >= LATENT / 8)
            store16(at, pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
        else
            store16(at, pack_bf16(a.x, a.z), pack_bf16(a.y, a.w), pack_bf16(b.x, b.z), pack_bf16(b.y, b.w));
    }
    fence_async();
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}

__device__ __forceinline__ void store_float(uint32_t to, float x) { store4(to, __float_as_uint(x)); }
__device__ __forceinline__ float load_float(uint32_t from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
    return x;
}

__device__ __forceinline__ void weigh(const Problem &p, uint32_t base, int warp, int lane) {
    const float none = __int_as_float(0xFF800000);
    const int row = warp * 16 + lane / 4, quad = lane % 4;
    const uint64_t query = operand(base + QUERY, 16, 1024);
    float most[2] = {none, none}, total[2] = {0.0f, 0.0f};
    for (int tile = 0; tile < p.tiles; tile++) {
        const int stage = tile & 1;
        const uint64_t keys = operand(base + TILES + stage * TILE_BYTES, 16, 1024);
        float s[32];
        barrier_wait(base + FULL + stage * 8, tile >> 1 & 1);
        products_begin();
#pragma unroll
        for (int i = 0; i < WIDTH / 16; i++) {
            const int at = i / 4 * (BLOCK_BYTES / 16) + i % 4 * 2;
            product_bf16_n64(s, query + at, keys + at, i > 0);
        }
        products_commit();
        products_wait<0>();
        pin(s);
        uint32_t valid[2];
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(valid[0]), "=r"(valid[1]) : "r"(base + VALID + stage * 8));
        if ((valid[0] & valid[1]) != ALL) {
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (!(valid[j / 4] >> (j % 4 * 8 + 2 * quad + c) & 1)) s[4 * j + c] = s[4 * j + 2 + c] = none;
        }
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float peak = most[i];
#pragma unroll
            for (int j = 0; j < 8; j++) peak = fmaxf(peak, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
            peak = quad_max(peak);
            const float from = peak == none ? 0.0f : peak * p.scale_log2;
            shrink[i] = exp2_fast(most[i] * p.scale_log2 - from);
            most[i] = peak;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float &x = s[4 * j + 2 * i + c];
                    x = exp2_fast(fmaf(x, p.scale_log2, -from));
                    sum += x;
                }
            total[i] = total[i] * shrink[i] + sum;
        }
        barrier_wait(base + P_EMPTY, (tile & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = row + 8 * i;
#pragma unroll
            for (int j = 0; j < 8; j++)
                store4(base + WEIGHTS + at * 128 + ((j ^ (at & 7)) << 4) + quad * 4,
                       pack_bf16(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
            if (quad == 0) store_float(base + FACTORS + at * 4, shrink[i]);
        }
        fence_async();
        barrier_arrive(base + P_FULL);
    }
    barrier_wait(base + P_EMPTY, (p.tiles & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = quad_sum(total[i]);
        const int head = row + 8 * i;
        if (quad) continue;
        store_float(base + FACTORS + head * 4, sum == 0.0f ? 0.0f : 1.0f / sum);
        if (p.lse && head < p.heads) p.lse[head] = sum == 0.0f ? none : most[i] * p.scale_log2 + __log2f(sum);
    }
    barrier_arrive(base + P_FULL);
}

__device__ __forceinline__ void sum_values(const Problem &p, uint32_t base, int half, int warp, int lane) {
    float d[2][64];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i / 64][i % 64] = 0.0f;
    const uint32_t factors = base + FACTORS + (warp * 16 + lane / 4) * 4;
    const uint64_t weights = operand(base + WEIGHTS, 16, 1024);
    for (int tile = 0; tile < p.tiles; tile++) {
        const int stage = tile & 1;
        barrier_wait(base + P_FULL, tile & 1);
        const float shrink[2] = {load_float(factors), load_float(factors + 32)};
        if (__any_sync(ALL, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; i++) d[i / 64][i % 64] *= shrink[i / 2 % 2];
        }
        const uint64_t values = operand(base + TILES + stage * TILE_BYTES + half * 4 * BLOCK_BYTES, BLOCK_BYTES, 1024);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            product_bf16_n128_columns(d[0], weights + 2 * i, values + i * 128, 1);
            product_bf16_n128_columns(d[1], weights + 2 * i, values + i * 128 + 2 * BLOCK_BYTES / 16, 1);
            if (i == 1) products_commit();
        }
        products_commit();
        products_wait<1>();
        if (lane == 0) barrier_arrive(base + EMPTY + stage * 16);
        products_wait<0>();
        pin(d[0]);
        pin(d[1]);
        if (lane == 0) {
            barrier_arrive(base + EMPTY + stage * 16 + 8);
            barrier_arrive(base + P_EMPTY);
        }
    }
    barrier_wait(base + P_FULL, p.tiles & 1);
    const float share[2] = {load_float(factors), load_float(factors + 32)};
    named_barrier(2, 256);  // nobody reads the stages any more
    const int quad = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t line = base + TILES + (warp * 16 + lane / 4 + 8 * i) * OUT_STRIDE;
#pragma unroll
        for (int j = 0; j < 32; j++) {
            const uint32_t to = line + (half * 256 + 8 * j + quad / 2 * 4 + quad % 2) * 4;
            store_float(to, d[j / 16][4 * (j % 16) + 2 * i] * share[i]);
            store_float(to + 8, d[j / 16][4 * (j % 16) + 2 * i + 1] * share[i]);
        }
    }
    fence_async();
    named_barrier(2, 256);
    const int head = half * 128 + warp * 32 + lane;
    if (head < p.heads) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
            ::"l"(p.out + (long long)head * LATENT), "r"(base + TILES + head * OUT_STRIDE), "r"(LATENT * 4) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}

template <bool TILED>
__device__ __forceinline__ void
attend(const float *q, const uint8_t *plane, const int *selection, const long long *seqs, const long long *tables,
       float *out, float *lse, int heads, int table_blocks, long long row_stride, long long head_stride, float scale_log2,
       int k, int share, int splits, int head_blocks) {
    extern __shared__ unsigned char memory[];
    const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const long long row = blockIdx.x / head_blocks;
    const int first_head = blockIdx.x % head_blocks * HEADS, split = blockIdx.y;
    Problem p;
    p.begin = split * share;
    p.end = min(p.begin + share, k);
    p.selection = selection + row * k;
    int *last = reinterpret_cast<int *>(memory + (base - shared_address(memory)) + LAST);
    if (thread == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(base + FULL + i * 8, 128);
            barrier_init(base + EMPTY + i * 16, 8);
            barrier_init(base + EMPTY + i * 16 + 8, 8);
        }
        barrier_init(base + P_FULL, 128);
        barrier_init(base + P_EMPTY, 8);
        fence_barrier_init();
        *last = p.begin;
    }
    const bool complete = p.end > p.begin && p.selection[p.end - 1] >= 0;
    __syncthreads();
    if (!complete) {
        int mine = 0;
        for (int i = p.begin + thread; i < p.end; i += THREADS)
            if (p.selection[i] >= 0) mine = i + 1;
        mine = __reduce_max_sync(ALL, mine);
        if (lane == 0) atomicMax(last, mine);
        __syncthreads();
        p.end = *last;
    }
    p.tiles = max(p.end - p.begin + KEYS - 1, 0) / KEYS;
    p.plane = plane;
    p.table = tables + seqs[row] * table_blocks;
    p.q = q + row * row_stride + first_head * head_stride;
    p.head_stride = head_stride;
    p.heads = min(heads - first_head, HEADS);
    p.scale_log2 = scale_log2;
    const long long line = (row * splits + split) * heads + first_head;
    p.out = out + line * LATENT;
    p.lse = splits > 1 ? lse + line : nullptr;

    if (warp >= 12) {
        fewer_registers<112>();
        gather<TILED>(p, base, warp - 12, lane);
    } else if (warp < 4) {
        fewer_registers<80>();
        load_query<TILED>(p, base + QUERY, thread);
        named_barrier(1, LOADERS);
        weigh(p, base, warp, lane);
    } else {
        more_registers<160>();
        load_query<TILED>(p, base + QUERY, thread);
        asm volatile("bar.arrive 1, %0;" ::"n"(LOADERS) : "memory");
        sum_values(p, base, warp / 4 - 1, warp % 4, lane);
    }
}

#define ARGUMENTS                                                                                                       \
    const float *q, const uint8_t *plane, const int *selection, const long long *seqs, const long long *tables,         \
        float *out, float *lse, int heads, int table_blocks, long long row_stride, long long head_stride,               \
        float scale_log2, int k, int share, int splits, int head_blocks
#define PASSED                                                                                                          \
    q, plane, selection, seqs, tables, out, lse, heads, table_blocks, row_stride, head_stride, scale_log2, k, share,    \
        splits, head_blocks

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_tile656(ARGUMENTS) { attend<true>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_plain576(ARGUMENTS) { attend<false>(PASSED); }
