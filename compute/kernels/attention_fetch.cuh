// The third warpgroup of attention_rows.cu: it has queries and tiles copied, as soon as there is room.
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

// As it is in memory: if that is bfloat16, the second warpgroup makes float16 of it.
__device__ void copy_query(const Work &work, int step, Shared &shared) {
    int unit = fetcher() % 8, first_row = fetcher() / 8;
#pragma unroll 1
    for (int i = 0; i < CHUNKS * 4; ++i) {
        int chunk = i / 4, row = i % 4 * 16 + first_row, head = work.first_head(step) + row;
        long long at = (long long)work.row(step) * work.heads + (head < work.heads ? head : 0);
        const unsigned short *from = chunk < CHUNKS - 1 ? work.query_latent + at * DIMS + chunk * 64
                                                        : work.query_rope + at * ROPE_DIMS;
        copy(shared.query[chunk] + place_of(row, unit), (long long)(from + unit * 8), head < work.heads);
    }
    arrive_with_copies(&shared.query_copied);
}

// Has what the thread will copy brought into the L2 cache, and more of the same lines.
__device__ void bring_rows(const long long (&rows)[4]) {
    int line = fetcher() % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (rows[i]) bring_line(rows[i] + line * 128);
        if (rows[i] && line == i) bring_line(rows[i] + 8 * 128);
    }
}

__device__ void fill_tiles(const Work &work, Shared &shared) {
    int units = 0, tiles = 2 * work.steps, place = place_of(fetcher() / 8, fetcher() % 8);
    long long rows[4], later[4];
    work.load_starts(0, rows);
    work.load_starts(AHEAD, later);
#pragma unroll 1
    for (int number = 0; number < tiles; ++number) {
        int step = number / 2, tile = number % 2;
        if (AHEAD) bring_rows(later);
        long long next[4];
        work.load_starts(number + 1, next);
        work.load_starts(number + 1 + AHEAD, later);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (step && part % 2 == 0) await(&shared.read[tile][part / 2], step % 2 ^ 1);
#pragma unroll
            for (int i = first_of(part); i < first_of(part + 1); ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    copy(shared.tiles[tile][chunk_of(i)] + place + j * 16 * 128, rows[j] + chunk_of(i) * 128, rows[j]);
            arrive_with_copies(&shared.filled[tile][part]);
        }
        if (tile == 0 && work.begins_unit(step)) {
            if (units) await(&shared.query_read, (units - 1) % 2);
            ++units;
            copy_query(work, step, shared);
            bring_query(work, step + STEPS);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) rows[j] = next[j];
    }
}
