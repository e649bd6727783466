// The splits of sparse attention for many query rows, on Hopper GPUs: what attention_hopper.py gives, bit for bit, of
// rows that are float16 already.
//
// A block has three warpgroups. The first has the scores of every split's first tile and half of the sums' dimensions,
// the second those of the second tile and the other half. The third has the parts of the next tiles copied to where all
// that was there has been read. A split is stored while the next begins.
//
// Defined by whoever compiles it: THREADS, SHARED_BYTES; SPLITS of a query row, and BLOCKS of 64 heads; BFLOAT16_QUERY,
// else queries are float16; MULTIPLIER_REGISTERS, FETCHER_REGISTERS of a thread.

#include "attention_fetch.cuh"

static_assert(2 * MULTIPLIER_REGISTERS + FETCHER_REGISTERS <= 65536 / THREADS / 8 * 8 * 3, "what the block has");

template <int part>
__device__ void add_part(float (&scores)[32], Shared &shared, int tile, int parity) {
    Operand query = by_columns(shared.query), keys = by_columns(shared.tiles[tile]);
    await(&shared.filled[tile][part], parity);
    publish_to_matrix_unit();
    begin_products(scores);
#pragma unroll
    for (int i = first_of(part) * 4; i < first_of(part + 1) * 4; ++i) {
        int offset = chunk_of(i / 4) * CHUNK + i % 4 * 32;
        multiply(scores, moved(query, offset), moved(keys, offset), i > 0);
    }
    end_products();
}
// Of parts of a tile, in order.
template <int first, int end>
__device__ void add_scores(float (&scores)[32], Shared &shared, int tile, int parity) {
    if constexpr (first < end) {
        add_part<first>(scores, shared, tile, parity);
        add_scores<first + 1, end>(scores, shared, tile, parity);
    }
}
// By weights in shared memory, and by those of the thread.
__device__ void begin_sums(float (&sums)[128], Shared &shared, int tile, int half, bool add) {
    Operand weights = by_columns(shared.weights), keys = by_rows(shared.tiles[tile][half * 4]);
    begin_products(sums);
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) multiply(sums, moved(weights, i * 32), moved(keys, i * 16 * 128), add || i > 0);
    end_products();
}
__device__ void begin_sums(float (&sums)[128], unsigned (&weights)[16], Shared &shared, int tile, int half, bool add) {
    Operand keys = by_rows(shared.tiles[tile][half * 4]);
    begin_products(sums, weights);
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) multiply(sums, weights + 4 * i, moved(keys, i * 16 * 128), add || i > 0);
    end_products();
}

// Which keys of a tile there are.
struct Keys {
    int row[2];

    __device__ Keys(const Work &work, int step, int tile) {
        for (int i = 0; i < 2; ++i) row[i] = work.selected(2 * step + tile, i * 32 + threadIdx.x % 32);
    }
};
// Scores in units of the exponent; the largest of each head, `top` too.
__device__ void scale_scores(float (&scores)[32], float (&top)[2], const Keys &keys, float scale) {
    unsigned there[2];
    for (int i = 0; i < 2; ++i) there[i] = __ballot_sync(0xffffffff, keys.row[i] >= 0) >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        int key = i / 4 * 8 + i % 2;
        scores[i] = __fmaf_rn(scale, scores[i], there[key / 32] >> key % 32 & 1 ? 0.0f : NO_SCORE);
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
    }
    for (int head = 0; head < 2; ++head)
        for (int lanes = 2; lanes; lanes /= 2)
            top[head] = fmaxf(top[head], __shfl_xor_sync(0xffffffff, top[head], lanes));
}

