// Sums of strips of e4m3 weights. Each thread copies its own operands of the matrix instruction to shared memory, some
// blocks of 128 columns ahead, where no other thread reads them. (Loads into registers would not do: what waits for one
// of them waits for those behind it, too.) The order of columns is that of compute/kernels/triton_products.py, so that
// sums have the bits of its kernels.
//
// Defined by whoever compiles it, too: STAGES, blocks of columns that a warp has room for.
#pragma once

#include "strips.cuh"

constexpr int BLOCK = 128;
constexpr int LANES = 4 * ROWS;  // that have rows of x: lane 4 * row and the three behind it

// Four bytes of e4m3 as bfloat16, exactly: compute/kernels/ptx.py says how.
__device__ void bfloat16_of_e4m3(unsigned word, unsigned &low, unsigned &high) {
    asm("{ .reg .b32 a, b, c, d, factors;\n"
        "mov.b32 factors, 0x7b807b80;\n"
        "prmt.b32 a, %2, 0, 0x4140;\n"
        "prmt.b32 b, %2, 0, 0x4342;\n"
        "and.b32 c, a, 0x00800080;\n"
        "and.b32 d, b, 0x00800080;\n"
        "shl.b32 a, a, 4;\n"
        "shl.b32 b, b, 4;\n"
        "mad.lo.u32 c, c, 0xf0, a;\n"
        "mad.lo.u32 d, d, 0xf0, b;\n"
        "mul.rn.bf16x2 %0, c, factors;\n"
        "mul.rn.bf16x2 %1, d, factors; }"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

__device__ void copy_row(uint4 *to, const unsigned short *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
__device__ void end_copies_of_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until the copies of all stages but the last STAGES - 2 are done.
__device__ void await_stage() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }

// A thread's operands of one block: of its rows, columns 0 to 63 and 64 to 127.
struct Stage {
    uint4 low[2][32], high[2][32];
    uint4 x[2][2][LANES];
};
static_assert(SHARED_BYTES == WARPS * STAGES * sizeof(Stage), "room for the stages");

// What a warp sums: 16 rows of a weight, times the rows of x.
struct Strip {
    const unsigned char *low, *high;  // the thread's first column of the rows `lane / 4` and that plus 8
    const float *scales;              // of the strip's row of blocks
    const unsigned short *x;          // the thread's first column of row `lane / 4`, or null if there is none

    __device__ Strip(const unsigned char *values, const float *scales_of_all, int row, int rows, int k) : x(nullptr) {
        int lane = threadIdx.x % 32, last = rows - 1;
        low = values + (long long)min(row + lane / 4, last) * k + lane % 4 * 16;
        high = values + (long long)min(row + lane / 4 + 8, last) * k + lane % 4 * 16;
        scales = scales_of_all + (long long)(min(row, last) / BLOCK) * (k / BLOCK);
    }
    __device__ void multiplied_with(const unsigned short *rows, long long stride, int count) {
        int lane = threadIdx.x % 32;
        if (lane / 4 < count) x = rows + lane / 4 * stride + lane % 4 * 16;
    }
    __device__ void copy(Stage &stage, int block) const {
        int lane = threadIdx.x % 32;
        for (int half = 0; half < 2; half++) {
            copy_ahead(&stage.low[half][lane], low + block * BLOCK + half * 64);
            copy_ahead(&stage.high[half][lane], high + block * BLOCK + half * 64);
        }
    }
    __device__ void copy_x(Stage &stage, int block) const {
        if (x == nullptr) return;
        int lane = threadIdx.x % 32;
        for (int part = 0; part < 4; part++)
            copy_row(&stage.x[part / 2][part % 2][lane], x + block * BLOCK + part / 2 * 64 + part % 2 * 8);
    }
};

__device__ Stage *stages_of_warp() {
    extern __shared__ __align__(16) char memory[];
    return (Stage *)memory + threadIdx.x / 32 * STAGES;
}

__device__ unsigned word_of(const uint4 &words, int number) {
    return number == 0 ? words.x : number == 1 ? words.y : number == 2 ? words.z : words.w;
}

__device__ void add_block(float (&sums)[4], const Strip &strip, const Stage &stage, float scale) {
    int lane = threadIdx.x % 32;
    float part[4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 low = stage.low[half][lane], high = stage.high[half][lane], x[2] = {};
        if (strip.x != nullptr) {
            x[0] = stage.x[half][0][lane];
            x[1] = stage.x[half][1][lane];
        }
#pragma unroll
        for (int step = 0; step < 4; step++) {
            unsigned a[4];
            bfloat16_of_e4m3(word_of(low, step), a[0], a[2]);
            bfloat16_of_e4m3(word_of(high, step), a[1], a[3]);
            const uint4 &words = x[step / 2];
            multiply(part, a, word_of(words, step % 2 * 2), word_of(words, step % 2 * 2 + 1));
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = __fmaf_rn(part[i], scale, sums[i]);
}

// Have the weights of the first blocks of `first` to `end` - 1 be on their way.
__device__ void begin_strip(const Strip &strip, int first, int end) {
    Stage *stages = stages_of_warp();
    for (int i = 0; i < STAGES - 1; i++)
        if (first + i < end) strip.copy(stages[i], first + i);
}

// Add up blocks `first` to `end` - 1, which were begun.
__device__ void sum_strip(float (&sums)[4], const Strip &strip, int first, int end) {
    Stage *stages = stages_of_warp();
    for (int i = 0; i < STAGES - 1; i++) {
        if (first + i < end) strip.copy_x(stages[i], first + i);
        end_copies_of_stage();
    }
    int stage = 0;
    float scale = first < end ? __ldg(strip.scales + first) : 0.0f;
    for (int block = first; block < end; block++) {
        await_stage();
        int before = stage == 0 ? STAGES - 1 : stage - 1;
        if (block + STAGES - 1 < end) {
            strip.copy(stages[before], block + STAGES - 1);
            strip.copy_x(stages[before], block + STAGES - 1);
        }
        end_copies_of_stage();
        float next = __ldg(strip.scales + min(block + 1, end - 1));
        add_block(sums, strip, stages[stage], scale);
        scale = next;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
}
