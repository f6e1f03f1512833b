/* module.c - shm._core: the module, argument checks, and its functions on headers, words, base64, strings and digests. */
#include "binding.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>

/* --- arguments --- */

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
static void *open_range(
    PyObject *buffer, int flags, Py_ssize_t offset, Py_ssize_t nbytes, const char *name, Py_buffer *view)
{
    if (PyObject_GetBuffer(buffer, view, flags) < 0)
        return NULL;
    void *start = checked_range(view, offset, nbytes, name);
    if (start == NULL)
        PyBuffer_Release(view);
    return start;
}

static void *open_header(PyObject *segment, int flags, Py_ssize_t offset, Py_buffer *view)
{
    return open_range(segment, flags, offset, BLOCK_HEADER_BYTES, "block header", view);
}

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

/* --- base64 --- */

/* The characters of a str or of a buffer. For a str view->obj stays NULL: the str owns the bytes. */
static bool open_source(PyObject *source, Py_buffer *view)
{
    if (!PyUnicode_Check(source))
        return PyObject_GetBuffer(source, view, PyBUF_SIMPLE) == 0;
    memset(view, 0, sizeof *view);
    /* No copy for ASCII. Anything else becomes UTF-8, whose bytes the decoder refuses by position. */
    view->buf = (void *)PyUnicode_AsUTF8AndSize(source, &view->len);
    if (view->buf != NULL)
        return true;
    if (PyErr_ExceptionMatches(PyExc_UnicodeError))
        PyErr_SetString(PyExc_ValueError, "base64: not ASCII"); /* the original quotes the content */
    return false;
}

static PyObject *base64_error(const struct base64_result *result)
{
    static const char *const reasons[] = {
        [BASE64_BAD_CHARACTER] = "a character outside the alphabet",
        [BASE64_BAD_PADDING] = "wrong padding",
        [BASE64_DATA_AFTER_PADDING] = "data after the padding",
        [BASE64_BAD_LENGTH] = "one character is left over",
        [BASE64_TARGET_TOO_SMALL] = "the target is too small",
    };
    PyErr_Format(PyExc_ValueError, "base64: %s at position %zd", reasons[result->status],
                 (Py_ssize_t)result->position);
    return NULL;
}

static PyObject *decode_between(const Py_buffer *source, const Py_buffer *target, Py_ssize_t target_offset)
{
    if (target_offset > target->len) {
        PyErr_SetString(PyExc_ValueError, "base64: target_offset is not inside the target");
        return NULL;
    }
    struct base64_result result;
    Py_BEGIN_ALLOW_THREADS
    result = base64_decode(source->buf, (size_t)source->len, (unsigned char *)target->buf + target_offset,
                           (size_t)(target->len - target_offset));
    Py_END_ALLOW_THREADS
    if (result.status != BASE64_OK)
        return base64_error(&result);
    return PyLong_FromSize_t(result.written);
}

static PyObject *base64_decode_into(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"source", "target", "target_offset", NULL};
    PyObject *source, *target;
    Py_ssize_t target_offset;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO&:base64_decode_into", names, &source, &target,
                                     convert_offset, &target_offset))
        return NULL;
    Py_buffer characters, bytes;
    if (!open_source(source, &characters))
        return NULL;
    PyObject *written = NULL;
    if (PyObject_GetBuffer(target, &bytes, PyBUF_WRITABLE) == 0) {
        written = decode_between(&characters, &bytes, target_offset);
        PyBuffer_Release(&bytes);
    }
    PyBuffer_Release(&characters);
    return written;
}

static PyObject *base64_decoded_bytes(PyObject *Py_UNUSED(module), PyObject *source)
{
    Py_buffer characters;
    if (!open_source(source, &characters))
        return NULL;
    size_t bound = base64_decoded_bound((size_t)characters.len);
    PyBuffer_Release(&characters);
    return PyLong_FromSize_t(bound);
}

/* --- strings --- */

