// gated[slot, row] = silu(gate(x)) * up(x), of the shared expert and of each that any row chose. A block of threads has
// a strip of gate and the same of up, and for each a warp per split of K. See strip_experts.cuh.
//
// Defined by whoever compiles it, too: SPLITS.

#include "strip_experts.cuh"
#include "strips.cuh"

struct Shared {
    Stage stages[WARPS][STAGES];
    Part parts[WARPS];
    Chosen experts;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");
static_assert(WARPS == 2 * SPLITS, "a warp for each split of gate and of up");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    strip_gate_up(const unsigned short *x, const int *chosen, const unsigned char *values, const float *scales,
                  const unsigned char *shared_values, const float *shared_scales, unsigned short *gated, int m, int inner,
                  int hidden, int split_blocks) {
    SHARED_MEMORY(Shared, shared);
    int warp = threadIdx.x / 32, column = blockIdx.x * STRIP, row = warp / SPLITS * inner + column, rows = 2 * inner;
    int slot = blockIdx.y, blocks = hidden / BLOCK;
    int first = warp % SPLITS * split_blocks, end = min(first + split_blocks, blocks);
    bool of_shared = SHARED && slot == 0;
    if (of_shared) {
        values = shared_values;
        scales = shared_scales;
        Strip(values, scales, row, rows, hidden, shared.stages[warp]).begin(first, end);
    }
    await_kernel_before();
    if (!of_shared) {
        shared.experts.read(chosen, m);
        int number = shared.experts.number(slot - SHARED);
        if (number < 0) return;
        values += (long long)number * rows * hidden;
        scales += (long long)number * ((rows + BLOCK - 1) / BLOCK) * blocks;
    }
    Strip strip(values, scales, row, rows, hidden, shared.stages[warp]);
    if (!of_shared) strip.begin(first, end);
    strip.multiplied_with(x, hidden, m);
    strip.sum(shared.parts[warp], first, end);
    __syncthreads();
    for (int i = threadIdx.x; i < m * STRIP; i += THREADS) {
        int x_row = i / STRIP, of = i % STRIP;
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            gate += shared.parts[split][x_row][of];
            up += shared.parts[SPLITS + split][x_row][of];
        }
        gated[((long long)slot * m + x_row) * inner + column + of] = bfloat16_of(gated_of(gate, up));
    }
}
