// x times a weight: a block of threads has some strips, and for each a warp per split of K. See strips.cuh.
//
// Defined by whoever compiles it, too: SPLITS; FLOAT_OUT, whether the output is float32, else bfloat16.

#include "strips.cuh"

struct Shared {
    Stage stages[WARPS][STAGES];
    Part parts[WARPS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    strip_linear(const unsigned short *x, const unsigned char *values, const float *scales, void *out, long long x_stride,
                 long long out_stride, int m, int n, int k, int split_blocks) {
    SHARED_MEMORY(Shared, shared);
    int warp = threadIdx.x / 32, first_row = blockIdx.x * (WARPS / SPLITS) * STRIP;
    int row = first_row + warp / SPLITS * STRIP, first = warp % SPLITS * split_blocks;
    int end = row < n ? min(first + split_blocks, k / BLOCK) : first;
    Strip strip(values, scales, row, n, k, shared.stages[warp]);
    strip.begin(first, end);
    await_kernel_before();
    strip.multiplied_with(x, x_stride, m);
    strip.sum(shared.parts[warp], first, end);
    __syncthreads();
    constexpr int COLUMNS = WARPS / SPLITS * STRIP;
    for (int i = threadIdx.x; i < m * COLUMNS; i += THREADS) {
        int column = i % COLUMNS, x_row = i / COLUMNS;
        float total = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; split++)
            total += shared.parts[column / STRIP * SPLITS + split][x_row][column % STRIP];
        if (first_row + column >= n) continue;
        long long at = x_row * out_stride + first_row + column;
        if (FLOAT_OUT)
            ((float *)out)[at] = total;
        else
            ((unsigned short *)out)[at] = bfloat16_of(total);
    }
}
