// The selection of one row by one cluster of thread blocks, in one launch: see compute/kernels/topk_cluster.py.
//
// Every block finds the bound from the class maxima and puts aside the candidates among its own scores, each warp those
// of a run of positions. Rank 0 gets them all in order of position in its shared memory, counts them by their distance
// from the bound, and selects. Where they are too many for that, the cluster counts scores in memory instead.
//
// Defined by whoever compiles it: THREADS, CLUSTER, SHARED_BYTES, ROOM, CAPACITY.

#include "cluster.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int CLASSES = 4096;
constexpr int BINS = 1024;
constexpr int TIES = 512;                     // most candidates of one bin that are compared each with each
constexpr int NO_SCORE = -2147483647 - 1;     // order key of -inf, NaN, and where nothing is
constexpr int LOWEST = -0x7f800000;          // order key of the most negative finite float
constexpr int CLASSES_OF_THREAD = CLASSES / THREADS;
constexpr int BINS_OF_THREAD = BINS / THREADS;
constexpr int TILES = CAPACITY / THREADS;
constexpr unsigned ALL = 0xffffffffu;

struct Found {
    int bin;    // -1 if the bins do not reach k
    int above;  // scores in the bins above it
    int in_bin;
};

struct Shared {
    Arrival totals_here, candidates_here;
    int bins[BINS];
    int histogram[BINS];      // rank 0: scores of the whole cluster, where they are counted in memory
    int2 totals[CLUSTER];     // of each rank
    int2 warp_totals[WARPS];
    int sums[32];
    int counts[TILES * WARPS];
    int ties[TIES];
    int tie_count;
    int2 threshold;
    Found found;
    int2 common[2];           // written by rank 0 to all: the bin and what is above; what is in it
    int2 own[WARPS][ROOM];    // key and position of each warp's first candidates
    int2 candidates[CAPACITY];  // rank 0
};

struct Row {
    const float *scores;
    int first, end;  // positions of this warp
};

struct Interval {
    int base, top, shift;  // order keys, both ends included, and log2 of the keys of a bin

    __device__ Interval(int base, int top) : base(base), top(top) {
        unsigned width = (unsigned)top - (unsigned)base;
        int bits = 32 - __clz(width);
        shift = bits > 10 ? bits - 10 : 0;
    }
    __device__ bool holds(int key) const { return key >= base && key <= top; }
    __device__ int bin(int key) const { return (int)(((unsigned)key - (unsigned)base) >> shift); }
    __device__ int lower(int bin) const { return (int)((unsigned)base + ((unsigned)bin << shift)); }
    __device__ Interval of_bin(int bin) const {
        unsigned least = (unsigned)base + ((unsigned)bin << shift), last = least + ((1u << shift) - 1);
        return Interval((int)least, last - least > (unsigned)top - least ? top : (int)last);
    }
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");

__device__ int order_key(float score) {
    int bits = __float_as_int(score + 0.0f);  // -0.0 as 0.0
    return score > -__int_as_float(0x7f800000) ? bits ^ ((bits >> 31) & 0x7fffffff) : NO_SCORE;
}

__device__ float score_of(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

// The sum of `value` over this lane and those before it.
__device__ APART int sum_up_to(int value) {
    int lane = threadIdx.x % 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(ALL, value, distance);
        value += lane >= distance ? other : 0;
    }
    return value;
}

// The bin, from the highest on, with which k are reached, where `above` lie above all bins. Called by a whole block.
__device__ APART void find_bin(const int *bins, int above, int k, Shared &shared, Found *found) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int in_bin[BINS_OF_THREAD], own = 0;
    for (int i = 0; i < BINS_OF_THREAD; ++i) own += in_bin[i] = bins[BINS - 1 - (thread * BINS_OF_THREAD + i)];
    int up_to = sum_up_to(own);
    if (lane == 31) shared.sums[warp] = up_to;
    if (thread == 0) found->bin = -1;
    __syncthreads();
    int of_warp = lane < WARPS ? shared.sums[lane] : 0;
    int total = __reduce_add_sync(ALL, of_warp);
    up_to += above - own + __reduce_add_sync(ALL, lane < warp ? of_warp : 0);
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        if (up_to < k && up_to + in_bin[i] >= k)
            *found = {BINS - 1 - (thread * BINS_OF_THREAD + i), up_to, in_bin[i]};
        up_to += in_bin[i];
    }
    if (thread == 0 && above + total < k) found->above = above + total;
    __syncthreads();
}

