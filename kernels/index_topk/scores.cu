// Index scores of 32 heads on FP8 tensor cores, keys fetched by the copy engine straight from the paged planes.
//
//   producer warp:  block table -> copy engine: 64 keys (8 KB, swizzled) and their 64 scales into a ring of stages
//   warpgroup 0, 1: product [64 keys] x [rows x 32 heads] of a second block is under way while the first one's is
//                   reduced: relu, times head weight, summed over heads, times key scale
//
// Queries lie in shared memory in such an order that the 32 products of one row and key end up in one thread: column
// 8 j + 2 q + c of a product belongs to query row q and head 2 j + c, and lane q of four owns columns 2 q, 2 q + 1 of
// every 8. So nothing is exchanged between threads. A fifth row (verification) spreads its heads over the four lanes and
// is summed in the same order, so a score's bits do not depend on the place of its row.
//
// WIDE: two warpgroups hold four different rows each and see every block (prefill). Otherwise both hold the same five
// rows and take blocks in turn (decode, verification).
#include "sm90.cuh"

constexpr int HEADS = 32, BLOCK = 64, STAGES = 8;
constexpr int PLANE_BYTES = 8448, KEY_BYTES = BLOCK * 128, SCALE_BYTES = BLOCK * 4;
constexpr int GROUPS_THREADS = 256, THREADS = 384;
constexpr unsigned ALL = 0xFFFFFFFFu;

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

template <bool WIDE> struct Layout {
    static constexpr int ROWS = WIDE ? 4 : 5;                 // of one warpgroup
    static constexpr int COLUMNS = ROWS * HEADS;              // of one product
    static constexpr int QUERY_BYTES = (WIDE ? 2 : 1) * COLUMNS * 128;
    static constexpr int SCALES = QUERY_BYTES + STAGES * KEY_BYTES;
    static constexpr int BARRIERS = SCALES + STAGES * SCALE_BYTES;
    static constexpr int SIZE = BARRIERS + 2 * STAGES * 8 + 1024;  // the base is rounded up to 1,024
};

struct Rows {
    const int *members;
    int start, end;
};

// Column of a product -> (row, head).
template <int ROWS> __device__ __forceinline__ void column_of(int n, int &row, int &head) {
    int q = n % 8 / 2, c = n % 2, j = n / 8;
    row = n < 128 ? q : 4;
    head = n < 128 ? 2 * j + c : 8 * q + 2 * (j - 16) + c;
}

template <bool WIDE>
__device__ __forceinline__ void load_queries(uint32_t to, const uint8_t *codes, Rows rows, int thread) {
    using L = Layout<WIDE>;
    constexpr int LINES = (WIDE ? 2 : 1) * L::COLUMNS;
    for (int i = thread; i < LINES * 8; i += GROUPS_THREADS) {
        int n = i / 8, chunk = i % 8, row, head;
        column_of<L::ROWS>(n % L::COLUMNS, row, head);
        int place = rows.start + row + n / L::COLUMNS * L::ROWS;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (place < rows.end)
            v = *reinterpret_cast<const uint4 *>(codes + ((long long)rows.members[place] * HEADS + head) * 128 + chunk * 16);
        store16(to + n * 128 + ((chunk ^ (n & 7)) << 4), v.x, v.y, v.z, v.w);
    }
}

__device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, int add) { product_e4m3_n128(d, a, b, add); }
__device__ __forceinline__ void product(float (&d)[80], uint64_t a, uint64_t b, int add) { product_e4m3_n160(d, a, b, add); }

// Where a thread's results go and what it multiplies by.
template <bool WIDE> struct Sink {
    float weight[HEADS];
    float weight5[8];
    float *scores, *scores5, *maxima, *maxima5;  // null: no such row
    int last, last5, first_row;
};

__device__ __forceinline__ float visible(float score, int position, int first_row, int last) {
    return position >= first_row && position <= last ? score : __int_as_float(0xFF800000);
}

__device__ __forceinline__ float group_maximum(float a, float b) {
    float most = fmaxf(a, b);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    return most;
}

