// The third warpgroup of attention_rows.cu: queries and tiles. A warp fetches and converts rows of its own.
#pragma once

#include "attention_work.cuh"

// Has the query of a later step brought into the L2 cache.
__device__ void bring_query(const Work &work, int step) {
    if (fetcher() || step >= work.steps) return;
    int head = work.first_head(step), heads = min(HEADS, work.heads - head);
    long long at = (long long)work.row(step) * work.heads + head;
    bring((long long)(work.query_latent + at * DIMS), heads * DIMS * 2);
    bring((long long)(work.query_rope + at * ROPE_DIMS), heads * ROPE_DIMS * 2);
}

__device__ void fill_query(const Work &work, int step, Shared &shared) {
    int unit = fetcher() % 8, first_row = fetcher() / 8;
#pragma unroll 1
    for (int i = 0; i < CHUNKS * 4; ++i) {
        int chunk = i / 4, row = i % 4 * 16 + first_row, head = work.first_head(step) + row;
        long long at = (long long)work.row(step) * work.heads + (head < work.heads ? head : 0);
        const unsigned short *from = chunk < CHUNKS - 1 ? work.query_latent + at * DIMS + chunk * 64
                                                        : work.query_rope + at * ROPE_DIMS;
        copy((uint4 *)(shared.query[chunk] + place_of(row, unit)), from + unit * 8, head < work.heads);
    }
    await_copies();
    if (BFLOAT16_QUERY)
#pragma unroll 4
        for (int i = 0; i < CHUNKS * 4; ++i) {
            uint4 &eight = *(uint4 *)(shared.query[i / 4] + place_of(i % 4 * 16 + first_row, unit));
            eight = halves_of_bfloat16(eight);
        }
    publish_to_matrix_unit();
    arrive_as_warp(&shared.query_filled);
}

// Rows are copied to where their float16 will be: a row's values to its lines of the chunks from 4 on, its scales to that of
// the first, its rope to that of the last. Rows that are odd have their words elsewhere in a line, so that what eight
// threads read is in different banks.
constexpr int VALUES = DIMS / 64 / 2;  // the first of their chunks
__device__ int place_of_copy(int row, int word) { return row * 128 + ((word ^ row % 2 * 4) << 4); }

// The warp's rows, of which lanes have the addresses.
__device__ void copy_rows(long long start, unsigned char (&tile)[CHUNKS][CHUNK], unsigned char *empty) {
    int lane = fetcher() % 32, first = fetcher() / 32 * WARP_KEYS;
#pragma unroll
    for (int i = 0; i < WARP_KEYS; ++i) {
        long long from = __shfl_sync(0xffffffff, start, i);
        copy((uint4 *)(tile[VALUES + lane / 8] + place_of_copy(first + i, lane % 8)),
             (const void *)(from + VALUES_OFFSET + lane * 16), from);
    }
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i += 4) {
        int row = i + lane / 8;
        long long from = __shfl_sync(0xffffffff, start, row);
        copy((uint4 *)(tile[CHUNKS - 1] + place_of(first + row, lane % 8)),
             (const void *)(from + ROPE_OFFSET + lane % 8 * 16), from);
    }
    if (lane < WARP_KEYS) {
        copy((uint4 *)(tile[0] + place_of_copy(first + lane, 0)), (const void *)(start + SCALES_OFFSET), start);
        empty[first + lane] = !start;
    }
}

// Sixteen lanes have a row, and each of them two of its words. All of some rows is read before any of them is stored.
__device__ void convert_rows(unsigned char (&tile)[CHUNKS][CHUNK]) {
    constexpr int PAIRS = 2;
    int lane = fetcher() % 32, first = fetcher() / 32 * WARP_KEYS, part = lane / 8, quarter = lane % 4;
    await_copies();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < WARP_KEYS; i += 2 * PAIRS) {
        int row = first + i + lane / 4 % 2;
        uint4 values[PAIRS][2];
        unsigned scales[PAIRS][2];
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
            int pair = j / 2, half = j % 2, group = half * 4 + part, own = row + pair * 2;
            values[pair][half] = *(const uint4 *)(tile[VALUES + group / 2] + place_of_copy(own, group % 2 * 4 + quarter));
            unsigned bits = *(const unsigned short *)(tile[0] + place_of_copy(own, 0) + group * 2);
            scales[pair][half] = halves_of_bfloat16(bits << 16 | bits);
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
            int pair = j / 2, half = j % 2, at = place_of(row + pair * 2, 2 * quarter);
            unsigned char *to = tile[half * 4 + part];
            unsigned halves[8];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                scaled_halves(word(values[pair][half], k), scales[pair][half], halves[2 * k], halves[2 * k + 1]);
            *(uint4 *)(to + at) = {halves[0], halves[1], halves[2], halves[3]};
            *(uint4 *)(to + (at ^ 16)) = {halves[4], halves[5], halves[6], halves[7]};
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i += 4) {
        uint4 &rope = *(uint4 *)(tile[CHUNKS - 1] + place_of(first + i + lane / 8, lane % 8));
        rope = halves_of_bfloat16(rope);
    }
}

__device__ void fill_tiles(const Work &work, Shared &shared) {
    int units = 0, tiles = 2 * work.steps;
    if (tiles) copy_rows(work.start(0), shared.tiles[0], shared.empty[0]);
    long long next = work.start(1);
#pragma unroll 1
    for (int number = 0; number < tiles; ++number) {
        int step = number / 2, tile = number % 2;
        if (tile == 0 && work.begins_unit(step)) {
            if (units) await(&shared.query_read, (units - 1) % 2);
            ++units;
            fill_query(work, step, shared);
            bring_query(work, step + SPLITS);
        }
        convert_rows(shared.tiles[tile]);
        publish_to_matrix_unit();
        arrive_as_warp(&shared.filled[tile]);
        if (number + 1 == tiles) break;
        long long later = work.start(number + 2);
        if (number) await(&shared.read[tile ^ 1], (number - 1) / 2 % 2);
        copy_rows(next, shared.tiles[tile ^ 1], shared.empty[tile ^ 1]);
        next = later;
    }
}
