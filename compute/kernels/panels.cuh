// Sums of products of many rows with e4m3 weights: see compute/kernels/panels.py.
//
// A tile is 128 rows of a weight times ROWS of x. Two warp groups have 64 rows of the weight each, and take turns with the
// matrix unit. A thread copies its own operands of them to shared memory some blocks of 128 columns ahead, where no other
// thread reads them, and converts half a block of them while the matrix unit has the half before. A third warp group's
// first thread copies x, of which the blocks of a cluster, with neighbouring tiles of the weight, each bring a part to all.
//
// x is in panels: for each 64 columns, in operand order, rows of 128 bytes, as `begin_products` wants them.
//
// Defined by whoever compiles it: ROWS; STAGES, blocks of columns of x, and WEIGHT_STAGES, of the weight, that there is
// room for; SPLIT, whether K is cut in splits; CLUSTER; NEAR, tiles of rows that are done at a time; THREADS, 384;
// SHARED_BYTES, dynamic shared memory.
#pragma once

#include "panel_words.cuh"

constexpr int BLOCK = 128;
constexpr int TILE = 128;
constexpr int CONSUMERS = 256;
constexpr int WARPS = CONSUMERS / 32;
constexpr int SUMS = ROWS / 2;
static_assert(THREADS == CONSUMERS + 128, "two warp groups and one that copies");

struct Ring {
    unsigned char x[STAGES][2][ROWS][128];
    uint4 weight[WEIGHT_STAGES][2][2][CONSUMERS];  // halves of a block's columns; the thread's two rows
    float4 splits[SPLIT ? SUMS / 8 : 1][CONSUMERS];
    Barrier full[STAGES], empty[STAGES];

    // To be called by all threads of the cluster.
    __device__ void init() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) {
                init_barrier(&full[i], 1);
                init_barrier(&empty[i], WARPS * CLUSTER);
            }
            publish_barriers();
        }
        if (CLUSTER > 1) cluster_barrier();
        __syncthreads();
    }
};
// A place in a ring, and how often that has been gone round.
template <int count>
struct Place {
    int stage = 0, round = 0;
    __device__ void next() {
        if (++stage == count) stage = 0, round++;
    }
};
// Of rows of x and rows of the weight.
struct Tile {
    int rows, weight;
};
// The cluster's tiles, such that clusters of one time share what they read.
struct Tiles {
    int row_tiles, pairs;  // of this block's tile of the weight with its neighbours'
    __device__ Tiles(int row_tiles, int weight_rows)
        : row_tiles(row_tiles), pairs((weight_rows + TILE * CLUSTER - 1) / (TILE * CLUSTER)) {}
    __device__ static int first() { return blockIdx.x / CLUSTER; }
    __device__ static int step() { return gridDim.x / CLUSTER; }
    __device__ int end() const { return row_tiles * pairs; }
    __device__ Tile operator[](int number) const {
        int group = number / (NEAR * pairs), place = number % (NEAR * pairs), near = min(row_tiles - group * NEAR, NEAR);
        return {group * NEAR + place % near, place / near * CLUSTER + int(rank_in_cluster())};
    }
};
// What a thread has of a tile of the weight: two rows, from its first column, and their scales.
struct Rows {
    const unsigned char *low, *high;
    const float *low_scales, *high_scales;
};

// Of tiles of `work`, which says what they consist of:
// tiles(); first(tile), its first row of x, a multiple of 8; rows(tile); store(tile, sums).
template <typename Work>
struct Panels {
    Ring &ring;
    const Work &work;
    const unsigned char *x;
    int x_rows, blocks, split_blocks;

    __device__ void run() const {
        ring.init();
        if (threadIdx.x >= CONSUMERS) {
            have_fewer_registers<40>();
            if (threadIdx.x == CONSUMERS) copy_x();
        } else {
            have_more_registers<232>();
            consume();
        }
        if (CLUSTER > 1) cluster_barrier();  // as others may still write to this block's shared memory
    }

private:
    __device__ void copy_x() const {
        Tiles tiles = work.tiles();
        Place<STAGES> place;
        for (int number = tiles.first(); number < tiles.end(); number += tiles.step()) {
            int first = work.first(tiles[number]), bytes = min(ROWS, x_rows - first) * 128;
            for (int block = 0; block < blocks; block++, place.next()) {
                Barrier *full = &ring.full[place.stage];
                await_phase(&ring.empty[place.stage], place.round % 2 ^ 1);
                arrive_expecting(full, 2 * bytes);
                for (int half = rank_in_cluster(); half < 2; half += CLUSTER)
                    copy_to_cluster<CLUSTER>(ring.x[place.stage][half],
                                             x + ((block * 2 + half) * (long long)x_rows + first) * 128, bytes, full);
            }
        }
    }

    // Copies of a thread's operands, tile after tile.
    struct Copies {
        const unsigned char *low = nullptr, *high = nullptr;
        int number, block = 0;
        __device__ explicit Copies(int number) : number(number) {}