static PyObject *extents_list(const struct string_extent *found, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(nn)", (Py_ssize_t)found[i].start, (Py_ssize_t)found[i].end);
        if (pair == NULL || PyList_SetItem(list, (Py_ssize_t)i, pair) != 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *find_long_strings(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *source;
    Py_ssize_t min_bytes;
    if (!PyArg_ParseTuple(args, "OO&:find_long_strings", &source, convert_offset, &min_bytes))
        return NULL;
    if (min_bytes == 0) {
        PyErr_SetString(PyExc_ValueError, "min_bytes must be at least 1");
        return NULL;
    }
    Py_buffer text;
    if (PyObject_GetBuffer(source, &text, PyBUF_SIMPLE) != 0)
        return NULL;
    size_t capacity = (size_t)(text.len / min_bytes) + 1, count;
    struct string_extent *found = PyMem_Calloc(capacity, sizeof *found);
    PyObject *list = NULL;
    if (found == NULL) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS
        count = long_strings(text.buf, (size_t)text.len, (size_t)min_bytes, found, capacity);
        Py_END_ALLOW_THREADS
        list = extents_list(found, count);
        PyMem_Free(found);
    }
    PyBuffer_Release(&text);
    return list;
}

/* --- the process --- */

static PyObject *set_parent_death_signal(PyObject *Py_UNUSED(module), PyObject *number)
{
    long signal = PyLong_AsLong(number);
    if (signal == -1 && PyErr_Occurred())
        return NULL;
    if (prctl(PR_SET_PDEATHSIG, (unsigned long)signal, 0, 0, 0) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* --- digests --- */

/* A piece of less is hashed sooner than the interpreter's lock is given away and had back. */
#define HASH_HOLDING_LOCK_BYTES 4096

static bool hash_pieces(PyObject *pieces, struct siphash *hash)
{
    Py_ssize_t count = PyList_Size(pieces);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer piece;
        PyObject *buffer = PyList_GetItem(pieces, i);
        if (buffer == NULL || PyObject_GetBuffer(buffer, &piece, PyBUF_SIMPLE) != 0)
            return false;
        if (piece.len < HASH_HOLDING_LOCK_BYTES) {
            siphash_update(hash, piece.buf, (size_t)piece.len);
        } else {
            Py_BEGIN_ALLOW_THREADS
            siphash_update(hash, piece.buf, (size_t)piece.len);
            Py_END_ALLOW_THREADS
        }
        PyBuffer_Release(&piece);
    }
    return count >= 0;
}

static PyObject *keyed_digest(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *pieces;
    Py_buffer key;
    if (!PyArg_ParseTuple(args, "y*O!:keyed_digest", &key, &PyList_Type, &pieces))
        return NULL;
    struct siphash hash;
    bool right_size = key.len == SIPHASH_BYTES;
    if (right_size)
        siphash_begin(&hash, key.buf);
    else
        PyErr_SetString(PyExc_ValueError, "a digest's key has 16 bytes");
    PyBuffer_Release(&key);
    if (!right_size || !hash_pieces(pieces, &hash))
        return NULL;
    unsigned char digest[SIPHASH_BYTES];
    siphash_end(&hash, digest);
    return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

/* --- the module --- */

#define WITH_KEYWORDS(function) \
    {#function, (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS, "See _core.pyi."}

static PyMethodDef functions[] = {
    WITH_KEYWORDS(header_load),
    WITH_KEYWORDS(header_store),
    WITH_KEYWORDS(header_store_state),
    WITH_KEYWORDS(header_store_rows_ready),
    WITH_KEYWORDS(header_finish),
    WITH_KEYWORDS(header_wait),
    WITH_KEYWORDS(word_load),
    WITH_KEYWORDS(word_store),
    WITH_KEYWORDS(base64_decode_into),
    {"base64_decoded_bytes", base64_decoded_bytes, METH_O, "See _core.pyi."},
    {"keyed_digest", keyed_digest, METH_VARARGS, "See _core.pyi."},
    {"find_long_strings", find_long_strings, METH_VARARGS, "See _core.pyi."},
    {"set_parent_death_signal", set_parent_death_signal, METH_O, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

static int add_constants(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        {"CACHE_LINE_BYTES", CACHE_LINE_BYTES},
        {"SLOT_BYTES", SLOT_BYTES},
        {"PRODUCER_SIDE_OVERHEAD_BYTES", PRODUCER_SIDE_OVERHEAD_BYTES},
        {"CONSUMER_SIDE_BYTES", CONSUMER_SIDE_BYTES},
        {"BLOCK_HEADER_BYTES", BLOCK_HEADER_BYTES},
        {"BLOCK_STATE_FREE", BLOCK_STATE_FREE},
    };
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return -1;
    return 0;
}

static int execute(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    PyObject *errors = PyImport_ImportModule("shm.errors");
    if (errors == NULL)
        return -1;
    state->region_corrupt = PyObject_GetAttrString(errors, "RegionCorrupt");
    Py_DECREF(errors);
    if (state->region_corrupt == NULL || add_ring_types(module) < 0)
        return -1;
    return add_constants(module);
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = PyModule_GetState(module);
    Py_VISIT(state->region_corrupt);
    return 0;
}

static int clear(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->region_corrupt);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shm._core",
    .m_doc = "Whole operations on shared memory, each with its memory order inside.",
    .m_size = sizeof(struct module_state),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
