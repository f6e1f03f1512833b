/* threads.c - ring.c, doorbell.c and block.c under a sanitizer: two threads over one shared mapping.
 *
 * usage: threads spin|several|futex|eventfd|header COUNT. In spin, and in several (many messages at a time), the
 * doorbell is never armed, so that nothing but the two cursors orders the slots (its exchanges would hide a missing
 * release). Exit 0: every message arrived in order, every header was whole.
 * Driven by test_thread_sanitizer.py (ThreadSanitizer itself ends the program when it sees a data race) and,
 * without a sanitizer, by test_lost_wakeups.py. Built with -DSLOT_COUNT=1 a lost wake-up stops everything.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core.h"

#ifndef SLOT_COUNT
#define SLOT_COUNT 2
#endif
#define SEVERAL (SLOT_COUNT + 1) /* more than the ring has room for */
#define REGION_BYTES 4096
#define ROWS 64
#ifndef A_LONG_TIME_NS
#define A_LONG_TIME_NS 60000000000
#endif
#define TRIES_PER_YIELD 200

enum { FILLING = 1, READY = 2 };

struct run {
    unsigned char *region;
    uint64_t count;
    int eventfd;
    bool spin;
    uint64_t rows[ROWS]; /* the payload of the header test: plain memory, handed over by rows_ready and state */
    _Atomic uint64_t released; /* generations that the reader is done with */
};