        __device__ void next(const Panels &of, const Tiles &tiles, uint4 (&to)[2][2][CONSUMERS]) {
            if (number < tiles.end()) {
                if (block == 0) {
                    Rows rows = of.work.rows(tiles[number]);
                    low = rows.low, high = rows.high;
                }
                for (int half = 0; half < 2; half++) {
                    copy_once(&to[half][0][threadIdx.x], low + half * 64);
                    copy_once(&to[half][1][threadIdx.x], high + half * 64);
                }
                low += BLOCK, high += BLOCK;
                if (++block == of.blocks) block = 0, number += tiles.step();
            }
            end_group_of_copies();
        }
    };

    // A half of a block's columns of the thread's rows, as operands of the matrix unit.
    __device__ void convert(unsigned (&to)[4][4], int stage, int half) const {
        uint4 low = ring.weight[stage][half][0][threadIdx.x], high = ring.weight[stage][half][1][threadIdx.x];
#pragma unroll
        for (int step = 0; step < 4; step++) {
            bfloat16_of_e4m3(word_of(low, step), to[step][0], to[step][2]);
            bfloat16_of_e4m3(word_of(high, step), to[step][1], to[step][3]);
        }
    }
    __device__ static unsigned word_of(const uint4 &words, int number) {
        return number == 0 ? words.x : number == 1 ? words.y : number == 2 ? words.z : words.w;
    }

    // What the splits before sum to: half of it in registers, half in shared memory.
    struct Splits {
        float own[SUMS / 2] = {};
        float4 (&shared)[SPLIT ? SUMS / 8 : 1][CONSUMERS];

        __device__ explicit Splits(Ring &ring) : shared(ring.splits) {
            for (int i = 0; SPLIT && i < SUMS / 8; i++) shared[i][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        // sums = those before + sums
        __device__ void add_to(float (&sums)[SUMS]) const {
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++) sums[i] = __fadd_rn(own[i], sums[i]);
#pragma unroll
            for (int i = 0; i < SUMS / 8; i++) {
                float4 more = SPLIT ? shared[i][threadIdx.x] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                float *to = &sums[SUMS / 2 + 4 * i];
                to[0] = __fadd_rn(more.x, to[0]), to[1] = __fadd_rn(more.y, to[1]);
                to[2] = __fadd_rn(more.z, to[2]), to[3] = __fadd_rn(more.w, to[3]);
            }
        }
        // Keep the sums with those before, and begin anew.
        __device__ void take(float (&sums)[SUMS]) {
            add_to(sums);
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++) own[i] = sums[i];
#pragma unroll
            for (int i = 0; i < SUMS / 8; i++) {
                const float *from = &sums[SUMS / 2 + 4 * i];
                shared[i][threadIdx.x] = make_float4(from[0], from[1], from[2], from[3]);
            }
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] = 0.0f;
        }
    };

    // Sums of a tile, element 4 * i + 2 * h + j: of the thread's row h of the weight and of row 8 * i + lane % 4 * 2 + j of x.
    __device__ void consume() const {
        int group = threadIdx.x / 128, lane = threadIdx.x % 32;
        Tiles tiles = work.tiles();
        Copies copies(tiles.first());
        for (int i = 0; i < WEIGHT_STAGES; i++) copies.next(*this, tiles, ring.weight[i]);
        Place<STAGES> place;
        Place<WEIGHT_STAGES> weight;
        float part[SUMS] = {};
        unsigned first[4][4], second[4][4];  // halves of a block
        await_copies<WEIGHT_STAGES - 1>();
        convert(first, 0, 0);
        if (group == 1) give_turn(0);
        for (int number = tiles.first(); number < tiles.end(); number += tiles.step()) {
            float sums[SUMS] = {};
            Splits before(ring);
            Rows rows = work.rows(tiles[number]);
            float low_scale = __ldg(rows.low_scales), high_scale = __ldg(rows.high_scales);
            int split_end = split_blocks;
            for (int block = 0; block < blocks; block++, place.next()) {
                int next = min(block + 1, blocks - 1);
                float next_low = __ldg(rows.low_scales + next), next_high = __ldg(rows.high_scales + next);
                await_phase(&ring.full[place.stage], place.round % 2);
                await_turn(group);
                begin_products(part, first, ring.x[place.stage][0], false);
                convert(second, weight.stage, 1);
                begin_products(part, second, ring.x[place.stage][1], true);
                give_turn(group ^ 1);
                copies.next(*this, tiles, ring.weight[weight.stage]);
                weight.next();
                await_products<1>(part, first);
                await_copies<WEIGHT_STAGES - 1>();
                convert(first, weight.stage, 0);
                settle(first, blocks < 0, &ring.weight[0][0][0][threadIdx.x]);
                await_products<0>(part, second);
                if (lane < CLUSTER) arrive_at(&ring.empty[place.stage], lane);
#pragma unroll
                for (int i = 0; i < SUMS; i++) sums[i] = __fmaf_rn(part[i], i % 4 < 2 ? low_scale : high_scale, sums[i]);
                low_scale = next_low, high_scale = next_high;
                if (SPLIT && block + 1 == split_end) {
                    split_end += split_blocks;
                    before.take(sums);
                }
            }
            before.add_to(sums);
            work.store(tiles[number], sums);
        }
        if (group == 0) await_turn(0);  // which the other one gave last
    }
};