// Scores become shares of the softmax, and these weights.
__device__ void take_shares(float (&scores)[32], const float (&top)[2], unsigned (&weights)[16]) {
    float least[2] = {finite(top[0]), finite(top[1])};
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] = exp2_of(scores[i] - least[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i] = halves_of(scores[2 * i], scores[2 * i + 1]);
}
__device__ void store_weights(const unsigned (&weights)[16], unsigned char *to) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
        *(unsigned *)(to + place_of(own_head() + i % 2 * 8, i / 2) + threadIdx.x % 4 * 4) = weights[i];
    publish_to_matrix_unit();
}
// Of a head's shares that the thread has: [head][keys 0-31, keys 32-63].
__device__ float thread_sum(const float (&shares)[32], int head, int half) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float *two = shares + (half * 4 + i) * 4 + head * 2;
        sum = i ? sum + (two[0] + two[1]) : two[0] + two[1];
    }
    return sum;
}
__device__ float sum_of_four_threads(float sum) {
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    return sum + __shfl_xor_sync(0xffffffff, sum, 1);
}
__device__ void rescale(float (&sums)[128], const float (&kept)[2]) {
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] *= kept[i / 2 % 2];
}
// Half of a split's results, dimensions in operand order.
__device__ void store_sums(const Work &work, int step, const float (&sums)[128], int half, const float *total) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int own = own_head() + i * 8, head = work.first_head(step) + own;
        float whole = quotient_of(1.0f, total[own] > 0.0f ? total[own] : 1.0f);
        unsigned short *at = work.partial + work.entry(step, own) * DIMS + half * 256 + threadIdx.x % 4 * 8;
        if (head < work.heads)
#pragma unroll
            for (int part = 0; part < 8; ++part) {
                const float *of = sums + part / 2 * 32 + part % 2 * 4 + i * 2;
                uint4 eight = {halves_of(of[0] * whole, of[1] * whole), halves_of(of[8] * whole, of[9] * whole),
                               halves_of(of[16] * whole, of[17] * whole), halves_of(of[24] * whole, of[25] * whole)};
                *(uint4 *)(at + part * 32) = eight;
            }
    }
}

__device__ void attend_first_tiles(const Work &work, Shared &shared) {
    float scores[32] = {}, sums[128] = {};
    unsigned weights[16];
    int units = 0, head = own_head();
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
        int parity = step % 2;
        Keys keys(work, step, 0);
        if (work.begins_unit(step)) await(&shared.query_filled, units++ % 2);
        add_scores<0, 2>(scores, shared, 0, parity);
        if (step > 0) {
            await(&shared.totals, parity ^ 1);
            store_sums(work, step - 1, sums, 0, shared.total);
        }
        add_scores<2, PARTS>(scores, shared, 0, parity);
        await_products<0>(scores);
        if (work.ends_unit(step)) arrive_as_warp(&shared.query_read);
        float top[2] = {NO_SCORE, NO_SCORE}, kept[2];
        scale_scores(scores, top, keys, work.scale);
        take_shares(scores, top, weights);
        if (step > 0) await(&shared.read[1][0], parity ^ 1);  // the second weights, too, by all warps
        store_weights(weights, shared.weights);
        shared.first_sums[threadIdx.x % 128] = make_float4(thread_sum(scores, 0, 0), thread_sum(scores, 0, 1),
                                                           thread_sum(scores, 1, 0), thread_sum(scores, 1, 1));
        if (threadIdx.x % 4 == 0) shared.first_top[head] = top[0], shared.first_top[head + 8] = top[1];
        arrive_as_warp(&shared.first_weights);
        begin_sums(sums, weights, shared, 0, 0, false);
        await_products<0>(sums);
        arrive_as_warp(&shared.read[0][0]);
        await(&shared.second_weights, parity);
        for (int i = 0; i < 2; ++i) kept[i] = exp2_of(top[i] - finite(shared.top[head + i * 8]));
        rescale(sums, kept);
        begin_sums(sums, shared, 1, 0, true);
        await_products<0>(sums);
        arrive_as_warp(&shared.read[1][0]);
    }
    await(&shared.totals, (work.steps - 1) % 2);
    store_sums(work, work.steps - 1, sums, 0, shared.total);
}

// Makes float16 of a query when it has been copied.
__device__ void fill_query(Shared &shared, int parity) {
    await(&shared.query_copied, parity);
    uint4 *words = (uint4 *)shared.query + threadIdx.x % 128;
    if (BFLOAT16_QUERY)
#pragma unroll 4
        for (int i = 0; i < CHUNKS * 4; ++i) {
            uint4 &eight = words[i * GROUP_THREADS];
            eight = {halves_of_bfloat16(eight.x), halves_of_bfloat16(eight.y), halves_of_bfloat16(eight.z),
                     halves_of_bfloat16(eight.w)};
        }
    publish_to_matrix_unit();
    arrive_as_warp(&shared.query_filled);
}

