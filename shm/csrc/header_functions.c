/* header_functions.c - shm._core's functions on block headers and single words: arguments checked, then block.c. */
#include "binding.h"

#include <errno.h>
#include <string.h>

/* --- block headers --- */

static PyObject *header_load(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "offset", NULL};
    PyObject *segment;
    Py_ssize_t offset;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&:header_load", names, &segment, convert_offset, &offset))
        return NULL;
    Py_buffer view;
    const struct block_header *header = open_header(segment, PyBUF_SIMPLE, offset, &view);
    if (header == NULL)
        return NULL;
    struct block_fields fields;
    bool consistent = block_load(header, &fields);
    PyBuffer_Release(&view);
    if (!consistent) {
        struct module_state *state = PyModule_GetState(module);
        PyErr_SetString(state->region_corrupt, "a block header never holds still");
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)&fields, sizeof fields);
}

static bool copy_fields(PyObject *source, struct block_fields *fields)
{
    Py_buffer view;
    if (PyObject_GetBuffer(source, &view, PyBUF_SIMPLE) < 0)
        return false;
    bool right_size = view.len == sizeof *fields;
    if (right_size)
        memcpy(fields, view.buf, sizeof *fields);
    else
        PyErr_SetString(PyExc_ValueError, "a block header has 64 bytes");
    PyBuffer_Release(&view);
    return right_size;
}

static PyObject *header_store(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "offset", "header", NULL};
    PyObject *segment, *source;
    Py_ssize_t offset;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "OO&O:header_store", names, &segment, convert_offset, &offset, &source))
        return NULL;
    struct block_fields fields;
    if (!copy_fields(source, &fields))
        return NULL;
    Py_buffer view;
    struct block_header *header = open_header(segment, PyBUF_WRITABLE, offset, &view);
    if (header == NULL)
        return NULL;
    block_store(header, &fields);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *header_store_state(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "offset", "state", NULL};
    PyObject *segment;
    Py_ssize_t offset;
    uint32_t state;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&O&:header_store_state", names, &segment,
                                     convert_offset, &offset, convert_u32, &state))
        return NULL;
    Py_buffer view;
    struct block_header *header = open_header(segment, PyBUF_WRITABLE, offset, &view);
    if (header == NULL)
        return NULL;
    block_store_state(header, state);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *header_store_rows_ready(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "offset", "rows_ready", NULL};
    PyObject *segment;
    Py_ssize_t offset;
    uint32_t rows_ready;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&O&:header_store_rows_ready", names, &segment,
                                     convert_offset, &offset, convert_u32, &rows_ready))
        return NULL;
    Py_buffer view;
    struct block_header *header = open_header(segment, PyBUF_WRITABLE, offset, &view);
    if (header == NULL)
        return NULL;
    block_store_rows_ready(header, rows_ready);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *header_finish(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "offset", "rows_ready", "state", NULL};
    PyObject *segment;
    Py_ssize_t offset;
    uint32_t rows_ready, state;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&O&O&:header_finish", names, &segment, convert_offset,
                                     &offset, convert_u32, &rows_ready, convert_u32, &state))
        return NULL;
    Py_buffer view;
    struct block_header *header = open_header(segment, PyBUF_WRITABLE, offset, &view);
    if (header == NULL)
        return NULL;
    block_finish(header, rows_ready, state);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* block_wait without the GIL; signals are handled on the way (EINTR: a handler raised). */
static int wait_without_gil(const struct block_header *header, uint32_t seen, int64_t timeout_ns)
{
    int64_t deadline_ns = clock_deadline_ns(timeout_ns);
    int error;
    do {
        Py_BEGIN_ALLOW_THREADS
        error = block_wait(header, seen, deadline_ns);
        Py_END_ALLOW_THREADS
    } while (error == EINTR && PyErr_CheckSignals() == 0);
    return error;
}

static PyObject *header_wait(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "offset", "seen_change_seq", "timeout_ns", NULL};
    PyObject *segment;
    Py_ssize_t offset;
    uint32_t seen;
    long long timeout_ns;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&O&L:header_wait", names, &segment, convert_offset,
                                     &offset, convert_u32, &seen, &timeout_ns))
        return NULL;
    Py_buffer view;
    const struct block_header *header = open_header(segment, PyBUF_SIMPLE, offset, &view);
    if (header == NULL)
        return NULL;
    int error = wait_without_gil(header, seen, timeout_ns);
    PyBuffer_Release(&view);
    if (error == EINTR)
        return NULL;
    if (error != 0 && error != ETIMEDOUT) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(error == 0);
}

/* --- single words --- */

static PyObject *word_load(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"region", "offset", NULL};
    PyObject *region;
    Py_ssize_t offset;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&:word_load", names, &region, convert_offset, &offset))
        return NULL;
    Py_buffer view;
    const _Atomic uint64_t *word = open_range(region, PyBUF_SIMPLE, offset, sizeof *word, "word", &view);
    if (word == NULL)
        return NULL;
    /* PAIRS: word. Whatever its writer stored before it is visible. */
    uint64_t value = atomic_load_explicit(word, memory_order_acquire);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(value);
}

static PyObject *word_store(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"region", "offset", "value", NULL};
    PyObject *region;
    Py_ssize_t offset;
    uint64_t value;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO&O&:word_store", names, &region, convert_offset,
                                     &offset, convert_u64, &value))
        return NULL;
    Py_buffer view;
    _Atomic uint64_t *word = open_range(region, PyBUF_WRITABLE, offset, sizeof *word, "word", &view);
    if (word == NULL)
        return NULL;
    /* PAIRS: word. What was written before it is visible to whoever loads this value. */
    atomic_store_explicit(word, value, memory_order_release);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

PyMethodDef header_functions[] = {
    WITH_KEYWORDS(header_load),
    WITH_KEYWORDS(header_store),
    WITH_KEYWORDS(header_store_state),
    WITH_KEYWORDS(header_store_rows_ready),
    WITH_KEYWORDS(header_finish),
    WITH_KEYWORDS(header_wait),
    WITH_KEYWORDS(word_load),
    WITH_KEYWORDS(word_store),
    {NULL, NULL, 0, NULL},
};
