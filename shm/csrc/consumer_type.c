/* consumer_type.c - shm._core.Consumer: buffers held, arguments checked, statuses made exceptions. */
#include "binding.h"

#include <errno.h>

typedef struct {
    PyObject_HEAD
    struct ring_consumer ring;
    Py_buffer producer_side;
    Py_buffer consumer_side;
    bool open;
    bool waiting; /* a thread is in take() without the GIL: the buffers must stay */
} Consumer;

static bool consumer_is_open(Consumer *self)
{
    if (!self->open)
        PyErr_SetString(PyExc_ValueError, "the consumer is closed");
    return self->open;
}

/* Open, and not in the hands of another thread. */
static bool consumer_is_usable(Consumer *self)
{
    if (self->waiting) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in take()");
        return false;
    }
    return consumer_is_open(self);
}

static int consumer_init(Consumer *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {
        "producer_side", "producer_offset", "consumer_side", "consumer_offset", "slot_count", NULL};
    PyObject *producer_side, *consumer_side;
    Py_ssize_t producer_offset, consumer_offset;
    uint64_t slot_count;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "OO&OO&O&:Consumer", names, &producer_side, convert_offset, &producer_offset,
            &consumer_side, convert_offset, &consumer_offset, convert_u64, &slot_count))
        return -1;
    if (self->open) {
        PyErr_SetString(PyExc_ValueError, "the consumer is open already");
        return -1;
    }
    if (PyObject_GetBuffer(producer_side, &self->producer_side, PyBUF_SIMPLE) < 0)
        return -1;
    if (PyObject_GetBuffer(consumer_side, &self->consumer_side, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&self->producer_side);
        return -1;
    }
    void *peer, *side;
    if (!find_sides(&self->producer_side, producer_offset, &self->consumer_side, consumer_offset, slot_count,
                    &peer, &side)) {
        PyBuffer_Release(&self->consumer_side);
        PyBuffer_Release(&self->producer_side);
        return -1;
    }
    self->ring.peer = peer;
    self->ring.side = side;
    self->ring.slot_count = slot_count;
    ring_consumer_open(&self->ring);
    self->open = true;
    return 0;
}

static PyObject *consumer_close(Consumer *self, PyObject *Py_UNUSED(unused))
{
    if (!self->open)
        Py_RETURN_NONE;
    if (!consumer_is_usable(self))
        return NULL;
    self->open = false;
    PyBuffer_Release(&self->consumer_side);
    PyBuffer_Release(&self->producer_side);
    Py_RETURN_NONE;
}

static void consumer_dealloc(Consumer *self)
{
    /* A thread in take() holds a reference, so this close cannot be refused. */
    Py_XDECREF(consumer_close(self, NULL));
    free_object((PyObject *)self);
}

static PyObject *tail_is_impossible(Consumer *self)
{
    return raise_corrupt((PyObject *)self, "the producer's tail is impossible");
}

static PyObject *consumer_try_take(Consumer *self, PyObject *Py_UNUSED(unused))
{
    unsigned char slot[SLOT_BYTES];
    if (!consumer_is_usable(self))
        return NULL;
    switch (ring_try_take(&self->ring, slot)) {
    case RING_OK:
        return PyBytes_FromStringAndSize((const char *)slot, SLOT_BYTES);
    case RING_CORRUPT:
        return tail_is_impossible(self);
    default:
        Py_RETURN_NONE;
    }
}

static PyObject *consumer_arm(Consumer *self, PyObject *Py_UNUSED(unused))
{
    if (!consumer_is_usable(self))
        return NULL;
    enum ring_status status = ring_consumer_arm(&self->ring);
    if (status == RING_CORRUPT)
        return tail_is_impossible(self);
    return PyBool_FromLong(status == RING_EMPTY);
}

static PyObject *consumer_disarm(Consumer *self, PyObject *Py_UNUSED(unused))
{
    if (!consumer_is_usable(self))
        return NULL;
    doorbell_disarm(&self->ring.side->armed);
    Py_RETURN_NONE;
}

/* Wait without the GIL until there is something to take; signals are handled on the way. */
static enum ring_status wait_without_gil(Consumer *self, int64_t spin_ns, int64_t timeout_ns)
{
    int64_t deadline_ns = clock_deadline_ns(timeout_ns);
    int64_t spin_until_ns = clock_deadline_ns(spin_ns < timeout_ns ? spin_ns : timeout_ns);
    enum ring_status status;
    self->waiting = true; /* also while a signal's handler runs: it may not close us */
    do {
        Py_BEGIN_ALLOW_THREADS
        status = ring_consumer_wait(&self->ring, spin_until_ns, deadline_ns);
        Py_END_ALLOW_THREADS
    } while (status == RING_INTERRUPTED && PyErr_CheckSignals() == 0);
    self->waiting = false;
    return status;
}