// The order key that at least k of the class maxima reach, and not many more; `hi` becomes the largest of all.
__device__ int find_bound(const int (&key)[CLASSES_OF_THREAD], int k, Shared &shared, int &hi) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int most = NO_SCORE;
    for (int i = 0; i < CLASSES_OF_THREAD; ++i) most = max(most, key[i]);
    most = __reduce_max_sync(ALL, most);
    if (lane == 0) shared.sums[warp] = most;
    __syncthreads();
    hi = __reduce_max_sync(ALL, lane < WARPS ? shared.sums[lane] : NO_SCORE);
    if (hi == NO_SCORE) return LOWEST;
    int above = 0;
    // Most maxima are within four powers of two of the largest.
    Interval interval(hi > (4 << 23) ? hi - (4 << 23) : LOWEST, hi);
    while (true) {
        for (int i = 0; i < CLASSES_OF_THREAD; ++i)
            if (interval.holds(key[i])) atomicAdd(&shared.bins[interval.bin(key[i])], 1);
        __syncthreads();
        find_bin(shared.bins, above, k, shared, &shared.found);
        Found found = shared.found;
        for (int i = 0; i < BINS_OF_THREAD; ++i) shared.bins[thread * BINS_OF_THREAD + i] = 0;
        if (found.bin < 0) {
            if (interval.base == LOWEST) return LOWEST;
            above = found.above;
            interval = Interval(LOWEST, interval.base - 1);
        } else {
            if (found.above + found.in_bin <= k + k / 4 || interval.shift == 0) return interval.lower(found.bin);
            above = found.above;
            interval = interval.of_bin(found.bin);
        }
        __syncthreads();
    }
}

// The scores of a warp in steps of 128, four to a lane, a few steps ahead.
struct Steps {
    static constexpr int AHEAD = 4;
    const float *scores;
    int at, end;
    float4 ahead[AHEAD];

    __device__ Steps(const Row &row) : scores(row.scores), at(row.first + threadIdx.x % 32 * 4), end(row.end) {
        for (int i = 0; i < AHEAD; ++i) ahead[i] = load(at + i * 128);
    }
    __device__ float4 load(int from) const {
        return from < end ? *(const float4 *)(scores + from) : make_float4(0, 0, 0, 0);
    }
    __device__ float4 next() {
        float4 now = ahead[0];
        for (int i = 1; i < AHEAD; ++i) ahead[i - 1] = ahead[i];
        ahead[AHEAD - 1] = load(at + AHEAD * 128);
        at += 128;
        return now;
    }
};

// Calls use(scores, which of them are at least `bound`, position of the first), four for each lane, in order.
template <typename Use>
__device__ void scan(const Row &row, Steps &steps, float bound, Use use) {
    int rounds = (row.end - row.first + 127) / 128;
#pragma unroll 1
    for (; rounds > 0; --rounds) {
        int at = steps.at;
        float4 now = steps.next();
        float value[4] = {now.x, now.y, now.z, now.w};
        bool reaches[4];
        for (int e = 0; e < 4; ++e) reaches[e] = at + e < row.end && value[e] >= bound;
        if (__any_sync(ALL, reaches[0] || reaches[1] || reaches[2] || reaches[3])) use(value, reaches, at);
    }
}

// How many of `flags` (four of each lane, in order) come before this lane's; their number is added to `count`.
__device__ int rank_of(const bool (&flags)[4], int &count) {
    unsigned before = (1u << (threadIdx.x % 32)) - 1;
    int rank = count;
    for (int e = 0; e < 4; ++e) {
        unsigned ballot = __ballot_sync(ALL, flags[e]);
        rank += __popc(ballot & before);
        count += __popc(ballot);
    }
    return rank;
}

