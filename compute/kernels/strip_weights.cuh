// A warp's strip, 16 rows of an e4m3 weight, on its way to the matrix instruction: see strips.cuh and teams.cuh.
//
// Each thread copies its own operands to shared memory, some blocks of 128 columns ahead, where no other thread reads them.
// (Loads into registers would not do: what waits for one of them waits for those behind it, too.) The order of columns is
// that of compute/kernels/triton_products.py, so that sums have the bits of its kernels.
//
// Defined by whoever compiles it: ROWS, room for the rows of x; THREADS; STAGES, blocks of columns that a warp has room for;
// SHARED_BYTES, dynamic shared memory.
#pragma once

#include "strip_words.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int BLOCKS_PER_SM = 1024 / THREADS;  // at least: 64 registers for a thread
constexpr int STRIP = 16;
constexpr int BLOCK = 128;

// The threads' operands of one block: of their rows, columns 0 to 63 and 64 to 127.
struct Operands {
    uint4 low[2][32], high[2][32];
};

template <typename Stage>
struct Weights {
    const unsigned char *low, *high;  // the thread's first column of the rows `lane / 4` and that plus 8
    const float *scales;              // of the strip's row of blocks
    Stage *stages;                    // of the warp

    __device__ Weights(const unsigned char *values, const float *scales_of_all, int row, int rows, int k, Stage *stages)
        : stages(stages) {
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
    __device__ static unsigned word_of(const uint4 &words, int number) {
        return number == 0 ? words.x : number == 1 ? words.y : number == 2 ? words.z : words.w;
    }
};
