// Sums of products of 5 to 16 rows with e4m3 weights: see compute/kernels/strips.py.
//
// A block of threads is a team. Each warp has a strip and copies its weights for itself, but the rows of x, which would be
// more than those, are copied once for all, into stages of shared memory. The last warp to have read a stage has the next
// block copied there: so the others wait for nothing but what they read, and may be some blocks apart.
//
// Defined by whoever compiles it, too: X_STAGES, blocks of x that a team has room for, at most as many as it has warps.
#pragma once

#include "strip_weights.cuh"

constexpr int GROUPS = ROWS / 8;  // of rows of x: a matrix instruction takes eight
constexpr int COLUMNS = WARPS * STRIP;

struct Row {
    uint4 columns[16], gap;  // so that what eight threads read is in different banks
};
// What a team has in shared memory.
struct Team {
    Operands operands[WARPS][STAGES];
    Row x[X_STAGES][ROWS];
    Arrivals full[X_STAGES];  // of 32 threads' copies
    int left[X_STAGES];       // warps that have read a stage, ever

    __device__ void open() {
        if (threadIdx.x < X_STAGES) {
            init_arrivals(&full[threadIdx.x], 32);
            left[threadIdx.x] = 0;
        }
        __syncthreads();
    }
};

// A warp of a team.
struct Member : Weights<Operands> {
    Team &team;
    float sums[GROUPS][4] = {};

    __device__ Member(Team &team, const unsigned char *values, const float *scales_of_all, int row, int rows, int k)
        : Weights(values, scales_of_all, row, rows, k, team.operands[threadIdx.x / 32]), team(team) {}

    // Have the weights of the first blocks of `first` to `end` - 1 be on their way.
    __device__ void begin(int first, int end) const {
        for (int i = 0; i < STAGES - 1; i++) {
            if (first + i < end) copy(i, first + i);
            end_group_of_copies();
        }
    }
    // Add up blocks `first` to `end` - 1, which were begun, of the rows of x that have a bit in `present`.
    __device__ void sum(const unsigned short *x, long long stride, unsigned present, int first, int end) {
        int warp = threadIdx.x / 32, stage = 0, x_stage = 0, phase = 0;
        if (warp < X_STAGES && first + warp < end) copy_x(warp, x + (first + warp) * BLOCK, stride, present);
        float scale = first < end ? scales[first] : 0.0f;
        for (int block = first; block < end; block++) {
            await_copies<STAGES - 2>();
            int ahead = block + STAGES - 1, free = stage == 0 ? STAGES - 1 : stage - 1;
            if (ahead < end) copy(free, ahead);
            end_group_of_copies();
            float next = scales[min(block + 1, end - 1)];
            await_arrivals(&team.full[x_stage], phase);
            add_block(stages[stage], team.x[x_stage], scale);
            int later = block + X_STAGES;
            if (later < end && last_to_leave(x_stage)) copy_x(x_stage, x + later * BLOCK, stride, present);
            scale = next;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            x_stage = x_stage == X_STAGES - 1 ? 0 : x_stage + 1;
            phase ^= x_stage == 0;
        }
    }
    // `take(row of x, of the strip, sum)` of each.
    template <typename Take>
    __device__ void each_sum(Take take) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < GROUPS * 4; i++)
            take(i / 4 * 8 + lane % 4 * 2 + i % 2, lane / 4 + i / 2 % 2 * 8, sums[i / 4][i % 4]);
    }

private:
    __device__ void copy_x(int stage, const unsigned short *from, long long stride, unsigned present) const {
        int odd = threadIdx.x % 32 / 16, part = threadIdx.x % 16;  // sixteen threads copy a row
        from += odd * stride + part * 8;
        present >>= odd;
#pragma unroll
        for (int row = 0; row < ROWS; row += 2, from += 2 * stride)
            if (present >> row & 1) copy_shared(&team.x[stage][row + odd].columns[part], from);
        arrive_with_copies(&team.full[stage]);
    }
    __device__ bool last_to_leave(int stage) const {
        __syncwarp();
        int before = threadIdx.x % 32 == 0 ? atomicAdd(&team.left[stage], 1) : 0;
        return (__shfl_sync(~0u, before, 0) + 1) % WARPS == 0;
    }
    __device__ void add_block(const Operands &operands, const Row (&x)[ROWS], float scale) {
        int lane = threadIdx.x % 32;
        float part[GROUPS][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 low = operands.low[half][lane], high = operands.high[half][lane], words[GROUPS];
#pragma unroll
            for (int step = 0; step < 4; step++) {
                unsigned a[4];
                bfloat16_of_e4m3(word_of(low, step), a[0], a[2]);
                bfloat16_of_e4m3(word_of(high, step), a[1], a[3]);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    uint4 &own = words[group];
                    if (step % 2 == 0) own = x[group * 8 + lane / 4].columns[half * 8 + lane % 4 * 2 + step / 2];
                    multiply(part[group], a, word_of(own, step % 2 * 2), word_of(own, step % 2 * 2 + 1));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < GROUPS * 4; i++) sums[i / 4][i % 4] = __fmaf_rn(part[i / 4][i % 4], scale, sums[i / 4][i % 4]);
    }
};

// Whether this block is the last of `blocks` to come here; then all that they stored before can be read, past the
// multiprocessor's own cache. The ticket is 0 before and after.
__device__ bool last_of_blocks(int *ticket, int blocks) {
    __syncthreads();  // so that the ticket publishes what all threads of this block wrote
    bool last = __syncthreads_or(threadIdx.x == 0 && take_ticket(ticket) == blocks - 1);
    if (last && threadIdx.x == 0) *ticket = 0;
    return last;
}
// The sum of `splits` times four numbers from the first to the last, `distance` apart.
template <int splits>
__device__ float4 sum_of_splits(const float *from, long long distance) {
    float4 total = {};
#pragma unroll
    for (int split = 0; split < splits; split++) {
        float4 part = __ldcg((const float4 *)(from + split * distance));
        total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
    }
    return total;
}
