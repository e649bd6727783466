// gated[slot, row] = silu(gate(x)) * up(x), of the shared expert and of each that any row chose, of the rows that did. A
// team has strips of gate and the same of up, and a split of K; the last team of a tile adds the splits. See teams.cuh.
//
// Defined by whoever compiles it, too: SPLITS.

#include "strip_experts.cuh"
#include "teams.cuh"

struct Shared {
    Team team;
    Chosen experts;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "room in shared memory");
constexpr int HALF = COLUMNS / 2;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    team_gate_up(const unsigned short *x, const int *chosen, const unsigned char *values, const float *scales,
                 const unsigned char *shared_values, const float *shared_scales, unsigned short *gated, float *partial,
                 int *tickets, int m, int inner, int hidden, int split_blocks) {
    SHARED_MEMORY(Shared, shared);
    int tile = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, slot = blockIdx.y, warp = threadIdx.x / 32;
    int column = tile * HALF, row = warp / (WARPS / 2) * inner + column + warp % (WARPS / 2) * STRIP, rows = 2 * inner;
    int blocks = hidden / BLOCK, first = split * split_blocks, end = min(first + split_blocks, blocks);
    bool of_shared = SHARED && slot == 0;
    if (of_shared) Member(shared.team, shared_values, shared_scales, row, rows, hidden).begin(first, end);
    shared.team.open();
    await_kernel_before();
    unsigned present = (1u << m) - 1;
    if (of_shared) {
        values = shared_values;
        scales = shared_scales;
    } else {
        shared.experts.read(chosen, m);
        int number = shared.experts.number(slot - SHARED);
        if (number < 0) return;
        values += (long long)number * rows * hidden;
        scales += (long long)number * ((rows + BLOCK - 1) / BLOCK) * blocks;
        Member(shared.team, values, scales, row, rows, hidden).begin(first, end);
        present = __ballot_sync(~0u, shared.experts.place_of_lane(m, number) >= 0);
    }
    Member member(shared.team, values, scales, row, rows, hidden);
    member.sum(x, hidden, present, first, end);
    int tiles = inner / HALF, of_all = slot * tiles + tile;
    partial += (long long)of_all * SPLITS * m * COLUMNS;
    member.each_sum([=](int x_row, int of, float sum) {
        if (present >> x_row & 1) partial[(split * m + x_row) * COLUMNS + warp * STRIP + of] = sum;
    });
    if (!last_of_blocks(tickets + of_all, SPLITS)) return;
    for (int i = threadIdx.x * 4; i < m * HALF; i += THREADS * 4) {
        int x_row = i / HALF;
        if (!(present >> x_row & 1)) continue;
        const float *from = partial + x_row * COLUMNS + i % HALF;
        float4 gate = sum_of_splits<SPLITS>(from, m * COLUMNS), up = sum_of_splits<SPLITS>(from + HALF, m * COLUMNS);
        unsigned short *to = gated + ((long long)slot * m + x_row) * inner + column + i % HALF;
        to[0] = bfloat16_of(gated_of(gate.x, up.x));
        to[1] = bfloat16_of(gated_of(gate.y, up.y));
        to[2] = bfloat16_of(gated_of(gate.z, up.z));
        to[3] = bfloat16_of(gated_of(gate.w, up.w));
    }
}
