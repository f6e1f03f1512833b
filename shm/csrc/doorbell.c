/* doorbell.c - waking the other end: a futex on the armed word towards a thread, an eventfd towards a loop. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

#define NS_PER_SECOND 1000000000

int64_t clock_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_SECOND + now.tv_nsec;
}

int64_t clock_deadline_ns(int64_t timeout_ns)
{
    int64_t now_ns = clock_monotonic_ns();
    if (timeout_ns <= 0)
        return now_ns;
    return timeout_ns > INT64_MAX - now_ns ? INT64_MAX : now_ns + timeout_ns;
}

int futex_wait(const _Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns)
{
    struct timespec deadline = {
        .tv_sec = deadline_ns / NS_PER_SECOND,
        .tv_nsec = deadline_ns % NS_PER_SECOND,
    };
    /* Not FUTEX_PRIVATE: the word is shared between processes. WAIT_BITSET takes an absolute
     * CLOCK_MONOTONIC time, so that a wait resumed after a signal keeps its deadline. */
    long result = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &deadline, NULL, FUTEX_BITSET_MATCH_ANY);
    if (result == 0 || errno == EAGAIN)
        return 0;
    return errno;
}

void futex_wake_all(const _Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t doorbell_arm(_Atomic uint32_t *armed)
{
    uint32_t before = atomic_exchange_explicit(armed, BELL_ARMED, memory_order_seq_cst);
    /* PAIRS: ring.armed. Orders "armed = 1" before the caller's second look at tail, against the producer's
     * "tail, fence, look at armed": at least one of the two sees the other's store. */
    atomic_thread_fence(memory_order_seq_cst);
    return before;
}

uint32_t doorbell_disarm(_Atomic uint32_t *armed)
{
    return atomic_exchange_explicit(armed, BELL_DISARMED, memory_order_seq_cst);
}

bool doorbell_claim(_Atomic uint32_t *armed, bool may_disarm)
{
    /* PAIRS: ring.armed. Orders the release of tail before the look at armed (see doorbell_arm). */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(armed, memory_order_relaxed) != BELL_ARMED)
        return false;
    if (!may_disarm)
        return true; /* read-only here: rung once a message until the consumer disarms itself */
    return atomic_exchange_explicit(armed, BELL_DISARMED, memory_order_seq_cst) == BELL_ARMED;
}

int eventfd_ring(int eventfd)
{
    const uint64_t one = 1;
    for (;;) {
        if (write(eventfd, &one, sizeof one) == (ssize_t)sizeof one || errno == EAGAIN)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

void doorbell_ring_empty(_Atomic uint32_t *armed)
{
    atomic_exchange_explicit(armed, BELL_RUNG, memory_order_seq_cst);
    /* Whatever armed was: a ringer killed between its exchange and its wake left a sleeper behind. */
    futex_wake_all(armed);
}