// Totals of this warp, as totals of all warps before it in the cluster, and of all warps. For the first time (phase 0)
// each block must have expected the bytes, and waited for the others to have done so; likewise for the second.
__device__ APART int2 exchange_totals(int2 own, int phase, Shared &shared, unsigned rank, int2 &all) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (lane == 0) shared.warp_totals[warp] = own;
    __syncthreads();
    int2 of_warp = lane < WARPS ? shared.warp_totals[lane] : make_int2(0, 0);
    int2 block = make_int2(__reduce_add_sync(ALL, of_warp.x), __reduce_add_sync(ALL, of_warp.y));
    if (thread < CLUSTER) send(&shared.totals[rank], thread, block, &shared.totals_here);
    if (lane >= warp) of_warp = make_int2(0, 0);
    int2 before = make_int2(__reduce_add_sync(ALL, of_warp.x), __reduce_add_sync(ALL, of_warp.y));
    await_bytes(&shared.totals_here, phase);
    int2 of_rank = lane < CLUSTER ? shared.totals[lane] : make_int2(0, 0);
    all = make_int2(__reduce_add_sync(ALL, of_rank.x), __reduce_add_sync(ALL, of_rank.y));
    if (lane >= rank) of_rank = make_int2(0, 0);
    before.x += __reduce_add_sync(ALL, of_rank.x);
    before.y += __reduce_add_sync(ALL, of_rank.y);
    return before;
}

// Candidates of a warp that had no room for them.
__device__ APART void send_again(const Row &row, float bound, int offset, Shared &shared) {
    Steps steps(row);
    scan(row, steps, bound, [&](const float (&value)[4], const bool (&reaches)[4], int at) {
        int place = rank_of(reaches, offset);
        for (int e = 0; e < 4; ++e) {
            int2 candidate = make_int2(order_key(value[e]), at + e);
            if (reaches[e]) send(&shared.candidates[place], 0, candidate, &shared.candidates_here);
            place += reaches[e];
        }
    });
}

// Rank 0: write the k best of n candidates.
__device__ void select(int n, int k, Interval interval, Shared &shared, int *selection) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int least = NO_SCORE, ties = 0;  // chosen are all above `least`, and the first `ties` equal to it
    if (n > k) {
        int above = 0;
        while (true) {
#pragma unroll 1
            for (int i = thread; i < n; i += THREADS) {
                int key = shared.candidates[i].x;
                if (interval.holds(key)) atomicAdd(&shared.bins[interval.bin(key)], 1);
            }
            __syncthreads();
            find_bin(shared.bins, above, k, shared, &shared.found);
            Found found = shared.found;
            interval = interval.of_bin(found.bin);
            above = found.above;
            if (above + found.in_bin == k) {
                least = interval.base - 1;
                break;
            }
            if (interval.base == interval.top) {
                least = interval.base, ties = k - above;
                break;
            }
            if (found.in_bin <= TIES) {
#pragma unroll 1
                for (int i = thread; i < n; i += THREADS) {
                    int key = shared.candidates[i].x;
                    if (interval.holds(key)) shared.ties[atomicAdd(&shared.tie_count, 1)] = key;
                }
                __syncthreads();
#pragma unroll 1
                for (int i = thread; i < found.in_bin; i += THREADS) {
                    int key = shared.ties[i], greater = above, equal = 0;
#pragma unroll 1
                    for (int j = 0; j < found.in_bin; ++j) {
                        greater += shared.ties[j] > key;
                        equal += shared.ties[j] == key;
                    }
                    if (greater < k && greater + equal >= k) shared.threshold = make_int2(key, k - greater);
                }
                __syncthreads();
                least = shared.threshold.x, ties = shared.threshold.y;
                break;
            }
            for (int i = 0; i < BINS_OF_THREAD; ++i) shared.bins[thread * BINS_OF_THREAD + i] = 0;
            __syncthreads();
        }
    }
    unsigned before = (1u << lane) - 1;
    int tiles = (n + THREADS - 1) / THREADS;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        int i = tile * THREADS + thread;
        int key = i < n ? shared.candidates[i].x : NO_SCORE;
        unsigned greater = __ballot_sync(ALL, key > least), equal = __ballot_sync(ALL, i < n && key == least);
        if (lane == 0) shared.counts[tile * WARPS + warp] = __popc(greater) | __popc(equal) << 16;
    }
    __syncthreads();
