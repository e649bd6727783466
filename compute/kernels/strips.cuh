// Sums of products of a few rows with e4m3 weights: see compute/kernels/strips.py.
//
// A warp has a strip, or a split of K of it, and there is no barrier until that is summed. Each thread copies its own
// operands of the rows of x, too: 8 rows at most.
#pragma once

#include "strip_weights.cuh"

constexpr int LANES = 4 * ROWS;  // that have rows of x: lane 4 * row and the three behind it

struct Stage : Operands {
    uint4 x[2][2][LANES];
};
typedef float Part[ROWS][STRIP];

// What a warp sums: 16 rows of a weight, times the rows of x.
struct Strip : Weights<Stage> {
    const unsigned short *x = nullptr;  // the thread's first column of row `lane / 4`, or null if there is none

    using Weights::Weights;

    __device__ void copy_x(int stage, int block) const {
        if (x == nullptr) return;
        int lane = threadIdx.x % 32;
        for (int part = 0; part < 4; part++)
            copy_shared(&stages[stage].x[part / 2][part % 2][lane], x + block * BLOCK + part / 2 * 64 + part % 2 * 8);
    }
    // Have the weights of the first blocks of `first` to `end` - 1 be on their way.
    __device__ void begin(int first, int end) const {
        for (int i = 0; i < STAGES - 1; i++)
            if (first + i < end) copy(i, first + i);
    }
    __device__ void multiplied_with(const unsigned short *rows, long long stride, int count) {
        int lane = threadIdx.x % 32;
        if (lane / 4 < count) x = rows + lane / 4 * stride + lane % 4 * 16;
    }
    // Add up blocks `first` to `end` - 1, which were begun.
    __device__ void sum(Part &to, int first, int end) const {
        for (int i = 0; i < STAGES - 1; i++) {
            if (first + i < end) copy_x(i, first + i);
            end_group_of_copies();
        }
        int stage = 0;
        float sums[4] = {}, scale = first < end ? scales[first] : 0.0f;
        for (int block = first; block < end; block++) {
            await_copies<STAGES - 2>();
            int ahead = block + STAGES - 1, free = stage == 0 ? STAGES - 1 : stage - 1;
            if (ahead < end) {
                copy(free, ahead);
                copy_x(free, ahead);
            }
            end_group_of_copies();
            float next = scales[min(block + 1, end - 1)];
            add_block(sums, stages[stage], scale);
            scale = next;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (lane % 4 * 2 + i % 2 < ROWS) to[lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sums[i];
    }

private:
    __device__ void add_block(float (&sums)[4], const Stage &stage, float scale) const {
        int lane = threadIdx.x % 32;
        float part[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 low = stage.low[half][lane], high = stage.high[half][lane], words[2] = {};
            if (x != nullptr) {
                words[0] = stage.x[half][0][lane];
                words[1] = stage.x[half][1][lane];
            }
#pragma unroll
            for (int step = 0; step < 4; step++) {
                unsigned a[4];
                bfloat16_of_e4m3(word_of(low, step), a[0], a[2]);
                bfloat16_of_e4m3(word_of(high, step), a[1], a[3]);
                multiply(part, a, word_of(words[step / 2], step % 2 * 2), word_of(words[step / 2], step % 2 * 2 + 1));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = __fmaf_rn(part[i], scale, sums[i]);
    }
};
