// The experts' outputs, weighted and added by number. A team has a tile of strips of an expert's down, for the rows that
// chose it; the last team of a tile adds the experts. See teams.cuh.

#include "strip_experts.cuh"
#include "teams.cuh"

struct Shared {
    Team team;
    Chosen experts;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    team_down(const unsigned short *gated, const int *chosen, const float *weights, const unsigned char *values,
              const float *scales, const unsigned char *shared_values, const float *shared_scales, float *out,
              float *partial, int *tickets, int m, int hidden, int inner) {
    SHARED_MEMORY(Shared, shared);
    int tile = blockIdx.x, slot = blockIdx.y, lane = threadIdx.x % 32, blocks = inner / BLOCK;
    int row = tile * COLUMNS + threadIdx.x / 32 * STRIP, place = lane < m ? 0 : -1;
    shared.experts.read(chosen, m);  // whose kernel ended before the one before this began
    if (SHARED && slot == 0) {
        values = shared_values;
        scales = shared_scales;
    } else {
        int number = shared.experts.number(slot - SHARED);
        if (number < 0) return;
        values += (long long)number * hidden * inner;
        scales += (long long)number * ((hidden + BLOCK - 1) / BLOCK) * blocks;
        place = shared.experts.place_of_lane(m, number);
    }
    Member member(shared.team, values, scales, row, hidden, inner);
    member.begin(0, blocks);
    shared.team.open();
    await_kernel_before();
    member.sum(gated + (long long)slot * m * inner, inner, __ballot_sync(~0u, place >= 0), 0, blocks);
    member.each_sum([=](int x_row, int of, float sum) {
        int to = __shfl_sync(~0u, place, x_row);
        if (to >= 0 && row + of < hidden) partial[((long long)x_row * (1 + CHOICES) + to) * hidden + row + of] = sum;
    });
    if (!last_of_blocks(tickets + tile, SHARED + shared.experts.count())) return;
    for (int i = threadIdx.x * 4; i < m * COLUMNS; i += THREADS * 4) {
        int x_row = i / COLUMNS, column = tile * COLUMNS + i % COLUMNS;
        if (column >= hidden) continue;
        const float *from = partial + (long long)x_row * (1 + CHOICES) * hidden + column;
        float4 outputs[1 + CHOICES], result = {};
#pragma unroll
        for (int place = 1 - SHARED; place <= CHOICES; place++)
            outputs[place] = __ldcg((const float4 *)(from + (long long)place * hidden));
#pragma unroll
        for (int place = 1 - SHARED; place <= CHOICES; place++) {
            float4 output = outputs[place];
            float weight = place == 0 ? 1.0f : weights[x_row * CHOICES + place - 1];
            result = make_float4(__fmaf_rn(output.x, weight, result.x), __fmaf_rn(output.y, weight, result.y),
                                 __fmaf_rn(output.z, weight, result.z), __fmaf_rn(output.w, weight, result.w));
        }
        float *to = out + (long long)x_row * hidden + column;
        to[0] = result.x, to[1] = result.y, to[2] = result.z, to[3] = result.w;
    }
}
