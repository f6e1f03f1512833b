/* ring.c - one producer, one consumer, monotone 64-bit cursors, 128-byte slots.
 *
 * Each end keeps its own cursor in private memory and only ever stores the shared one; it reads the peer's
 * again only when the ring looks full (empty). A process may be killed between any two instructions: what
 * was not published never existed, what was not given back is taken again by whoever resumes at head.
 */
#include <errno.h>
#include <string.h>

#include "core.h"

#define SPINS_PER_CLOCK_LOOK 64

static inline void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

void ring_producer_open(struct ring_producer *ring)
{
    ring->tail = atomic_load_explicit(&ring->side->tail, memory_order_relaxed);
    /* As if full, so that the first publish reads the real one. */
    ring->seen_head = ring->tail - ring->slot_count;
}

void ring_consumer_open(struct ring_consumer *ring)
{
    ring->head = atomic_load_explicit(&ring->side->head, memory_order_relaxed);
    ring->seen_tail = ring->head;
    atomic_init(&ring->woken, 0);
}

/* --- the producer --- */

enum ring_status ring_free_slots(const struct ring_producer *ring, uint64_t *count)
{
    /* PAIRS: ring.head. The consumer has copied out every slot below head. */
    uint64_t head = atomic_load_explicit(&ring->peer->head, memory_order_acquire);
    uint64_t used = ring->tail - head;
    if (used > ring->slot_count)
        return RING_CORRUPT;
    *count = ring->slot_count - used;
    return RING_OK;
}

static enum ring_status find_free_slot(struct ring_producer *ring)
{
    if (ring->tail - ring->seen_head < ring->slot_count)
        return RING_OK;
    uint64_t free_count;
    if (ring_free_slots(ring, &free_count) == RING_CORRUPT)
        return RING_CORRUPT;
    ring->seen_head = ring->tail - (ring->slot_count - free_count);
    return free_count == 0 ? RING_FULL : RING_OK;
}

static int ring_bell(struct ring_producer *ring)
{
    if (!doorbell_claim(&ring->peer->armed, ring->peer_writable))
        return 0;
    if (ring->eventfd >= 0)
        return eventfd_ring(ring->eventfd);
    futex_wake_all(&ring->peer->armed);
    return 0;
}

enum ring_status ring_try_publish(
    struct ring_producer *ring, const void *bytes, size_t nbytes, int *bell_error)
{
    enum ring_status status = find_free_slot(ring);
    if (status != RING_OK)
        return status;
    unsigned char *slot = ring->side->slots[ring->tail & (ring->slot_count - 1)];
    memcpy(slot, bytes, nbytes);
    memset(slot + nbytes, 0, SLOT_BYTES - nbytes);
    ring->tail += 1;
    /* PAIRS: ring.tail. The slot's bytes before the cursor that makes them the consumer's. */
    atomic_store_explicit(&ring->side->tail, ring->tail, memory_order_release);
    *bell_error = ring_bell(ring);
    return RING_OK;
}

enum ring_status ring_try_publish_many(
    struct ring_producer *ring, const unsigned char *slots, uint64_t count, uint64_t *published, int *bell_error)
{
    uint64_t room = ring->slot_count - (ring->tail - ring->seen_head);
    if (room < count) {
        if (ring_free_slots(ring, &room) == RING_CORRUPT)
            return RING_CORRUPT;
        ring->seen_head = ring->tail - (ring->slot_count - room);
    }
    if (room == 0)
        return RING_FULL;
    *published = count < room ? count : room;
    for (uint64_t i = 0; i < *published; i++)
        memcpy(ring->side->slots[(ring->tail + i) & (ring->slot_count - 1)], slots + i * SLOT_BYTES, SLOT_BYTES);
    ring->tail += *published;
    /* PAIRS: ring.tail. Every slot's bytes before the cursor that makes them the consumer's. */
    atomic_store_explicit(&ring->side->tail, ring->tail, memory_order_release);
    *bell_error = ring_bell(ring);
    return RING_OK;
}

int ring_producer_ring(struct ring_producer *ring)
{
    if (ring->eventfd >= 0)
        return eventfd_ring(ring->eventfd);
    doorbell_ring_empty(&ring->peer->armed);
    return 0;
}

/* --- the consumer --- */

