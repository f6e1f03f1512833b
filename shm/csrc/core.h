/* core.h - whole operations on shared memory, free of Python: pointers in, a status out.
 *
 * Called by the binding (binding.h), which checks every range before it makes a pointer,
 * and by tests/stress/threads.c. No function allocates, keeps state of its own or takes a lock.
 */
#ifndef ENCODERD_CORE_H
#define ENCODERD_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

/* --- doorbell.c: futex and eventfd --- */

int64_t clock_monotonic_ns(void);

/* now + timeout_ns, saturating; a negative timeout is none. */
int64_t clock_deadline_ns(int64_t timeout_ns);

/* Sleep while *word == expected, until deadline_ns (CLOCK_MONOTONIC). The word may lie in a read-only
 * mapping. 0 when woken or *word differs; else ETIMEDOUT, EINTR or another errno. */
int futex_wait(const _Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns);

/* Wake everyone who sleeps on word, in any process. */
void futex_wake_all(const _Atomic uint32_t *word);

/* Consumer: announce sleep. The caller MUST look at the ring again afterwards. Returns the old value. */
uint32_t doorbell_arm(_Atomic uint32_t *armed);

/* Consumer: awake again. Returns the old value. */
uint32_t doorbell_disarm(_Atomic uint32_t *armed);

/* Producer, after the release of tail: does the consumer want to be rung? Disarms it if may_disarm. */
bool doorbell_claim(_Atomic uint32_t *armed, bool may_disarm);

/* Write 1 to an eventfd. 0, or an errno. A full counter is 0: the consumer has a wake-up already. */
int eventfd_ring(int eventfd);

/* Wake the sleeper, and refuse its next arm if it is not asleep yet. */
void doorbell_ring_empty(_Atomic uint32_t *armed);

/* --- ring.c --- */

enum ring_status {
    RING_OK,          /* published, taken, or a message is there */
    RING_FULL,        /* producer: no free slot */
    RING_EMPTY,       /* consumer: nothing to take */
    RING_RUNG,        /* consumer: woken without a message */
    RING_TIMEOUT,     /* consumer: the deadline passed */
    RING_INTERRUPTED, /* consumer: a signal arrived */
    RING_CORRUPT,     /* the peer's cursor holds what its writer never stores */
};

/* OWNER: the producing thread. Private memory. */
struct ring_producer {
    struct ring_producer_side *side;
    struct ring_consumer_side *peer;
    uint64_t slot_count; /* a power of two */
    uint64_t tail;       /* our cursor; the shared one is only ever written, after the first load */
    uint64_t seen_head;  /* the peer's cursor as last read; read again only when the ring looks full */
    bool peer_writable;  /* may we exchange armed? */
    int eventfd;         /* the consumer's bell, -1: the futex on armed */
};

/* OWNER: the taking thread. Private memory; only `woken` is touched by other threads. */
struct ring_consumer {
    const struct ring_producer_side *peer;
    struct ring_consumer_side *side;
    uint64_t slot_count;
    uint64_t head;
    uint64_t seen_tail;
    _Atomic uint32_t woken; /* ring_consumer_wake was called and no wait has reported it yet */
};

void ring_producer_open(struct ring_producer *ring);
void ring_consumer_open(struct ring_consumer *ring);

/* Copy nbytes (<= SLOT_BYTES, zero padded) into the next slot and publish it: RING_OK, RING_FULL or
 * RING_CORRUPT. On RING_OK *bell_error is 0 or the errno of ringing (the message is published all the same). */
enum ring_status ring_try_publish(
    struct ring_producer *ring, const void *bytes, size_t nbytes, int *bell_error);

/* The same for up to `count` whole slots that lie one behind the other: as many as there is room for, made the
 * consumer's by one release and one ring. RING_OK with *published > 0, RING_FULL or RING_CORRUPT. */
enum ring_status ring_try_publish_many(
    struct ring_producer *ring, const unsigned char *slots, uint64_t count, uint64_t *published, int *bell_error);

/* Wake the consumer without a message. 0 or an errno. */
int ring_producer_ring(struct ring_producer *ring);

