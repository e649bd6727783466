// x times a weight: a team has a tile of strips and a split of K; the last team of a tile adds the splits. See teams.cuh.
//
// Defined by whoever compiles it, too: SPLITS; FLOAT_OUT, whether the output is float32, else bfloat16.

#include "teams.cuh"

static_assert(sizeof(Team) <= SHARED_BYTES, "room in shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    team_linear(const unsigned short *x, const unsigned char *values, const float *scales, void *out, float *partial,
                int *tickets, long long x_stride, long long out_stride, int m, int n, int k, int split_blocks) {
    SHARED_MEMORY(Team, team);
    int tile = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, warp = threadIdx.x / 32;
    int first = split * split_blocks, end = min(first + split_blocks, k / BLOCK);
    Member member(team, values, scales, tile * COLUMNS + warp * STRIP, n, k);
    member.begin(first, end);
    team.open();
    await_kernel_before();
    member.sum(x, x_stride, (1u << m) - 1, first, end);
    partial += (long long)tile * SPLITS * m * COLUMNS;
    member.each_sum([=](int x_row, int of, float sum) {
        if (x_row < m) partial[(split * m + x_row) * COLUMNS + warp * STRIP + of] = sum;
    });
    if (!last_of_blocks(tickets + tile, SPLITS)) return;
    for (int i = threadIdx.x * 4; i < m * COLUMNS; i += THREADS * 4) {
        float4 total = sum_of_splits<SPLITS>(partial + i, m * COLUMNS);
        float totals[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int column = tile * COLUMNS + i % COLUMNS + j;
            long long at = i / COLUMNS * out_stride + column;
            if (column >= n) continue;
            if (FLOAT_OUT)
                ((float *)out)[at] = totals[j];
            else
                ((unsigned short *)out)[at] = bfloat16_of(totals[j]);
        }
    }
}
