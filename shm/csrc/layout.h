/* layout.h - where every shared word lies and who may write it. shm/README.md is the normative text.
 *
 * All words are little-endian, naturally aligned, and written by exactly one process; the one
 * exception is `armed`. Python's mirror is shm/layout.py; tests/shm/test_layout.py compares the two.
 */
#ifndef ENCODERD_LAYOUT_H
#define ENCODERD_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define CACHE_LINE_BYTES 128
#define SLOT_BYTES 128
#define PRODUCER_SIDE_OVERHEAD_BYTES 128
#define CONSUMER_SIDE_BYTES 256
#define BLOCK_HEADER_BYTES 64

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shared words are little-endian"
#endif
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "a lock cannot be shared");

/* OWNER: the ring's producer. The consumer only reads. */
struct ring_producer_side {
    _Atomic uint64_t tail; /* cursor of the next slot to fill. PAIRS: ring.tail */
    unsigned char pad[CACHE_LINE_BYTES - sizeof(uint64_t)];
    unsigned char slots[][SLOT_BYTES]; /* plain bytes, handed over by tail and given back by head */
};

/* Values of ring_consumer_side.armed. */
enum {
    BELL_DISARMED = 0, /* the consumer is awake, or its bell has been rung for a message */
    BELL_ARMED = 1,    /* the consumer sleeps, or is about to: ring after publishing */
    BELL_RUNG = 2,     /* rung without a message: the next arm is refused once */
};

/* OWNER: the ring's consumer. The producer only reads head. */
struct ring_consumer_side {
    _Atomic uint64_t head; /* cursor of the next slot to take. PAIRS: ring.head */
    unsigned char pad_head[CACHE_LINE_BYTES - sizeof(uint64_t)];
    /* The futex word. Two writers, by atomic exchange only: the consumer arms and disarms; a producer
     * that may write here disarms when it rings. PAIRS: ring.armed */
    _Atomic uint32_t armed;
    unsigned char pad_armed[CACHE_LINE_BYTES - sizeof(uint32_t)];
};

/* The state that a header holds while its body is not to be believed. The other states are
 * shm.layout.BlockState's; C passes them through. */
#define BLOCK_STATE_FREE 0

/* OWNER: the segment's worker; control after proof of that worker's death. Readers only read. */
struct block_header {
    _Atomic uint32_t state;      /* stored last, by release. PAIRS: header.state */
    _Atomic uint32_t change_seq; /* the futex word, bumped after every change. PAIRS: header.change_seq */
    _Atomic uint64_t generation;
    _Atomic uint64_t offset;
    _Atomic uint64_t nbytes;
    _Atomic uint32_t rows;
    _Atomic uint32_t dim;
    _Atomic uint32_t rows_ready; /* grows while FILLING. PAIRS: header.rows_ready */
    _Atomic uint32_t dtype;
    _Atomic uint32_t epoch;
    _Atomic uint32_t metadata_bytes;
    _Atomic uint64_t run_bytes;
};

/* A private copy of a block header, the same bytes. */
struct block_fields {
    uint32_t state;
    uint32_t change_seq;
    uint64_t generation;
    uint64_t offset;
    uint64_t nbytes;
    uint32_t rows;
    uint32_t dim;
    uint32_t rows_ready;
    uint32_t dtype;
    uint32_t epoch;
    uint32_t metadata_bytes;
    uint64_t run_bytes;
};

_Static_assert(offsetof(struct ring_producer_side, slots) == PRODUCER_SIDE_OVERHEAD_BYTES, "slots");
_Static_assert(offsetof(struct ring_consumer_side, armed) == CACHE_LINE_BYTES, "armed");
_Static_assert(sizeof(struct ring_consumer_side) == CONSUMER_SIDE_BYTES, "consumer side");
_Static_assert(sizeof(struct block_header) == BLOCK_HEADER_BYTES, "block header");
_Static_assert(sizeof(struct block_fields) == BLOCK_HEADER_BYTES, "block fields");
_Static_assert(offsetof(struct block_header, change_seq) == 4, "change_seq");
_Static_assert(offsetof(struct block_header, generation) == 8, "generation");
_Static_assert(offsetof(struct block_header, rows_ready) == 40, "rows_ready");
_Static_assert(offsetof(struct block_header, run_bytes) == 56, "run_bytes");
_Static_assert(offsetof(struct block_fields, run_bytes) == 56, "run_bytes of the copy");

#endif
