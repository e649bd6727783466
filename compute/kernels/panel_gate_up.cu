// gated[pair] = silu(gate(x)) * up(x), in panels as x. A thread's two rows of the weight are a row of gate and the same of
// up. See panel_experts.cuh.

#include "panel_experts.cuh"

struct GateUp {
    const Pairs &pairs;
    Weights weights;
    unsigned short *gated;
    int inner, hidden, x_rows;

    __device__ Tiles tiles() const { return Tiles(pairs.tiles(), 2 * inner); }
    __device__ int first(const Tile &tile) const { return pairs.first(tile.rows, pairs.expert(tile.rows)); }
    // The warp's eight rows of gate are a word of 16 bytes in operand order.
    __device__ Rows rows(const Tile &tile) const {
        int warp = threadIdx.x / 32, of_eight = threadIdx.x % 32 / 4;
        int row = tile.weight * (TILE / 2) + of_eight / 2 * 16 + warp / 2 * 4 + warp % 2 * 2 + of_eight % 2;
        return weights.rows(pairs.expert(tile.rows), 2 * inner, hidden, row, inner + row);
    }
    __device__ void store(const Tile &tile, const float (&sums)[SUMS]) const {
        int warp = threadIdx.x / 32, expert = pairs.expert(tile.rows);
        int first_row = pairs.first(tile.rows, expert) + threadIdx.x % 4 * 2;
        int begin = pairs.begin(expert) - first_row, end = pairs.end(expert) - first_row;
        if (tile.weight * (TILE / 2) >= inner) return;
        unsigned short *to = gated + ((long long)tile.weight * x_rows + first_row) * 64 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            unsigned short *word = to + j * 64 + (warp ^ (first_row + j) % 8) * 8;
#pragma unroll
            for (int i = 0; i < SUMS; i += 4)
                if (begin <= i * 2 + j && i * 2 + j < end)
                    word[i * 2 * 64] = bfloat16_of(gated_of(sums[i + j], sums[i + 2 + j]));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    panel_gate_up(const unsigned char *x, const int *ends, const unsigned char *values, const float *scales,
                  const unsigned char *shared_values, const float *shared_scales, unsigned short *gated, int inner,
                  int hidden, int x_rows, int split_blocks) {
    SHARED_PANELS(Shared, shared);
    await_kernel_before();
    shared.pairs.read(ends);
    GateUp work{shared.pairs, {values, scales, shared_values, shared_scales}, gated, inner, hidden, x_rows};
    Panels<GateUp>{shared.ring, work, x, x_rows, hidden / BLOCK, split_blocks}.run();
}
