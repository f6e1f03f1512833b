/* block.c - a block's 64-byte header: one writer, any number of readers with read-only mappings.
 *
 * A reader copies without a lock, so a block may be refilled under it. The writer therefore first makes the
 * header FREE and bumps change_seq, only then touches the body, and stores the state last. A copy counts
 * only if state, generation and change_seq are the same after it as before. A writer killed half-way
 * leaves FREE: what was not published never existed.
 */
#include "core.h"

/* A writer changes a header at most every few hundred nanoseconds (each change is a system call), a copy
 * takes tens: a reader that loses this often reads something that is not a header. */
#define LOAD_ATTEMPTS 10000

/* One writer, so load and store, not a read-modify-write. */
static void bump_change_seq(struct block_header *header)
{
    uint32_t seq = atomic_load_explicit(&header->change_seq, memory_order_relaxed);
    /* PAIRS: header.change_seq. The change before the number that announces it. */
    atomic_store_explicit(&header->change_seq, seq + 1, memory_order_release);
}

/* A reader cannot arm (its mapping is read-only), so every change wakes. */
static void announce(struct block_header *header)
{
    bump_change_seq(header);
    futex_wake_all(&header->change_seq);
}

static void copy_body(const struct block_header *header, struct block_fields *fields)
{
    fields->offset = atomic_load_explicit(&header->offset, memory_order_relaxed);
    fields->nbytes = atomic_load_explicit(&header->nbytes, memory_order_relaxed);
    fields->rows = atomic_load_explicit(&header->rows, memory_order_relaxed);
    fields->dim = atomic_load_explicit(&header->dim, memory_order_relaxed);
    /* PAIRS: header.rows_ready. The first rows_ready rows of the payload are there. */
    fields->rows_ready = atomic_load_explicit(&header->rows_ready, memory_order_acquire);
    fields->dtype = atomic_load_explicit(&header->dtype, memory_order_relaxed);
    fields->epoch = atomic_load_explicit(&header->epoch, memory_order_relaxed);
    fields->metadata_bytes = atomic_load_explicit(&header->metadata_bytes, memory_order_relaxed);
    fields->run_bytes = atomic_load_explicit(&header->run_bytes, memory_order_relaxed);
}

/* Is the header still what it was when fields was copied? */
static bool held_still(const struct block_header *header, const struct block_fields *fields)
{
    return atomic_load_explicit(&header->state, memory_order_relaxed) == fields->state &&
           atomic_load_explicit(&header->generation, memory_order_relaxed) == fields->generation &&
           atomic_load_explicit(&header->change_seq, memory_order_relaxed) == fields->change_seq;
}

bool block_load(const struct block_header *header, struct block_fields *fields)
{
    /* PAIRS: header.refill. A caller that has just copied rows asks whether they were still its own: those
     * reads come before this look, so a row of the block's next owner brings that owner's FREE with it. */
    atomic_thread_fence(memory_order_acquire);
    for (int attempt = 0; attempt < LOAD_ATTEMPTS; attempt++) {
        /* PAIRS: header.change_seq. Read before the state: a waiter that saw the old state waits on the old
         * number, so it cannot sleep through the bump that follows. */
        fields->change_seq = atomic_load_explicit(&header->change_seq, memory_order_acquire);
        /* PAIRS: header.state. The body, the metadata and (READY) the payload are there. */
        fields->state = atomic_load_explicit(&header->state, memory_order_acquire);
        fields->generation = atomic_load_explicit(&header->generation, memory_order_acquire);
        copy_body(header, fields);
        /* PAIRS: header.refill. A word of a newer body, if the copy holds one, before the second look. */
        atomic_thread_fence(memory_order_acquire);
        if (held_still(header, fields))
            return true;
    }
    return false;
}

void block_store(struct block_header *header, const struct block_fields *fields)
{
    atomic_store_explicit(&header->state, BLOCK_STATE_FREE, memory_order_relaxed);
    bump_change_seq(header);
    /* PAIRS: header.refill. FREE and the new change_seq before the first word of the new body. */
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&header->offset, fields->offset, memory_order_relaxed);
    atomic_store_explicit(&header->nbytes, fields->nbytes, memory_order_relaxed);
    atomic_store_explicit(&header->rows, fields->rows, memory_order_relaxed);
    atomic_store_explicit(&header->dim, fields->dim, memory_order_relaxed);
    atomic_store_explicit(&header->rows_ready, fields->rows_ready, memory_order_relaxed);
    atomic_store_explicit(&header->dtype, fields->dtype, memory_order_relaxed);
    atomic_store_explicit(&header->epoch, fields->epoch, memory_order_relaxed);
    atomic_store_explicit(&header->metadata_bytes, fields->metadata_bytes, memory_order_relaxed);
    atomic_store_explicit(&header->run_bytes, fields->run_bytes, memory_order_relaxed);
    atomic_store_explicit(&header->generation, fields->generation, memory_order_relaxed);
    block_store_state(header, fields->state);
}

void block_store_state(struct block_header *header, uint32_t state)
{
    /* PAIRS: header.state. Body, metadata and payload before the state that vouches for them. */
    atomic_store_explicit(&header->state, state, memory_order_release);
    announce(header);
}

void block_store_rows_ready(struct block_header *header, uint32_t rows_ready)
{
    /* PAIRS: header.rows_ready. The rows before their count. */
    atomic_store_explicit(&header->rows_ready, rows_ready, memory_order_release);
    announce(header);
}

void block_finish(struct block_header *header, uint32_t rows_ready, uint32_t state)
{
    /* PAIRS: header.rows_ready. The rows before their count. */
    atomic_store_explicit(&header->rows_ready, rows_ready, memory_order_release);
    block_store_state(header, state);
}

int block_wait(const struct block_header *header, uint32_t seen, int64_t deadline_ns)
{
    /* PAIRS: header.change_seq. The change that the number announces is visible to the caller. */
    while (atomic_load_explicit(&header->change_seq, memory_order_acquire) == seen) {
        int error = futex_wait(&header->change_seq, seen, deadline_ns);
        if (error != 0)
            return error;
    }
    return 0;
}
