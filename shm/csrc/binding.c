/* binding.c - what every function and type of shm._core does with its arguments, and how it says RegionCorrupt. */
#include "binding.h"

static int out_of_range(const char *message)
{
    if (PyErr_ExceptionMatches(PyExc_OverflowError))
        PyErr_SetString(PyExc_ValueError, message);
    return 0;
}

int convert_offset(PyObject *number, void *offset)
{
    Py_ssize_t value = PyLong_AsSsize_t(number);
    if (value == -1 && PyErr_Occurred())
        return out_of_range("offset out of range");
    if (value < 0) {
        PyErr_SetString(PyExc_ValueError, "offset out of range");
        return 0;
    }
    *(Py_ssize_t *)offset = value;
    return 1;
}

int convert_u64(PyObject *number, void *value)
{
    unsigned long long wide = PyLong_AsUnsignedLongLong(number);
    if (wide == (unsigned long long)-1 && PyErr_Occurred())
        return out_of_range("not an unsigned 64-bit value");
    *(uint64_t *)value = wide;
    return 1;
}

int convert_u32(PyObject *number, void *value)
{
    uint64_t wide;
    if (!convert_u64(number, &wide))
        return 0;
    if (wide > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "not an unsigned 32-bit value");
        return 0;
    }
    *(uint32_t *)value = (uint32_t)wide;
    return 1;
}

void *checked_range(const Py_buffer *view, Py_ssize_t offset, Py_ssize_t nbytes, const char *name)
{
    if (offset > view->len || nbytes > view->len - offset) {
        PyErr_Format(PyExc_ValueError, "the %s (%zd bytes at %zd) is not inside the buffer's %zd bytes", name,
                     nbytes, offset, view->len);
        return NULL;
    }
    char *start = (char *)view->buf + offset;
    if ((uintptr_t)start % sizeof(uint64_t) != 0) {
        PyErr_Format(PyExc_ValueError, "the %s at %zd is not aligned to 8 bytes", name, offset);
        return NULL;
    }
    return start;
}

/* nbytes at offset of buffer; the caller releases view when it is done. NULL with an exception set. */
void *open_range(
    PyObject *buffer, int flags, Py_ssize_t offset, Py_ssize_t nbytes, const char *name, Py_buffer *view)
{
    if (PyObject_GetBuffer(buffer, view, flags) < 0)
        return NULL;
    void *start = checked_range(view, offset, nbytes, name);
    if (start == NULL)
        PyBuffer_Release(view);
    return start;
}

void *open_header(PyObject *segment, int flags, Py_ssize_t offset, Py_buffer *view)
{
    return open_range(segment, flags, offset, BLOCK_HEADER_BYTES, "block header", view);
}
PyObject *raise_corrupt(PyObject *self, const char *message)
{
    /* Neither type can be subclassed, so the type of self is the one made with our module. */
    struct module_state *state = PyType_GetModuleState(Py_TYPE(self));
    PyErr_SetString(state->region_corrupt, message);
    return NULL;
}

/* Both sides of a ring inside their buffers. False with ValueError set. */
bool find_sides(
    const Py_buffer *producer_side, Py_ssize_t producer_offset, const Py_buffer *consumer_side,
    Py_ssize_t consumer_offset, uint64_t slot_count, void **producer, void **consumer)
{
    if (slot_count == 0 || (slot_count & (slot_count - 1)) != 0 || slot_count > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "slot_count must be a power of two");
        return false;
    }
    Py_ssize_t producer_bytes = PRODUCER_SIDE_OVERHEAD_BYTES + (Py_ssize_t)slot_count * SLOT_BYTES;
    *producer = checked_range(producer_side, producer_offset, producer_bytes, "producer side");
    if (*producer == NULL)
        return false;
    *consumer = checked_range(consumer_side, consumer_offset, CONSUMER_SIDE_BYTES, "consumer side");
    return *consumer != NULL;
}

void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}