enum ring_status ring_pending(const struct ring_consumer *ring, uint64_t *count)
{
    /* PAIRS: ring.tail. Every slot below tail is filled. */
    uint64_t tail = atomic_load_explicit(&ring->peer->tail, memory_order_acquire);
    *count = tail - ring->head;
    return *count > ring->slot_count ? RING_CORRUPT : RING_OK;
}

enum ring_status ring_try_take(struct ring_consumer *ring, void *slot)
{
    if (ring->seen_tail == ring->head) {
        uint64_t count;
        if (ring_pending(ring, &count) == RING_CORRUPT)
            return RING_CORRUPT;
        if (count == 0)
            return RING_EMPTY;
        ring->seen_tail = ring->head + count;
    }
    memcpy(slot, ring->peer->slots[ring->head & (ring->slot_count - 1)], SLOT_BYTES);
    ring->head += 1;
    /* PAIRS: ring.head. The copy is complete before the slot is the producer's again. */
    atomic_store_explicit(&ring->side->head, ring->head, memory_order_release);
    return RING_OK;
}

void ring_take_many(struct ring_consumer *ring, unsigned char *slots, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        memcpy(slots + i * SLOT_BYTES, ring->peer->slots[(ring->head + i) & (ring->slot_count - 1)], SLOT_BYTES);
    ring->head += count;
    if (ring->seen_tail - ring->head > ring->slot_count)
        ring->seen_tail = ring->head; /* it was older than what ring_pending saw */
    /* PAIRS: ring.head. The copies are complete before the slots are the producer's again. */
    atomic_store_explicit(&ring->side->head, ring->head, memory_order_release);
}

/* RING_OK, RING_EMPTY or RING_CORRUPT, without taking. */
static enum ring_status look(const struct ring_consumer *ring)
{
    uint64_t count;
    if (ring_pending(ring, &count) == RING_CORRUPT)
        return RING_CORRUPT;
    return count == 0 ? RING_EMPTY : RING_OK;
}

/* The consumer is awake: a message, or a ring without one (before = what armed held), or nothing. */
static enum ring_status look_around(struct ring_consumer *ring, uint32_t before)
{
    enum ring_status status = look(ring);
    if (status != RING_EMPTY)
        return status;
    /* PAIRS: consumer.woken. seq_cst, after armed = 1; ring_consumer_wake stores it before it touches armed. */
    if (atomic_exchange_explicit(&ring->woken, 0, memory_order_seq_cst) || before == BELL_RUNG)
        return RING_RUNG;
    return RING_EMPTY;
}

enum ring_status ring_consumer_arm(struct ring_consumer *ring)
{
    uint32_t before = doorbell_arm(&ring->side->armed);
    enum ring_status status = look_around(ring, before);
    if (status != RING_EMPTY)
        doorbell_disarm(&ring->side->armed);
    return status;
}

static enum ring_status spin(const struct ring_consumer *ring, int64_t until_ns)
{
    while (clock_monotonic_ns() < until_ns) {
        for (int spins = 0; spins < SPINS_PER_CLOCK_LOOK; spins++) {
            enum ring_status status = look(ring);
            if (status != RING_EMPTY)
                return status;
            cpu_relax();
        }
    }
    return RING_EMPTY;
}

enum ring_status ring_consumer_wait(struct ring_consumer *ring, int64_t spin_until_ns, int64_t deadline_ns)
{
    enum ring_status status = spin(ring, spin_until_ns);
    if (status != RING_EMPTY)
        return status;
    for (;;) {
        status = ring_consumer_arm(ring);
        if (status != RING_EMPTY)
            return status;
        int error = futex_wait(&ring->side->armed, BELL_ARMED, deadline_ns);
        status = look_around(ring, doorbell_disarm(&ring->side->armed));
        if (status != RING_EMPTY)
            return status;
        if (error == EINTR)
            return RING_INTERRUPTED;
        if (error != 0)
            return error == ETIMEDOUT ? RING_TIMEOUT : RING_CORRUPT;
        /* The bell of a message that was taken while awake: sleep again. */
    }
}

void ring_consumer_wake(struct ring_consumer *ring)
{
    /* PAIRS: consumer.woken. Before armed changes, so that a wait that saw armed == 1 comes back and sees it. */
    atomic_store_explicit(&ring->woken, 1, memory_order_seq_cst);
    doorbell_ring_empty(&ring->side->armed);
}
