/* module.c - shm._core: what belongs to the module itself. Its types and functions are in files of their own. */
#include "binding.h"
#include <sys/prctl.h>

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

/* --- the module --- */

static PyMethodDef process_functions[] = {
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

static int add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    int status = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return status;
}

static int execute(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    PyObject *errors = PyImport_ImportModule("shm.errors");
    if (errors == NULL)
        return -1;
    state->region_corrupt = PyObject_GetAttrString(errors, "RegionCorrupt");
    Py_DECREF(errors);
    if (state->region_corrupt == NULL)
        return -1;
    if (add_type(module, &producer_spec) < 0 || add_type(module, &consumer_spec) < 0)
        return -1;
    if (PyModule_AddFunctions(module, header_functions) < 0 || PyModule_AddFunctions(module, text_functions) < 0)
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
    .m_methods = process_functions,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