template <bool WIDE, int N>
__device__ __forceinline__ void reduce(const float (&d)[N], const Sink<WIDE> &sink, float scale0, float scale1, int block,
                                       int warp, int lane) {
    float part[4][2];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        part[m][0] = part[m][1] = 0.0f;
#pragma unroll
        for (int j = 4 * m; j < 4 * m + 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    part[m][i] = fmaf(fmaxf(d[4 * j + 2 * i + c], 0.0f), sink.weight[2 * j + c], part[m][i]);
    }
    const int position = block * BLOCK + warp * 16 + lane / 4;
    float a = ((part[0][0] + part[1][0]) + (part[2][0] + part[3][0])) * scale0;
    float b = ((part[0][1] + part[1][1]) + (part[2][1] + part[3][1])) * scale1;
    a = visible(a, position, sink.first_row, sink.last);
    b = visible(b, position + 8, sink.first_row, sink.last);
    float most = group_maximum(a, b);
    if (sink.scores) {
        sink.scores[position] = a;
        sink.scores[position + 8] = b;
        if (lane < 4) sink.maxima[block * 4 + warp] = most;
    }
    if constexpr (!WIDE) {
        float fifth[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    fifth[i] = fmaf(fmaxf(d[64 + 4 * j + 2 * i + c], 0.0f), sink.weight5[2 * j + c], fifth[i]);
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            fifth[0] += __shfl_xor_sync(ALL, fifth[0], step);
            fifth[1] += __shfl_xor_sync(ALL, fifth[1], step);
        }
        a = visible(fifth[0] * scale0, position, sink.first_row, sink.last5);
        b = visible(fifth[1] * scale1, position + 8, sink.first_row, sink.last5);
        most = group_maximum(a, b);
        if (sink.scores5) {
            if (lane % 4 < 2) sink.scores5[position + lane % 4 * 8] = lane % 4 ? b : a;
            if (lane == 0) sink.maxima5[block * 4 + warp] = most;
        }
    }
}

