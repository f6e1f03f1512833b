/* text_functions.c - shm._core's functions on request texts and media: base64, long strings, digests. */
#include "binding.h"

#include <string.h>

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

PyMethodDef text_functions[] = {
    WITH_KEYWORDS(base64_decode_into),
    {"base64_decoded_bytes", base64_decoded_bytes, METH_O, "See _core.pyi."},
    {"keyed_digest", keyed_digest, METH_VARARGS, "See _core.pyi."},
    {"find_long_strings", find_long_strings, METH_VARARGS, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};
