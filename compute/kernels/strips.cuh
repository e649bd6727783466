// Sums of products of a few rows with e4m3 weights: see compute/kernels/strips.py.
//
// A warp has a strip, 16 rows of a weight, or a split of K of it, and there is no barrier until that is summed. Each thread
// copies its own operands of the matrix instruction to shared memory, some blocks of 128 columns ahead, where no other
// thread reads them. (Loads into registers would not do: what waits for one of them waits for those behind it, too.) The
// order of columns is that of compute/kernels/triton_products.py, so that sums have the bits of its kernels.
//
// Defined by whoever compiles it: ROWS, room for the rows of x, 8 at most; THREADS; STAGES, blocks of columns that a warp
// has room for; SHARED_BYTES, dynamic shared memory.
#pragma once

#include "strip_words.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int BLOCKS_PER_SM = 1024 / THREADS;  // at least: 64 registers for a thread
constexpr int STRIP = 16;
constexpr int BLOCK = 128;
constexpr int LANES = 4 * ROWS;  // that have rows of x: lane 4 * row and the three behind it

// The threads' operands of one block: of their rows, columns 0 to 63 and 64 to 127.
struct Stage {
    uint4 low[2][32], high[2][32];
    uint4 x[2][2][LANES];
};
typedef float Part[ROWS][STRIP];

// What a warp sums: 16 rows of a weight, times the rows of x.
struct Strip {
    const unsigned char *low, *high;  // the thread's first column of the rows `lane / 4` and that plus 8
    const float *scales;              // of the strip's row of blocks
    const unsigned short *x;          // the thread's first column of row `lane / 4`, or null if there is none
    Stage *stages;                    // of the warp

    __device__ Strip(const unsigned char *values, const float *scales_of_all, int row, int rows, int k, Stage *stages)
        : x(nullptr), stages(stages) {
        int lane = threadIdx.x % 32, last = rows - 1;
        low = values + (long long)min(row + lane / 4, last) * k + lane % 4 * 16;
        high = values + (long long)min(row + lane / 4 + 8, last) * k + lane % 4 * 16;
        scales = scales_of_all + (long long)(min(row, last) / BLOCK) * (k / BLOCK);
    }
    __device__ void copy(int stage, int block) const {
        int lane = threadIdx.x % 32;
        for (int half = 0; half < 2; half++) {
            copy_once(&stages[stage].low[half][lane], low + block * BLOCK + half * 64);
            copy_once(&stages[stage].high[half][lane], high + block * BLOCK + half * 64);
        }
    }
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
    __device__ static unsigned word_of(const uint4 &words, int number) {
        return number == 0 ? words.x : number == 1 ? words.y : number == 2 ? words.z : words.w;
    }
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
