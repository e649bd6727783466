// The third warpgroup of attention_rows.cu: it has queries and tiles copied, as soon as there is room.
#pragma once

#include "attention_work.cuh"

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

__device__ void fill_tiles(const Work &work, Shared &shared) {
    int units = 0, tiles = 2 * work.steps, place = place_of(fetcher() / 8, fetcher() % 8);
    long long rows[4];
    work.load_starts(0, rows);
#pragma unroll 1
    for (int number = 0; number < tiles; ++number) {
        int step = number / 2, tile = number % 2;
        long long next[4];
        work.load_starts(number + 1, next);
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
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) rows[j] = next[j];
    }
}
