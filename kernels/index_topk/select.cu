// Exact top-k of one row of scores a block, with the maxima of groups of 16 (see select.py for the idea).
//
// 1. A lower bound of the k-th best maximum by two digits of a radix selection. 2. The groups that reach it, listed in
// order. 3. Their scores that reach it, in order, kept in shared memory when they fit there and read again when not.
// 4. The k-th best of those by a radix selection of all 32 bits; out goes what is above it, and of what equals it the
// first positions. Counts alone decide, so the order in which threads add to a histogram cannot matter.
#include "sm90.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, GROUP = 16;
constexpr int BINS = 2048, LISTED = 8192, KEPT = 384;
constexpr unsigned ALL = 0xFFFFFFFFu;

struct Shared {
    uint32_t bins[BINS];
    uint32_t keys[WARPS][KEPT];
    int positions[WARPS][KEPT];
    uint16_t groups[LISTED];
    int sums[WARPS];
    int kept[WARPS];
    int bin, left, overflow;
};

// Larger scores have larger keys; both zeros are one value.
__device__ __forceinline__ uint32_t sortable(float x) {
    uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits ^ ((int)bits < 0 ? ALL : 0x80000000u);
}

__device__ __forceinline__ int warp_scan(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Sum of `value` (equal in all lanes of a warp) over the warps before this one.
__device__ __forceinline__ int before_warp(Shared &s, int value, int warp, int lane) {
    __syncthreads();
    if (lane == 0) s.sums[warp] = value;
    __syncthreads();
    return __reduce_add_sync(ALL, lane < warp ? s.sums[lane] : 0);
}

// The bin, counted from the top, that holds the `need`-th key, and how many of its keys are needed.
__device__ __forceinline__ void find_bin(Shared &s, int need, int warp, int lane) {
    int first = BINS - 4 - 4 * (int)threadIdx.x;
    uint4 four = *reinterpret_cast<uint4 *>(&s.bins[first]);
    int counts[4] = {(int)four.w, (int)four.z, (int)four.y, (int)four.x};
    int sum = counts[0] + counts[1] + counts[2] + counts[3];
    int inclusive = warp_scan(sum, lane);
    int before = before_warp(s, __shfl_sync(ALL, inclusive, 31), warp, lane) + inclusive - sum;
    if (before < need && need <= before + sum) {
        int i = 0;
        while (before + counts[i] < need) before += counts[i++];
        s.bin = first + 3 - i;
        s.left = need - before;
    }
    __syncthreads();
}

struct Kth {
    uint32_t key;
    int equals;  // how many keys equal to it are among the best
};

// The `need`-th largest key, LEVELS digits of it; `each(f)` calls f with every key this thread holds.
template <int LEVELS, class Each> __device__ __forceinline__ Kth kth(Shared &s, int need, int warp, int lane, Each each) {
    uint32_t prefix = 0, known = 0;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
        const uint32_t mask = level == 2 ? 1023 : 2047;
        __syncthreads();
        *reinterpret_cast<uint4 *>(&s.bins[4 * threadIdx.x]) = make_uint4(0, 0, 0, 0);
        __syncthreads();
        each([&](uint32_t key) {
            if ((key & known) == prefix) atomicAdd(&s.bins[(key >> shift) & mask], 1u);
        });
        __syncthreads();
        find_bin(s, need, warp, lane);
        prefix |= (uint32_t)s.bin << shift;
        known |= mask << shift;
        need = s.left;
    }
    return {prefix, need};
}

