/* binding.h - what module.c and ring_types.c share: module state, argument converters, checked pointers. */
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

/* Add Producer and Consumer. 0 or -1. */
int add_ring_types(PyObject *module);

#endif