static void require(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

/* --- the ring --- */

static void *publish_all(void *argument)
{
    struct run *run = argument;
    struct ring_producer ring = {
        .side = (struct ring_producer_side *)(run->region + CONSUMER_SIDE_BYTES),
        .peer = (struct ring_consumer_side *)run->region,
        .slot_count = SLOT_COUNT,
        .peer_writable = true,
        .eventfd = run->eventfd,
    };
    ring_producer_open(&ring);
    for (uint64_t number = 0; number < run->count; number++) {
        uint64_t words[SLOT_BYTES / sizeof number];
        for (size_t i = 0; i < SLOT_BYTES / sizeof number; i++)
            words[i] = number;
        int bell_error = 0;
        enum ring_status status;
        /* At once when there is room: that is when the consumer, having emptied the ring, is arming. */
        for (int tries = 1; (status = ring_try_publish(&ring, words, sizeof words, &bell_error)) == RING_FULL; tries++)
            if (tries % TRIES_PER_YIELD == 0)
                sched_yield();
        require(status == RING_OK && bell_error == 0, "publish failed");
    }
    return NULL;
}

static void wait_on_eventfd(struct ring_consumer *ring, int eventfd)
{
    enum ring_status status = ring_consumer_arm(ring);
    require(status == RING_OK || status == RING_EMPTY, "arm failed");
    if (status == RING_OK)
        return;
    struct pollfd bell = {.fd = eventfd, .events = POLLIN};
    uint64_t rings;
    require(poll(&bell, 1, A_LONG_TIME_NS / 1000000) == 1, "lost wake-up");
    require(read(eventfd, &rings, sizeof rings) == sizeof rings, "eventfd");
    doorbell_disarm(&ring->side->armed);
}

static void wait_on_futex(struct ring_consumer *ring, uint64_t number)
{
    int64_t spin_until_ns = clock_deadline_ns((int64_t)(number % 4) * 500);
    int64_t deadline_ns = clock_deadline_ns(A_LONG_TIME_NS);
    require(ring_consumer_wait(ring, spin_until_ns, deadline_ns) == RING_OK, "lost wake-up");
    /* A wait that was not woken finds the message all the same, at its deadline. */
    require(clock_monotonic_ns() < deadline_ns, "lost wake-up");
}

static void wait_for_message(const struct run *run, struct ring_consumer *ring, uint64_t number)
{
    if (run->spin)
        sched_yield();
    else if (run->eventfd >= 0)
        wait_on_eventfd(ring, run->eventfd);
    else
        wait_on_futex(ring, number);
}

static void take_all(struct run *run)
{
    struct ring_consumer ring = {
        .peer = (const struct ring_producer_side *)(run->region + CONSUMER_SIDE_BYTES),
        .side = (struct ring_consumer_side *)run->region,
        .slot_count = SLOT_COUNT,
    };
    ring_consumer_open(&ring);
    for (uint64_t number = 0; number < run->count; number++) {
        uint64_t words[SLOT_BYTES / sizeof number];
        while (ring_try_take(&ring, words) != RING_OK)
            wait_for_message(run, &ring, number);
        for (size_t i = 0; i < SLOT_BYTES / sizeof number; i++)
            require(words[i] == number, "a message is torn or out of order");
    }
}

/* --- the ring, several messages at a time --- */

static void number_slots(unsigned char (*slots)[SLOT_BYTES], uint64_t first)
{
    for (size_t i = 0; i < SEVERAL * SLOT_BYTES / sizeof first; i++) {
        uint64_t number = first + i / (SLOT_BYTES / sizeof first);
        memcpy(&slots[0][i * sizeof number], &number, sizeof number);
    }
}

static void *publish_several(void *argument)
{
    struct run *run = argument;
    struct ring_producer ring = {
        .side = (struct ring_producer_side *)(run->region + CONSUMER_SIDE_BYTES),
        .peer = (struct ring_consumer_side *)run->region,
        .slot_count = SLOT_COUNT,
        .peer_writable = true,
        .eventfd = -1,
    };
    ring_producer_open(&ring);
    for (uint64_t number = 0; number < run->count;) {
        unsigned char slots[SEVERAL][SLOT_BYTES];
        number_slots(slots, number);
        uint64_t count = run->count - number < SEVERAL ? run->count - number : SEVERAL;
        uint64_t published = 0;
        int bell_error = 0;
        enum ring_status status;
        while ((status = ring_try_publish_many(&ring, slots[0], count, &published, &bell_error)) == RING_FULL)
            sched_yield();
        require(status == RING_OK && bell_error == 0 && published >= 1 && published <= count, "publish failed");
        number += published;
    }
    return NULL;
}

static void take_several(struct run *run)
{
    struct ring_consumer ring = {
        .peer = (const struct ring_producer_side *)(run->region + CONSUMER_SIDE_BYTES),
        .side = (struct ring_consumer_side *)run->region,
        .slot_count = SLOT_COUNT,
    };
    ring_consumer_open(&ring);
    for (uint64_t number = 0; number < run->count;) {
        unsigned char taken[SLOT_COUNT][SLOT_BYTES], expected[SEVERAL][SLOT_BYTES];
        uint64_t count;
        require(ring_pending(&ring, &count) == RING_OK, "the ring is corrupt");
        if (count == 0) {
            sched_yield();
            continue;
        }
        ring_take_many(&ring, taken[0], count);
        number_slots(expected, number);
        require(memcmp(taken, expected, count * SLOT_BYTES) == 0, "a message is torn or out of order");
        number += count;
    }
}

/* --- the header --- */

/* The worker: fill a block row by row; reuse the rows only when the reader has let go of them. */
static void *fill_all(void *argument)
{
    struct run *run = argument;
    struct block_header *header = (struct block_header *)run->region;
    for (uint64_t generation = 1; generation <= run->count; generation++) {
        struct block_fields fields = {
            .state = FILLING, .generation = generation, .offset = generation * 3, .nbytes = generation * 5,
            .rows = ROWS, .run_bytes = generation * 7,
        };
        block_store(header, &fields);
        for (uint32_t row = 0; row < ROWS; row++) {
            run->rows[row] = generation * ROWS + row;
            if (row % 16 == 15)
                block_store_rows_ready(header, row + 1);
        }
        block_store_state(header, READY);
        while (atomic_load_explicit(&run->released, memory_order_acquire) < generation)
            sched_yield();
    }
    return NULL;
}

static void check_fields(const struct block_fields *fields)
{
    if (fields->state == BLOCK_STATE_FREE)
        return;
    uint64_t generation = fields->generation;
    require(fields->offset == generation * 3 && fields->nbytes == generation * 5 && fields->rows == ROWS &&
                fields->run_bytes == generation * 7,
            "a header was seen half");
}

static void read_all(struct run *run)
{
    const struct block_header *header = (const struct block_header *)run->region;
    for (uint64_t generation = 1; generation <= run->count;) {
        struct block_fields fields;
        require(block_load(header, &fields), "the header never holds still");
        check_fields(&fields);
        bool ours = fields.generation == generation && fields.state != BLOCK_STATE_FREE;
        for (uint32_t row = 0; ours && row < fields.rows_ready; row++)
            require(run->rows[row] == generation * ROWS + row, "a row was counted before it was written");
        if (ours && fields.state == READY)
            atomic_store_explicit(&run->released, generation++, memory_order_release);
        else
            require(block_wait(header, fields.change_seq, clock_deadline_ns(A_LONG_TIME_NS)) == 0, "lost wake-up");
    }
}

/* --- the program --- */

static unsigned char *map_region(void)
{
    void *region = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(region != MAP_FAILED, "mmap");
    return region;
}

int main(int argc, char **argv)
{
    require(argc == 3, "usage: threads spin|several|futex|eventfd|header COUNT");
    struct run run = {.region = map_region(), .count = strtoull(argv[2], NULL, 10), .eventfd = -1};
    run.spin = strcmp(argv[1], "spin") == 0;
    void *(*writer)(void *) = publish_all;
    void (*reader)(struct run *) = take_all;
    if (strcmp(argv[1], "header") == 0) {
        writer = fill_all;
        reader = read_all;
    } else if (strcmp(argv[1], "several") == 0) {
        writer = publish_several;
        reader = take_several;
    } else if (strcmp(argv[1], "eventfd") == 0) {
        run.eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    }
    pthread_t thread;
    require(pthread_create(&thread, NULL, writer, &run) == 0, "pthread_create");
    reader(&run);
    pthread_join(thread, NULL);
    return 0;
}