// Calls f(keys[4], first position, which of the 4 count) warp by warp, in order of position.
template <class F>
__device__ __forceinline__ void each_four(const Shared &s, const float *scores, bool listed, int begin, int end, int lane,
                                          int first_row, int last_row, uint32_t bound, F f) {
    for (int start = begin; start < end; start += 8) {
        int index = start + lane / 4;
        bool inside = index < end;
        int group = !inside ? 0 : listed ? s.groups[index] : index;
        int position = group * GROUP + (lane % 4) * 4;
        float4 v = inside ? *reinterpret_cast<const float4 *>(scores + position) : make_float4(0, 0, 0, 0);
        uint32_t keys[4] = {sortable(v.x), sortable(v.y), sortable(v.z), sortable(v.w)};
        unsigned counts = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (inside && position + i >= first_row && position + i <= last_row && keys[i] >= bound) counts |= 1u << i;
        f(keys, position, counts);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
select_rows(const float *scores, const float *maxima, const long long *last_rows, int *out, int first_row, int k,
            int width) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned below = (1u << lane) - 1;
    const long long row = blockIdx.x;
    const int last_row = (int)last_rows[row];
    out += row * k;
    if (last_row - first_row < k) {
        for (int i = threadIdx.x; i < k; i += THREADS) out[i] = first_row + i <= last_row ? first_row + i : -1;
        return;
    }
    scores += row * width;
    maxima += row * (width / GROUP);
    const int groups = last_row / GROUP + 1;
    uint32_t bound = 0;
    if (groups > k)
        bound = kth<2>(s, k, warp, lane, [&](auto f) {
            for (int g = threadIdx.x; g < groups; g += THREADS) f(sortable(maxima[g]));
        }).key;

    // Groups that reach the bound, in order: every warp counts and then lists those of its share.
    const int share = (groups + WARPS * 32 - 1) / (WARPS * 32) * 32;
    const int share_begin = min(warp * share, groups), share_end = min(share_begin + share, groups);
    int mine = 0;
    for (int start = share_begin; start < share_end; start += 32) {
        int g = start + lane;
        mine += __popc(__ballot_sync(ALL, g < share_end && sortable(maxima[min(g, groups - 1)]) >= bound));
    }
    int place = before_warp(s, mine, warp, lane);
    int total = __reduce_add_sync(ALL, lane < WARPS ? s.sums[lane] : 0);
    const bool listed = total <= LISTED;
    if (listed) {
        for (int start = share_begin; start < share_end; start += 32) {
            int g = start + lane;
            bool keep = g < share_end && sortable(maxima[min(g, groups - 1)]) >= bound;
            unsigned kept = __ballot_sync(ALL, keep);
            if (keep) s.groups[place + __popc(kept & below)] = (uint16_t)g;
            place += __popc(kept);
        }
    } else {
        total = groups;
    }
    if (threadIdx.x == 0) s.overflow = 0;
    __syncthreads();

    // Scores that reach the bound, in order, each warp's in its own part of shared memory.
    const int part = (total + WARPS * 8 - 1) / (WARPS * 8) * 8;
    const int begin = min(warp * part, total), end = min(begin + part, total);
    int count = 0;
    each_four(s, scores, listed, begin, end, lane, first_row, last_row, bound,
              [&](const uint32_t *keys, int position, unsigned counts) {
                  int inclusive = warp_scan(__popc(counts), lane);
                  int to = count + inclusive - __popc(counts);
#pragma unroll
                  for (int i = 0; i < 4; i++)
                      if (counts >> i & 1) {
                          if (to < KEPT) {
                              s.keys[warp][to] = keys[i];
                              s.positions[warp][to] = position + i;
                          }
                          to++;
                      }
                  count += __shfl_sync(ALL, inclusive, 31);
              });
    if (count > KEPT) s.overflow = 1;
    __syncthreads();
    const bool fits = !s.overflow;

    Kth limit;
    if (fits)
        limit = kth<3>(s, k, warp, lane, [&](auto f) {
            for (int i = lane; i < count; i += 32) f(s.keys[warp][i]);
        });
    else
        limit = kth<3>(s, k, warp, lane, [&](auto f) {
            each_four(s, scores, listed, begin, end, lane, first_row, last_row, bound,
                      [&](const uint32_t *keys, int position, unsigned counts) {
#pragma unroll
                          for (int i = 0; i < 4; i++)
                              if (counts >> i & 1) f(keys[i]);
                      });
        });

    // A chosen score's place: how many better ones come before it, and how many equal ones, up to those wanted.
    int better = 0, equal = 0;
    auto count_four = [&](const uint32_t *keys, int position, unsigned counts) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (counts >> i & 1) {
                better += keys[i] > limit.key;
                equal += keys[i] == limit.key;
            }
    };
    if (fits)
        for (int i = lane; i < count; i += 32) {
            better += s.keys[warp][i] > limit.key;
            equal += s.keys[warp][i] == limit.key;
        }
    else
        each_four(s, scores, listed, begin, end, lane, first_row, last_row, bound, count_four);
    better = before_warp(s, __reduce_add_sync(ALL, better), warp, lane);
    equal = before_warp(s, __reduce_add_sync(ALL, equal), warp, lane);
    if (fits) {
        for (int start = 0; start < count; start += 32) {
            int i = start + lane;
            uint32_t key = i < count ? s.keys[warp][i] : 0;
            bool is_better = i < count && key > limit.key, is_equal = i < count && key == limit.key;
            unsigned betters = __ballot_sync(ALL, is_better), equals = __ballot_sync(ALL, is_equal);
            int equal_before = equal + __popc(equals & below);
            if (is_better || (is_equal && equal_before < limit.equals))
                out[better + __popc(betters & below) + min(equal_before, limit.equals)] = s.positions[warp][i];
            better += __popc(betters);
            equal += __popc(equals);
        }
        return;
    }
    each_four(s, scores, listed, begin, end, lane, first_row, last_row, bound,
              [&](const uint32_t *keys, int position, unsigned counts) {
                  int both = 0;
#pragma unroll
                  for (int i = 0; i < 4; i++)
                      if (counts >> i & 1) both += (keys[i] > limit.key) + ((keys[i] == limit.key) << 16);
                  int inclusive = warp_scan(both, lane);
                  int better_before = better + ((inclusive - both) & 0xFFFF), equal_before = equal + ((inclusive - both) >> 16);
#pragma unroll
                  for (int i = 0; i < 4; i++)
                      if (counts >> i & 1) {
                          bool is_better = keys[i] > limit.key, is_equal = keys[i] == limit.key;
                          if (is_better || (is_equal && equal_before < limit.equals))
                              out[better_before + min(equal_before, limit.equals)] = position + i;
                          better_before += is_better;
                          equal_before += is_equal;
                      }
                  int all = __shfl_sync(ALL, inclusive, 31);
                  better += all & 0xFFFF;
                  equal += all >> 16;
              });
}