/* Free slots right now. RING_OK or RING_CORRUPT. */
enum ring_status ring_free_slots(const struct ring_producer *ring, uint64_t *count);

/* Copy the next slot to slot (SLOT_BYTES), then give it back. RING_OK, RING_EMPTY or RING_CORRUPT. */
enum ring_status ring_try_take(struct ring_consumer *ring, void *slot);

/* Copy `count` slots, at least 1 and no more than ring_pending said, one behind the other, then give them all
 * back. */
void ring_take_many(struct ring_consumer *ring, unsigned char *slots, uint64_t count);

/* RING_EMPTY: armed, safe to sleep. RING_OK (a message), RING_RUNG, RING_CORRUPT: disarmed again. */
enum ring_status ring_consumer_arm(struct ring_consumer *ring);

/* Until a message is there (RING_OK; it is not taken), the bell was rung without one, the deadline passed,
 * or a signal came. Spins until spin_until_ns, then sleeps on the futex. Disarmed on every return. */
enum ring_status ring_consumer_wait(struct ring_consumer *ring, int64_t spin_until_ns, int64_t deadline_ns);

/* From any thread of the consumer's process: the wait under way, or the next, reports RING_RUNG. */
void ring_consumer_wake(struct ring_consumer *ring);

/* Messages to take right now. RING_OK or RING_CORRUPT. */
enum ring_status ring_pending(const struct ring_consumer *ring, uint64_t *count);

/* --- block.c --- */

/* False if the header never held still (its writer does not behave). */
bool block_load(const struct block_header *header, struct block_fields *fields);
void block_store(struct block_header *header, const struct block_fields *fields);
void block_store_state(struct block_header *header, uint32_t state);
void block_store_rows_ready(struct block_header *header, uint32_t rows_ready);
/* Both, with one wake: the last rows and the state that the block has from now on. */
void block_finish(struct block_header *header, uint32_t rows_ready, uint32_t state);

/* Until change_seq differs from seen: 0. ETIMEDOUT, EINTR or another errno otherwise. */
int block_wait(const struct block_header *header, uint32_t seen, int64_t deadline_ns);

/* --- base64.c --- */

enum base64_status {
    BASE64_OK,
    BASE64_BAD_CHARACTER,
    BASE64_BAD_PADDING,        /* '=' where no padding may be, or too little of it */
    BASE64_DATA_AFTER_PADDING,
    BASE64_BAD_LENGTH,         /* one character left over */
    BASE64_TARGET_TOO_SMALL,
};

struct base64_result {
    enum base64_status status;
    size_t position; /* of the offending character in source */
    size_t written;  /* bytes in target */
};

/* Reads source[0..nbytes), writes target[0..written), written <= room. After an error target holds the
 * bytes decoded so far. Safe while another thread changes source. */
struct base64_result base64_decode(
    const unsigned char *source, size_t nbytes, unsigned char *target, size_t room);

/* The most that nbytes characters can decode to. */
size_t base64_decoded_bound(size_t nbytes);

/* --- strings.c --- */

/* The content of a string: from the byte after its first quote to its last quote. */
struct string_extent {
    size_t start;
    size_t end;
};

/* The strings of a JSON text that have at least min_bytes, all printable ASCII without escapes, in order.
 * At most `capacity` are stored in `found`; returns how many. Linear in nbytes, whatever the text. */
size_t long_strings(const unsigned char *text, size_t nbytes, size_t min_bytes, struct string_extent *found,
                    size_t capacity);

/* --- siphash.c --- */

#define SIPHASH_BYTES 16 /* of a key, and of a digest */

struct siphash {
    uint64_t v[4];
    uint64_t word;   /* the bytes of the word under way, low ones first */
    uint64_t nbytes; /* so far */
};

/* One digest: begin, update for each piece, end. The pieces' borders do not count. Each byte is read once. */
void siphash_begin(struct siphash *hash, const unsigned char key[SIPHASH_BYTES]);
void siphash_update(struct siphash *hash, const unsigned char *bytes, size_t nbytes);
void siphash_end(struct siphash *hash, unsigned char digest[SIPHASH_BYTES]);

#endif
