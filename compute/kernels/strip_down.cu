// The experts' outputs, weighted and added by number. A block of threads has a strip of every expert's down; its warps
// take turns with the experts. See strip_experts.cuh.

#include "strip_experts.cuh"
#include "strips.cuh"

struct Shared {
    Stage stages[WARPS][STAGES];
    Part parts[WARPS];
    float outputs[ROWS][1 + CHOICES][STRIP];
    Chosen experts;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    strip_down(const unsigned short *gated, const int *chosen, const float *weights, const unsigned char *values,
               const float *scales, const unsigned char *shared_values, const float *shared_scales, float *out, int m,
               int hidden, int inner) {
    SHARED_MEMORY(Shared, shared);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * STRIP, blocks = inner / BLOCK;
    long long scales_of_one = (long long)((hidden + BLOCK - 1) / BLOCK) * blocks;
    shared.experts.read(chosen, m);  // whose kernel ended before the one before this began
    for (int slot = warp;; slot += WARPS) {
        bool of_shared = SHARED && slot == 0;
        int number = of_shared ? 0 : shared.experts.number(slot - SHARED), own = max(number, 0);
        Strip strip(of_shared ? shared_values : values + (long long)own * hidden * inner,
                    of_shared ? shared_scales : scales + own * scales_of_one, row, hidden, inner, shared.stages[warp]);
        if (number >= 0) strip.begin(0, blocks);
        if (slot == warp) await_kernel_before();
        if (number < 0) break;
        strip.multiplied_with(gated + (long long)slot * m * inner, inner, m);
        strip.sum(shared.parts[warp], 0, blocks);
        __syncwarp();
        for (int i = lane; i < m * STRIP; i += 32) {
            int x_row = i / STRIP, of = i % STRIP, place = of_shared ? 0 : shared.experts.place(x_row, number);
            if (place >= 0) shared.outputs[x_row][place][of] = shared.parts[warp][x_row][of];
        }
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < m * STRIP; i += THREADS) {
        int x_row = i / STRIP, of = i % STRIP;
        float result = 0.0f;
        if (SHARED) result += shared.outputs[x_row][0][of];
#pragma unroll
        for (int choice = 0; choice < CHOICES; choice++)
            result = __fmaf_rn(shared.outputs[x_row][1 + choice][of], weights[x_row * CHOICES + choice], result);
        if (row + of < hidden) out[(long long)x_row * hidden + row + of] = result;
    }
}
