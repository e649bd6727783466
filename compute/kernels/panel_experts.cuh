// Which rows experts have: pairs of a row and one of its choices, sorted by expert. See panels.py.
//
// Defined by whoever compiles it, too: COUNT of experts; the shared one, if there is one, is behind them.
#pragma once

#include "panels.cuh"

class Pairs {
    int ends[COUNT + 1], tile_ends[COUNT + 1];
    static_assert(COUNT < THREADS, "a thread for each expert");

public:
    // To be called by all threads of the block.
    __device__ void read(const int *ends_of_all) {
        int expert = threadIdx.x, tiles = 0;
        if (expert <= COUNT) ends[expert] = __ldcg(ends_of_all + expert);
        __syncthreads();
        if (expert <= COUNT && begin(expert) < ends[expert])
            tiles = (ends[expert] - begin(expert) / 8 * 8 + ROWS - 1) / ROWS;
        if (expert <= COUNT) tile_ends[expert] = tiles;
        __syncthreads();
        if (expert <= COUNT)
            for (int i = 0; i < expert; i++) tiles += tile_ends[i];
        __syncthreads();
        if (expert <= COUNT) tile_ends[expert] = tiles;
        __syncthreads();
    }
    __device__ int tiles() const { return tile_ends[COUNT]; }
    // Whose a tile of rows is.
    __device__ int expert(int tile) const {
        int low = 0, high = COUNT;
        while (low < high) {
            int middle = (low + high) / 2;
            if (tile_ends[middle] > tile)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }
    // An expert's pairs.
    __device__ int begin(int expert) const { return expert == 0 ? 0 : ends[expert - 1]; }
    __device__ int end(int expert) const { return ends[expert]; }
    // The tile's first row, a multiple of 8, which may be an expert's before.
    __device__ int first(int tile, int expert) const {
        return begin(expert) / 8 * 8 + (tile - (expert == 0 ? 0 : tile_ends[expert - 1])) * ROWS;
    }
};
struct Shared {
    Ring ring;
    Pairs pairs;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");

// Where the experts' weights of `n` rows and `k` columns are.
struct Weights {
    const unsigned char *values;
    const float *scales;
    const unsigned char *shared_values;
    const float *shared_scales;

    __device__ Rows rows(int expert, int n, int k, int low, int high) const {
        low = min(low, n - 1), high = min(high, n - 1);
        long long columns = k / BLOCK, scales_of_one = (n + BLOCK - 1) / BLOCK * columns;
        const unsigned char *from = expert == COUNT ? shared_values : values + (long long)expert * n * k;
        const float *its_scales = expert == COUNT ? shared_scales : scales + expert * scales_of_one;
        from += threadIdx.x % 4 * 16;
        return {from + (long long)low * k, from + (long long)high * k, its_scales + low / BLOCK * columns,
                its_scales + high / BLOCK * columns};
    }
};
