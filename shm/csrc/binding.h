/* binding.h - what the files of shm._core's Python side share; binding.c has the functions. */
#ifndef ENCODERD_BINDING_H
#define ENCODERD_BINDING_H

#include <Python.h>

#include "core.h"

/* OWNER: the module object. */
struct module_state {
    PyObject *region_corrupt; /* shm.errors.RegionCorrupt */
};

/* O& converters: any int, out of range is ValueError (shared memory is input, so are its offsets). */
int convert_offset(PyObject *number, void *offset); /* Py_ssize_t >= 0 */
int convert_u64(PyObject *number, void *value);
int convert_u32(PyObject *number, void *value);

/* nbytes at offset of view, checked against it and aligned to 8. NULL with ValueError set. */
void *checked_range(const Py_buffer *view, Py_ssize_t offset, Py_ssize_t nbytes, const char *name);

/* The same inside a buffer that it opens into *view; the caller releases it. NULL with an exception set. */
void *open_range(
    PyObject *buffer, int flags, Py_ssize_t offset, Py_ssize_t nbytes, const char *name, Py_buffer *view);
void *open_header(PyObject *segment, int flags, Py_ssize_t offset, Py_buffer *view);

/* NULL with RegionCorrupt set. self: of one of the module's types. */
PyObject *raise_corrupt(PyObject *self, const char *message);

/* Both sides of a ring inside their buffers. False with ValueError set. */
bool find_sides(
    const Py_buffer *producer_side, Py_ssize_t producer_offset, const Py_buffer *consumer_side,
    Py_ssize_t consumer_offset, uint64_t slot_count, void **producer, void **consumer);

/* The end of a type's dealloc. */
void free_object(PyObject *self);

#define WITH_KEYWORDS(function) \
    {#function, (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS, "See _core.pyi."}

/* What module.c puts together. */
extern PyMethodDef header_functions[], text_functions[];
extern PyType_Spec producer_spec, consumer_spec;

#endif