__device__ void attend_second_tiles(const Work &work, Shared &shared) {
    float scores[32] = {}, sums[128] = {};
    unsigned weights[16];
    int units = 0, head = own_head();
    fill_query(shared, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
        int parity = step % 2;
        Keys keys(work, step, 1);
        if (work.begins_unit(step)) await(&shared.query_filled, units++ % 2);
        add_scores<0, 2>(scores, shared, 1, parity);
        await(&shared.first_weights, parity);
        begin_sums(sums, shared, 0, 1, false);
        await_products<0>(sums);
        arrive_as_warp(&shared.read[0][1]);  // early, so that the next first tile comes while this split ends
        add_scores<2, PARTS>(scores, shared, 1, parity);
        await_products<0>(scores);
        if (work.ends_unit(step)) arrive_as_warp(&shared.query_read);
        float first_top[2] = {shared.first_top[head], shared.first_top[head + 8]};
        float top[2] = {first_top[0], first_top[1]}, kept[2], total[2];
        scale_scores(scores, top, keys, work.scale);
        for (int i = 0; i < 2; ++i) kept[i] = exp2_of(first_top[i] - finite(top[i]));
        take_shares(scores, top, weights);
        await(&shared.read[0][1], parity);  // the first weights, too
        store_weights(weights, shared.weights);
        if (threadIdx.x % 4 == 0) shared.top[head] = top[0], shared.top[head + 8] = top[1];
        arrive_as_warp(&shared.second_weights);
        rescale(sums, kept);
        begin_sums(sums, weights, shared, 1, 1, true);

        float4 first = shared.first_sums[threadIdx.x % 128];
        float before[4] = {first.x, first.y, first.z, first.w};
        for (int i = 0; i < 2; ++i) {
            float halves[2];
            for (int half = 0; half < 2; ++half)
                halves[half] = sum_of_four_threads(
                    __fmaf_rn(before[2 * i + half], kept[i], thread_sum(scores, i, half)));
            total[i] = halves[0] + halves[1];
            int own = head + i * 8;
            if (threadIdx.x % 4 == 0) {
                shared.total[own] = total[i];
                if (work.first_head(step) + own < work.heads) {
                    float *entry = work.softmax + work.entry(step, own) * 2;
                    entry[0] = top[i], entry[1] = total[i];
                }
            }
        }
        arrive_as_warp(&shared.totals);
        await_products<0>(sums);
        arrive_as_warp(&shared.read[1][1]);
        store_sums(work, step, sums, 1, shared.total);  // the warp has the totals of its own heads
        if (step + 1 < work.steps && work.begins_unit(step + 1)) fill_query(shared, units % 2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_rows(const int *selection, const unsigned short *halves, const unsigned short *query_latent,
                   const unsigned short *query_rope, unsigned short *partial, float *softmax, int rows, int heads,
                   int k, float scale) {
    SHARED_MEMORY(Shared, shared);
    Work work = {selection, halves, query_latent, query_rope, partial, softmax, heads, k, scale};
    work.divide(rows);
    if (threadIdx.x == 0) {
        for (int tile = 0; tile < 2; ++tile) {
            for (int part = 0; part < PARTS; ++part) init(&shared.filled[tile][part], GROUP_THREADS);
            for (int half = 0; half < 2; ++half) init(&shared.read[tile][half], GROUP_WARPS);
        }
        init(&shared.query_copied, GROUP_THREADS);
        init(&shared.query_filled, GROUP_WARPS), init(&shared.query_read, 2 * GROUP_WARPS);
        init(&shared.first_weights, GROUP_WARPS), init(&shared.second_weights, GROUP_WARPS);
        init(&shared.totals, GROUP_WARPS);
        publish_arrivals();
    }
    __syncthreads();
    await_kernel_before();
    if (threadIdx.x < GROUP_THREADS) {
        take_registers<MULTIPLIER_REGISTERS>();
        attend_first_tiles(work, shared);
    } else if (threadIdx.x < 2 * GROUP_THREADS) {
        take_registers<MULTIPLIER_REGISTERS>();
        attend_second_tiles(work, shared);
    } else {
        give_registers<FETCHER_REGISTERS>();
        fill_tiles(work, shared);
    }
}