static PyObject *consumer_take(Consumer *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"timeout_ns", "spin_ns", NULL};
    long long timeout_ns, spin_ns = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "L|L:take", names, &timeout_ns, &spin_ns))
        return NULL;
    PyObject *message = consumer_try_take(self, NULL);
    if (message != Py_None || timeout_ns <= 0)
        return message;
    switch (wait_without_gil(self, spin_ns, timeout_ns)) {
    case RING_OK:
        Py_DECREF(message);
        return consumer_try_take(self, NULL);
    case RING_CORRUPT:
        Py_DECREF(message);
        return tail_is_impossible(self);
    case RING_INTERRUPTED: /* the signal's handler raised */
        Py_DECREF(message);
        return NULL;
    default:
        return message;
    }
}

/* Copies of up to max_count slots, one behind the other; empty bytes when there is nothing to take. */
static PyObject *take_pending(Consumer *self, uint64_t max_count)
{
    uint64_t count;
    if (!consumer_is_usable(self))
        return NULL;
    if (ring_pending(&self->ring, &count) == RING_CORRUPT)
        return tail_is_impossible(self);
    if (count > max_count)
        count = max_count;
    PyObject *slots = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * SLOT_BYTES);
    if (slots != NULL && count > 0)
        ring_take_many(&self->ring, (unsigned char *)PyBytes_AsString(slots), count);
    return slots;
}

static PyObject *consumer_take_many(Consumer *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"max_count", "timeout_ns", "spin_ns", NULL};
    uint64_t max_count;
    long long timeout_ns, spin_ns = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "O&L|L:take_many", names, convert_u64, &max_count, &timeout_ns, &spin_ns))
        return NULL;
    if (max_count == 0) {
        PyErr_SetString(PyExc_ValueError, "max_count must be at least 1");
        return NULL;
    }
    PyObject *slots = take_pending(self, max_count);
    if (slots == NULL || PyBytes_Size(slots) != 0 || timeout_ns <= 0)
        return slots;
    switch (wait_without_gil(self, spin_ns, timeout_ns)) {
    case RING_OK:
        Py_DECREF(slots);
        return take_pending(self, max_count);
    case RING_CORRUPT:
        Py_DECREF(slots);
        return tail_is_impossible(self);
    case RING_INTERRUPTED: /* the signal's handler raised */
        Py_DECREF(slots);
        return NULL;
    default:
        return slots;
    }
}

static PyObject *consumer_wake(Consumer *self, PyObject *Py_UNUSED(unused))
{
    if (!consumer_is_open(self))
        return NULL;
    ring_consumer_wake(&self->ring);
    Py_RETURN_NONE;
}

static PyObject *consumer_pending(Consumer *self, PyObject *Py_UNUSED(unused))
{
    uint64_t count;
    if (!consumer_is_open(self))
        return NULL;
    if (ring_pending(&self->ring, &count) == RING_CORRUPT)
        return tail_is_impossible(self);
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *consumer_taken(Consumer *self, void *Py_UNUSED(closure))
{
    return consumer_is_open(self) ? PyLong_FromUnsignedLongLong(self->ring.head) : NULL;
}

static PyMethodDef consumer_methods[] = {
    {"try_take", (PyCFunction)consumer_try_take, METH_NOARGS, "Copy of the next slot, or None."},
    {"arm", (PyCFunction)consumer_arm, METH_NOARGS, "True: armed and empty, safe to sleep."},
    {"disarm", (PyCFunction)consumer_disarm, METH_NOARGS, "Awake: the producer need not ring."},
    {"take", (PyCFunction)(void (*)(void))consumer_take, METH_VARARGS | METH_KEYWORDS,
     "Copy of the next slot, waited for; None at the timeout or when woken without a message."},
    {"take_many", (PyCFunction)(void (*)(void))consumer_take_many, METH_VARARGS | METH_KEYWORDS,
     "Copies of the next slots together, waited for; empty at the timeout or when woken without a message."},
    {"wake", (PyCFunction)consumer_wake, METH_NOARGS, "Make a sleeping take() return None."},
    {"pending", (PyCFunction)consumer_pending, METH_NOARGS, "Messages to take right now."},
    {"close", (PyCFunction)consumer_close, METH_NOARGS, "Give both buffers back."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef consumer_properties[] = {
    {"taken", (getter)consumer_taken, NULL, "The ring's head: messages ever taken.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot consumer_slots[] = {
    {Py_tp_doc, "The taking end of a ring. One per ring, one thread at a time."},
    {Py_tp_init, consumer_init},
    {Py_tp_dealloc, consumer_dealloc},
    {Py_tp_methods, consumer_methods},
    {Py_tp_getset, consumer_properties},
    {0, NULL},
};

PyType_Spec consumer_spec = {
    .name = "shm._core.Consumer",
    .basicsize = sizeof(Consumer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = consumer_slots,
};