#pragma unroll 1
    for (int line = warp; line * 32 < tiles * WARPS; line += WARPS) {
        int at = line * 32 + lane;
        int count = at < tiles * WARPS ? shared.counts[at] : 0;
        int up_to = sum_up_to(count);
        if (at < tiles * WARPS) shared.counts[at] = up_to - count;
        if (lane == 31) shared.sums[line] = up_to;
    }
    __syncthreads();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        int i = tile * THREADS + thread;
        int2 candidate = i < n ? shared.candidates[i] : make_int2(NO_SCORE, 0);
        bool is_greater = candidate.x > least, is_equal = i < n && candidate.x == least;
        unsigned greater = __ballot_sync(ALL, is_greater), equal = __ballot_sync(ALL, is_equal);
        int counts = shared.counts[tile * WARPS + warp];
#pragma unroll 1
        for (int line = 0; line < (tile * WARPS + warp) / 32; ++line) counts += shared.sums[line];
        int greater_before = (counts & 0xffff) + __popc(greater & before);
        int equal_before = (counts >> 16) + __popc(equal & before);
        if (is_greater || (is_equal && equal_before < ties))
            selection[greater_before + min(equal_before, ties)] = candidate.y;
    }
#pragma unroll 1
    for (int i = min(n, k) + thread; i < k; i += THREADS) selection[i] = -1;
}

