// What the warpgroups of attention_rows.cu share: its shared memory, and which splits are whose.
#pragma once

#include "attention_words.cuh"

#define NO_SCORE __int_as_float(0xff800000)  // minus infinity

constexpr int HEADS = 64, TILE = 64, SPLIT = 2 * TILE, DIMS = 512, ROPE_DIMS = 64;
constexpr int ROW_BYTES = (DIMS + ROPE_DIMS) * 2;
constexpr int CHUNK = 64 * 128, CHUNKS = ROW_BYTES / 128;  // 64 rows of 64 float16, swizzled; the last: ropes
constexpr int GROUP_THREADS = 128, GROUP_WARPS = 4;
static_assert(THREADS == 3 * GROUP_THREADS, "three warpgroups");

// A tile comes in parts: in the order that scores are made in, ropes and then dimensions. Two parts have one half of
// the sums' dimensions.
constexpr int PARTS = 4;
__device__ constexpr int chunk_of(int i) { return (i + CHUNKS - 1) % CHUNKS; }
__device__ constexpr int first_of(int part) { return part ? 2 * part + 1 : 0; }

struct alignas(1024) Shared {
    unsigned char query[CHUNKS][CHUNK], tiles[2][CHUNKS][CHUNK], weights[CHUNK];
    float4 first_sums[GROUP_THREADS];
    float first_top[HEADS], top[HEADS], total[HEADS];
    Arrivals filled[2][PARTS], read[2][2];  // [tile][part], [tile][half]
    Arrivals query_copied, query_filled, query_read, first_weights, second_weights, totals;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");

__device__ int fetcher() { return threadIdx.x - 2 * GROUP_THREADS; }

// A unit is a query row and 64 heads: those of a row follow each other. A block has a run of the splits of all units,
// and does them step by step.
struct Work {
    const int *selection;
    const unsigned short *halves, *query_latent, *query_rope;
    unsigned short *partial;
    float *softmax;
    int heads, k;
    float scale;
    long long first;
    int steps;

    __device__ void divide(int rows) {
        long long all = (long long)rows * BLOCKS * SPLITS;
        first = all * blockIdx.x / gridDim.x, steps = all * (blockIdx.x + 1) / gridDim.x - first;
    }
    __device__ int unit(int step) const { return (first + step) / SPLITS; }
    __device__ int split(int step) const { return (first + step) % SPLITS; }
    __device__ bool begins_unit(int step) const { return step == 0 || split(step) == 0; }
    __device__ bool ends_unit(int step) const { return split(step) == SPLITS - 1; }
    __device__ int row(int step) const { return unit(step) / BLOCKS; }
    __device__ int first_head(int step) const { return unit(step) % BLOCKS * HEADS; }
    // Where a split's result of one of the unit's heads is.
    __device__ long long entry(int step, int head) const {
        return ((long long)row(step) * SPLITS + split(step)) * heads + first_head(step) + head;
    }
    // Which row a tile's key is; -1 where empty.
    __device__ int selected(int number, int of_tile) const {
        int step = number / 2, key = split(step) * SPLIT + number % 2 * TILE + of_tile;
        return step < steps && key < k ? selection[(long long)row(step) * k + key] : -1;
    }
    // The first 16 bytes that a thread copies of each of its rows of a tile; 0 where empty.
    __device__ void load_starts(int number, long long (&starts)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = selected(number, i * 16 + fetcher() / 8);
            starts[i] = row < 0 ? 0 : (long long)halves + (long long)row * ROW_BYTES + fetcher() % 8 * 16;
        }
    }
};

__device__ void arrive_as_warp(Arrivals *own) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(own);
}
__device__ int place_of(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
// The first of the two heads of the thread, in [0, 64); the second is 8 more.
__device__ int own_head() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

__device__ unsigned halves_of_bfloat16(unsigned two) {
    return halves_of(__int_as_float(two << 16), __int_as_float(two & 0xffff0000));
}
__device__ float finite(float top) { return top > NO_SCORE ? top : 0.0f; }
