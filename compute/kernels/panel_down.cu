// outputs[pair] of gated rows, in panels, by their experts' down. See panel_experts.cuh.

#include "panel_experts.cuh"

struct Down {
    const Pairs &pairs;
    Weights weights;
    const int *order;  // the pairs' numbers
    float *outputs;
    int hidden, inner;

    // The thread's first row of the weight, which the next one follows.
    __device__ static int row(const Tile &tile) {
        return tile.weight * TILE + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
    }
    __device__ Tiles tiles() const { return Tiles(pairs.tiles(), hidden); }
    __device__ int first(const Tile &tile) const { return pairs.first(tile.rows, pairs.expert(tile.rows)); }
    __device__ Rows rows(const Tile &tile) const {
        return weights.rows(pairs.expert(tile.rows), hidden, inner, row(tile), row(tile) + 1);
    }
    __device__ void store(const Tile &tile, const float (&sums)[SUMS]) const {
        int column = row(tile), expert = pairs.expert(tile.rows);
        int first_row = pairs.first(tile.rows, expert) + threadIdx.x % 4 * 2;
        int begin = pairs.begin(expert), end = pairs.end(expert);
        if (column >= hidden) return;
        int to[SUMS / 2];
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            int at_row = first_row + i / 2 * 8 + i % 2;
            to[i] = begin <= at_row && at_row < end ? __ldg(order + at_row) : -1;
        }
#pragma unroll
        for (int i = 0; i < SUMS; i += 4)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (to[i / 2 + j] >= 0)
                    *(float2 *)(outputs + (long long)to[i / 2 + j] * hidden + column) =
                        make_float2(sums[i + j], sums[i + 2 + j]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    panel_down(const unsigned char *gated, const int *order, const int *ends, const unsigned char *values,
               const float *scales, const unsigned char *shared_values, const float *shared_scales, float *outputs,
               int hidden, int inner, int x_rows, int split_blocks) {
    SHARED_PANELS(Shared, shared);
    await_kernel_before();
    shared.pairs.read(ends);
    Down work{shared.pairs, {values, scales, shared_values, shared_scales}, order, outputs, hidden, inner};
    Panels<Down>{shared.ring, work, gated, x_rows, inner / BLOCK, split_blocks}.run();
}