// Too many candidates for shared memory: find the k-th score by counting, and write what is chosen from where it lies.
__device__ APART void select_from_memory(
    int n, int k, Interval interval, const Row &row, unsigned rank, Shared &shared, int *selection) {
    int thread = threadIdx.x;
    int least = interval.base - 1, ties = 0, above = 0;
#pragma unroll 1
    for (int bin = thread; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
    cluster_barrier();
    while (n > k) {
        float bound = score_of(interval.base);
        Steps steps(row);
        scan(row, steps, bound, [&](const float (&value)[4], const bool (&reaches)[4], int) {
            for (int e = 0; e < 4; ++e) {
                int key = order_key(value[e]);
                if (reaches[e] && interval.holds(key)) atomicAdd(&shared.bins[interval.bin(key)], 1);
            }
        });
        __syncthreads();
#pragma unroll 1
        for (int bin = thread; bin < BINS; bin += THREADS) {
            int count = shared.bins[bin];
            if (count) add_remote(&shared.histogram[bin], 0, count);
            shared.bins[bin] = 0;
        }
        cluster_barrier();
        if (rank == 0) {
            find_bin(shared.histogram, above, k, shared, &shared.found);
            Found found = shared.found;
#pragma unroll 1
            for (int bin = thread; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
            if (thread < CLUSTER) {
                store_remote(&shared.common[0], thread, make_int2(found.bin, found.above));
                store_remote(&shared.common[1], thread, make_int2(found.in_bin, 0));
            }
        }
        cluster_barrier();
        interval = interval.of_bin(shared.common[0].x);
        above = shared.common[0].y;
        if (above + shared.common[1].x == k) {
            least = interval.base - 1;
            break;
        }
        if (interval.base == interval.top) {
            least = interval.base, ties = k - above;
            break;
        }
    }
    float bound = score_of(max(least, LOWEST));
    Steps counted(row);
    int2 own = make_int2(0, 0), all;
    scan(row, counted, bound, [&](const float (&value)[4], const bool (&reaches)[4], int) {
        for (int e = 0; e < 4; ++e) {
            int key = reaches[e] ? order_key(value[e]) : NO_SCORE;
            own.x += __popc(__ballot_sync(ALL, key > least));
            own.y += __popc(__ballot_sync(ALL, reaches[e] && key == least));
        }
    });
    if (thread == 0) expect_bytes(&shared.totals_here, sizeof shared.totals);
    cluster_barrier();  // all have read the totals of before, and expect others
    int2 before = exchange_totals(own, 1, shared, rank, all);
    Steps written(row);
    scan(row, written, bound, [&](const float (&value)[4], const bool (&reaches)[4], int at) {
        bool greater[4], equal[4];
        for (int e = 0; e < 4; ++e) {
            int key = reaches[e] ? order_key(value[e]) : NO_SCORE;
            greater[e] = key > least;
            equal[e] = reaches[e] && key == least;
        }
        int greater_before = rank_of(greater, before.x), equal_before = rank_of(equal, before.y);
        for (int e = 0; e < 4; ++e) {
            if (greater[e] || (equal[e] && equal_before < ties))
                selection[greater_before + min(equal_before, ties)] = at + e;
            greater_before += greater[e];
            equal_before += equal[e];
        }
    });
    if (rank == 0)
#pragma unroll 1
        for (int i = min(n, k) + thread; i < k; i += THREADS) selection[i] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_cluster(
    const float *scores, const long long *lengths, int *maxima, int *selection, long long stride, int k) {
    SHARED_MEMORY(Shared, shared);
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned rank = blockIdx.x;
    long long line = blockIdx.y;
#pragma unroll 1
    for (int bin = thread; bin < BINS; bin += THREADS) shared.bins[bin] = 0;
    if (thread == 0) {
        shared.tie_count = 0;
        init_arrival(&shared.totals_here);
        init_arrival(&shared.candidates_here);
        expect_bytes(&shared.totals_here, sizeof shared.totals);
        publish_arrivals();
    }
    cluster_arrive_relaxed();  // waited for before the first access to another block's memory
    await_kernel_before();

    int length = (int)lengths[line];
    scores += line * stride;
    maxima += line * CLASSES;
    selection += line * k;
    int share = (length + CLUSTER * WARPS * 128 - 1) / (CLUSTER * WARPS * 128) * 128;
    Row row;
    row.scores = scores;
    row.first = min(((int)rank * WARPS + warp) * share, length);
    row.end = min(row.first + share, length);
    Steps steps(row);
    int key[CLASSES_OF_THREAD], hi;
    for (int i = 0; i < CLASSES_OF_THREAD; i += 4) {
        int4 four = load_fresh((const int4 *)(maxima + i * THREADS + thread * 4));
        key[i] = four.x, key[i + 1] = four.y, key[i + 2] = four.z, key[i + 3] = four.w;
    }
    int low = find_bound(key, k, shared, hi);
    Interval interval(low, max(low, hi));

    int count = 0;
    scan(row, steps, score_of(low), [&](const float (&value)[4], const bool (&reaches)[4], int at) {
        int place = rank_of(reaches, count);
        for (int e = 0; e < 4; ++e) {
            if (reaches[e] && place < ROOM) shared.own[warp][place] = make_int2(order_key(value[e]), at + e);
            place += reaches[e];
        }
    });
    cluster_wait();
    int2 all, before = exchange_totals(make_int2(count, 0), 0, shared, rank, all);
    int n = all.x, offset = before.x;
    constexpr int RESET = CLASSES / CLUSTER;  // all have read the maxima
#pragma unroll 1
    for (int i = thread; i < RESET; i += THREADS) maxima[rank * RESET + i] = NO_SCORE;
    if (n > CAPACITY) {
        select_from_memory(n, k, interval, row, rank, shared, selection);
        return;
    }
    if (rank == 0 && thread == 0) expect_bytes(&shared.candidates_here, n * sizeof(int2));
    if (count <= ROOM)
#pragma unroll 1
        for (int i = lane; i < count; i += 32)
            send(&shared.candidates[offset + i], 0, shared.own[warp][i], &shared.candidates_here);
    else
        send_again(row, score_of(low), offset, shared);
    if (rank == 0) {
        await_bytes(&shared.candidates_here, 0);
        select(n, k, interval, shared, selection);
    }
}
