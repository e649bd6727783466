// x times a weight. See panels.cuh.
//
// Defined by whoever compiles it, too: FLOAT_OUT, whether the output is float32, else bfloat16.

#include "panels.cuh"

struct Linear {
    const unsigned char *values;
    const float *scales;
    void *out;
    long long out_stride;
    int m, n, k;

    // The thread's first row of the weight, which the next one follows.
    __device__ static int row(const Tile &tile) {
        return tile.weight * TILE + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
    }
    __device__ Tiles tiles() const { return Tiles((m + ROWS - 1) / ROWS, n); }
    __device__ int first(const Tile &tile) const { return tile.rows * ROWS; }
    __device__ Rows rows(const Tile &tile) const {
        int low = min(row(tile), n - 1), high = min(row(tile) + 1, n - 1);
        const unsigned char *from = values + threadIdx.x % 4 * 16;
        const float *of_tile = scales + (long long)(low / BLOCK) * (k / BLOCK);
        return {from + (long long)low * k, from + (long long)high * k, of_tile, of_tile};
    }
    __device__ void store(const Tile &tile, const float (&sums)[SUMS]) const {
        int column = row(tile), x_row = first(tile) + threadIdx.x % 4 * 2, left = m - x_row;
        if (column >= n) return;  // n is even
        long long at = x_row * out_stride + column;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4, at += 8 * out_stride)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (i * 2 + j >= left) continue;
                if (FLOAT_OUT)
                    *(float2 *)((float *)out + at + j * out_stride) = make_float2(sums[i + j], sums[i + 2 + j]);
                else
                    *(unsigned *)((unsigned short *)out + at + j * out_stride) =
                        bfloat16_pair(sums[i + j], sums[i + 2 + j]);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    panel_linear(const unsigned char *x, const unsigned char *values, const float *scales, void *out, long long out_stride,
                 int m, int n, int k, int x_rows, int split_blocks) {
    SHARED_PANELS(Ring, ring);
    static_assert(sizeof(Ring) <= SHARED_BYTES, "room in shared memory");
    await_kernel_before();
    Linear work{values, scales, out, out_stride, m, n, k};
    Panels<Linear>{ring, work, x, x_rows, k / BLOCK, split_blocks}.run();
}