template <bool WIDE>
__device__ __forceinline__ void
score(const TensorMap &map, const uint8_t *plane, const uint8_t *codes, const float *weights, const long long *tables,
      const long long *last_rows, const int *members, const int *tile_seq, const int *tile_start, const int *tile_end,
      float *scores, float *maxima, int sequences, int table_blocks, int first_row, int k, int width, int chunk_blocks) {
    using L = Layout<WIDE>;
    extern __shared__ unsigned char memory[];
    const int seq = tile_seq[blockIdx.x];
    if (seq >= sequences) return;
    constexpr int TILE = (WIDE ? 2 : 1) * L::ROWS;
    const Rows rows = {members, tile_start[blockIdx.x], min(tile_end[blockIdx.x], tile_start[blockIdx.x] + TILE)};
    int furthest = -1;
    for (int i = rows.start; i < rows.end; i++) furthest = max(furthest, (int)last_rows[members[i]]);
    if (furthest - first_row < k) return;
    const int block_begin = blockIdx.y * chunk_blocks;
    const int block_end = min(min(block_begin + chunk_blocks, furthest / BLOCK + 1), table_blocks);
    if (block_begin >= block_end) return;

    const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
    const uint32_t keys = base + L::QUERY_BYTES, scales = base + L::SCALES, full = base + L::BARRIERS, empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WIDE ? 8 : 4);
        }
        fence_barrier_init();
    }
    __syncthreads();

    if (warp >= 8) {
        fewer_registers<40>();
        if (warp != 8) return;
        const long long *table = tables + (long long)seq * table_blocks;
        for (int first = block_begin; first < block_end; first += 32) {
            int mine = first + lane < block_end ? (int)table[first + lane] : 0;
            int many = min(32, block_end - first);
            for (int i = 0; i < many; i++) {
                int slot = max(__shfl_sync(ALL, mine, i), 0);  // no block there: its rows are not visible
                int n = first - block_begin + i, stage = n % STAGES;
                if (lane == 0) {
                    barrier_wait(empty + 8 * stage, (n / STAGES & 1) ^ 1);
                    barrier_expect(full + 8 * stage, KEY_BYTES + SCALE_BYTES);
                    copy_box(keys + stage * KEY_BYTES, &map, 0, slot * (PLANE_BYTES / 128), full + 8 * stage);
                    copy_bytes(scales + stage * SCALE_BYTES, plane + (long long)slot * PLANE_BYTES + KEY_BYTES, SCALE_BYTES,
                               full + 8 * stage);
                }
                __syncwarp();
            }
        }
        return;
    }
    more_registers<232>();
    load_queries<WIDE>(base, codes, rows, thread);
    fence_async();
    const int group = warp / 4;
    Sink<WIDE> sink;
    {
        int place = rows.start + lane % 4 + (WIDE ? group * L::ROWS : 0);
        bool real = place < rows.end;
        long long row = real ? members[place] : 0;
        sink.scores = real ? scores + row * width : nullptr;
        sink.maxima = maxima + row * (width / 16);
        sink.last = real ? (int)last_rows[row] : -1;
        sink.first_row = first_row;
#pragma unroll
        for (int h = 0; h < HEADS; h += 4) {
            float4 w = *reinterpret_cast<const float4 *>(weights + row * HEADS + h);
            sink.weight[h] = w.x, sink.weight[h + 1] = w.y, sink.weight[h + 2] = w.z, sink.weight[h + 3] = w.w;
        }
        if constexpr (!WIDE) {
            real = rows.start + 4 < rows.end;
            row = real ? members[rows.start + 4] : 0;
            sink.scores5 = real ? scores + row * width : nullptr;
            sink.maxima5 = maxima + row * (width / 16);
            sink.last5 = real ? (int)last_rows[row] : -1;
#pragma unroll
            for (int h = 0; h < 8; h++) sink.weight5[h] = weights[row * HEADS + lane % 4 * 8 + h];
        }
    }
    named_barrier(1, GROUPS_THREADS);

    const uint64_t queries = operand(base + (WIDE ? group * L::COLUMNS * 128 : 0), 16, 1024);
    const int total = block_end - block_begin, step = WIDE ? 1 : 2;
    float even[L::COLUMNS / 2], odd[L::COLUMNS / 2];
    auto issue = [&](auto &d, int n) {
        int stage = n % STAGES;
        barrier_wait(full + 8 * stage, n / STAGES & 1);
        const uint64_t tile = operand(keys + stage * KEY_BYTES, 16, 1024);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) product(d, tile + 2 * i, queries + 2 * i, i);
        products_commit();
    };
    auto finish = [&](auto &d, int n) {
        int stage = n % STAGES, key = warp % 4 * 16 + lane / 4;
        float scale0, scale1;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale0) : "r"(scales + stage * SCALE_BYTES + key * 4));
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale1) : "r"(scales + stage * SCALE_BYTES + key * 4 + 32));
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        reduce<WIDE>(d, sink, scale0, scale1, block_begin + n, warp % 4, lane);
    };
    const int first = WIDE ? 0 : group, count = (total - first + step - 1) / step;
    int i = 0;
    for (; i + 1 < count; i += 2) {
        issue(even, first + i * step);
        issue(odd, first + (i + 1) * step);
        products_wait<1>();
        pin(even);
        finish(even, first + i * step);
        products_wait<0>();
        pin(odd);
        finish(odd, first + (i + 1) * step);
    }
    if (i < count) {
        issue(even, first + i * step);
        products_wait<0>();
        pin(even);
        finish(even, first + i * step);
    }
}

#define ARGUMENTS                                                                                                      \
    const __grid_constant__ TensorMap map, const uint8_t *plane, const uint8_t *codes, const float *weights,           \
        const long long *tables, const long long *last_rows, const int *members, const int *tile_seq,                  \
        const int *tile_start, const int *tile_end, float *scores, float *maxima, int sequences, int table_blocks,     \
        int first_row, int k, int width, int chunk_blocks
#define PASSED                                                                                                         \
    map, plane, codes, weights, tables, last_rows, members, tile_seq, tile_start, tile_end, scores, maxima, sequences, \
        table_blocks, first_row, k, width, chunk_blocks

extern "C" __global__ void __launch_bounds__(THREADS, 1) score_wide(ARGUMENTS) { score<true>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) score_few(ARGUMENTS) { score<false>(PASSED); }
