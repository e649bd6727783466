// The join of a query row's splits, as compute/kernels/attention.py's _join_kernel makes it: by the warps of a team's blocks
// that multiply, each of them some heads, when all of them have stored all of their splits.
#pragma once

#include "attention_work.cuh"

constexpr int JOINERS = 2 * GROUP_WARPS;  // warps of a block
constexpr int JOINED_HEADS = TEAM ? HEADS / TEAM : HEADS;

__device__ void join_head(const Work &work, int row, int head) {
    int lane = threadIdx.x % 32;
    long long first = (long long)row * SPLITS * work.heads + head;
    uint4 results[SPLITS][2];
#pragma unroll
    for (int i = 0; i < 2 * SPLITS; ++i)
        results[i / 2][i % 2] =
            __ldcg((const uint4 *)(work.partial + (first + i / 2 * work.heads) * DIMS + i % 2 * 256) + lane);
    float2 own = make_float2(NO_SCORE, 0.0f);
    if (lane < SPLITS) own = __ldcg((const float2 *)work.softmax + first + lane * work.heads);
    float best = own.x;
    for (int lanes = 16; lanes; lanes /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffff, best, lanes));
    float share = exp2_of(own.x - finite(best)), total = 0.0f, mean[16] = {};
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) {
        float of_split = __shfl_sync(0xffffffff, share, split), sum = __shfl_sync(0xffffffff, own.y, split);
        float weight = __fmul_rn(of_split, sum);
        total = __fmaf_rn(of_split, sum, total);
#pragma unroll
        for (int i = 0; i < 16; ++i)
            mean[i] = __fmaf_rn(weight, float_of_half(word(results[split][i / 8], i / 2 % 4), i % 2), mean[i]);
    }
    float whole = total > 0.0f ? total : 1.0f;
    float *out = work.out + ((long long)row * work.heads + head) * DIMS + lane / 8 * 64 + lane % 8 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i)  // dimensions were in operand order
        *(float2 *)(out + i / 4 * 256 + i % 4 * 16) =
            make_float2(quotient_of(mean[2 * i], whole), quotient_of(mean[2 * i + 1], whole));
}

// The warp has stored its part of the block's splits of a unit.
__device__ void tell_stored(const Work &work, int step) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) count_stored(work.counts + work.unit(step));
}
__device__ void join(const Work &work, int step) {
    int *count = work.counts + work.unit(step), before = 0;
    if (threadIdx.x % 32 == 0) await_count(count, TEAM * JOINERS), before = atomicAdd(count, 1);
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < JOINED_HEADS; i += JOINERS) {
        int head = work.first_head(step) + blockIdx.x % (TEAM ? TEAM : 1) * JOINED_HEADS + i;
        if (head < work.heads) join_head(work, work.row(step), head);
    }
    if (before == 2 * TEAM * JOINERS - 1) *count = 0;  // nobody awaits it any more: for the next launch
    __syncwarp();
}
