/* producer_type.c - shm._core.Producer: buffers held, arguments checked, statuses made exceptions. */
#include "binding.h"

#include <errno.h>

typedef struct {
    PyObject_HEAD
    struct ring_producer ring;
    Py_buffer producer_side;
    Py_buffer consumer_side;
    bool open;
} Producer;

static bool producer_is_open(Producer *self)
{
    if (!self->open)
        PyErr_SetString(PyExc_ValueError, "the producer is closed");
    return self->open;
}

static bool producer_bind(Producer *self, Py_ssize_t producer_offset, Py_ssize_t consumer_offset)
{
    struct ring_producer *ring = &self->ring;
    void *side, *peer;
    if (!find_sides(&self->producer_side, producer_offset, &self->consumer_side, consumer_offset,
                    ring->slot_count, &side, &peer))
        return false;
    ring->side = side;
    ring->peer = peer;
    ring->peer_writable = !self->consumer_side.readonly;
    if (!ring->peer_writable && ring->eventfd < 0) {
        PyErr_SetString(PyExc_ValueError, "a read-only consumer side needs an eventfd bell");
        return false;
    }
    ring_producer_open(ring);
    return true;
}

static int producer_init(Producer *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {
        "producer_side", "producer_offset", "consumer_side", "consumer_offset", "slot_count", "eventfd", NULL};
    PyObject *producer_side, *consumer_side;
    Py_ssize_t producer_offset, consumer_offset;
    uint64_t slot_count;
    int eventfd = -1;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "OO&OO&O&|i:Producer", names, &producer_side, convert_offset, &producer_offset,
            &consumer_side, convert_offset, &consumer_offset, convert_u64, &slot_count, &eventfd))
        return -1;
    if (self->open) {
        PyErr_SetString(PyExc_ValueError, "the producer is open already");
        return -1;
    }
    if (PyObject_GetBuffer(producer_side, &self->producer_side, PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(consumer_side, &self->consumer_side, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&self->producer_side);
        return -1;
    }
    self->ring.slot_count = slot_count;
    self->ring.eventfd = eventfd;
    if (!producer_bind(self, producer_offset, consumer_offset)) {
        PyBuffer_Release(&self->consumer_side);
        PyBuffer_Release(&self->producer_side);
        return -1;
    }
    self->open = true;
    return 0;
}

static PyObject *producer_close(Producer *self, PyObject *Py_UNUSED(unused))
{
    if (self->open) {
        self->open = false;
        PyBuffer_Release(&self->consumer_side);
        PyBuffer_Release(&self->producer_side);
    }
    Py_RETURN_NONE;
}

static void producer_dealloc(Producer *self)
{
    Py_DECREF(producer_close(self, NULL));
    free_object((PyObject *)self);
}

static PyObject *bell_failed(int error)
{
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *producer_try_publish(Producer *self, PyObject *descriptor)
{
    Py_buffer view;
    if (PyObject_GetBuffer(descriptor, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (!producer_is_open(self)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    if (view.len > SLOT_BYTES) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "a descriptor has at most 128 bytes");
        return NULL;
    }
    int bell_error = 0;
    enum ring_status status = ring_try_publish(&self->ring, view.buf, (size_t)view.len, &bell_error);
    PyBuffer_Release(&view);
    if (status == RING_CORRUPT)
        return raise_corrupt((PyObject *)self, "the consumer's head is impossible");
    if (bell_error != 0)
        return bell_failed(bell_error);
    return PyBool_FromLong(status == RING_OK);
}

static PyObject *producer_try_publish_many(Producer *self, PyObject *slots)
{
    Py_buffer view;
    if (PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (!producer_is_open(self)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    if (view.len == 0 || view.len % SLOT_BYTES != 0) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "descriptors are 128 bytes each, one or more");
        return NULL;
    }
    int bell_error = 0;
    uint64_t published = 0;
    enum ring_status status =
        ring_try_publish_many(&self->ring, view.buf, (uint64_t)view.len / SLOT_BYTES, &published, &bell_error);
    PyBuffer_Release(&view);
    if (status == RING_CORRUPT)
        return raise_corrupt((PyObject *)self, "the consumer's head is impossible");
    if (bell_error != 0)
        return bell_failed(bell_error);
    return PyLong_FromUnsignedLongLong(published);
}

static PyObject *producer_ring(Producer *self, PyObject *Py_UNUSED(unused))
{
    if (!producer_is_open(self))
        return NULL;
    int error = ring_producer_ring(&self->ring);
    if (error != 0)
        return bell_failed(error);
    Py_RETURN_NONE;
}

static PyObject *producer_free_slots(Producer *self, PyObject *Py_UNUSED(unused))
{
    uint64_t count;
    if (!producer_is_open(self))
        return NULL;
    if (ring_free_slots(&self->ring, &count) == RING_CORRUPT)
        return raise_corrupt((PyObject *)self, "the consumer's head is impossible");
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *producer_published(Producer *self, void *Py_UNUSED(closure))
{
    return producer_is_open(self) ? PyLong_FromUnsignedLongLong(self->ring.tail) : NULL;
}

static PyMethodDef producer_methods[] = {
    {"try_publish", (PyCFunction)producer_try_publish, METH_O, "Publish a descriptor; False when full."},
    {"try_publish_many", (PyCFunction)producer_try_publish_many, METH_O,
     "Publish whole descriptors together; how many there was room for."},
    {"ring", (PyCFunction)producer_ring, METH_NOARGS, "Wake the consumer without a message."},
    {"free_slots", (PyCFunction)producer_free_slots, METH_NOARGS, "Free slots right now."},
    {"close", (PyCFunction)producer_close, METH_NOARGS, "Give both buffers back."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef producer_properties[] = {
    {"published", (getter)producer_published, NULL, "The ring's tail: messages ever published.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot producer_slots[] = {
    {Py_tp_doc, "The publishing end of a ring. One per ring, one thread at a time."},
    {Py_tp_init, producer_init},
    {Py_tp_dealloc, producer_dealloc},
    {Py_tp_methods, producer_methods},
    {Py_tp_getset, producer_properties},
    {0, NULL},
};

PyType_Spec producer_spec = {
    .name = "shm._core.Producer",
    .basicsize = sizeof(Producer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = producer_slots,
};
