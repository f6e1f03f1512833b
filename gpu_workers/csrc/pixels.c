/* pixels.c - gpu_workers._pixels: 8-bit RGB frames -> the patches that vision towers take, in one pass.
 *
 * Normalisation of 8-bit pixels has 256 results per channel. The caller computes them with the arithmetic that
 * the patches must equal; here their bit patterns are only moved. Called by gpu_workers/media/pixels.py.
 */
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define CHANNELS 3
#define LEVELS 256

struct shape {
    Py_ssize_t frames, height, width;     /* of the source: (frames, height, width, CHANNELS) */
    Py_ssize_t patch, merge, temporal;    /* of a patch: pixels a side, patches a side of a group, frames */
    Py_ssize_t element_bytes;             /* of the table's and the target's elements: 2 or 4 */
    Py_ssize_t steps, grid_high, grid_wide; /* patches along time, height, width */
};

/* One patch of one frame into its place for one moment: target is (CHANNELS, temporal, patch, patch).
 * A macro, because the loops must know the width of what they store; inlined with a constant patch size they
 * unroll, which doubles the speed. */
#define DEFINE_FILL_PATCH(NAME, ELEMENT)                                                                      \
    static inline __attribute__((always_inline)) void NAME(const struct shape *shape, Py_ssize_t patch,       \
                                                           const unsigned char *restrict source,              \
                                                           const ELEMENT *restrict table,                     \
                                                           ELEMENT *restrict target)                          \
    {                                                                                                         \
        for (Py_ssize_t channel = 0; channel < CHANNELS; channel++) {                                         \
            for (Py_ssize_t y = 0; y < patch; y++) {                                                          \
                const unsigned char *line = source + y * shape->width * CHANNELS + channel;                   \
                for (Py_ssize_t x = 0; x < patch; x++)                                                        \
                    target[y * patch + x] = table[line[x * CHANNELS]];                                        \
            }                                                                                                 \
            table += LEVELS;                                                                                  \
            target += shape->temporal * patch * patch;                                                        \
        }                                                                                                     \
    }                                                                                                         \
                                                                                                              \
    static void NAME##_of_any_size(const struct shape *shape, const unsigned char *source,                    \
                                   const ELEMENT *table, ELEMENT *target)                                     \
    {                                                                                                         \
        if (shape->patch == 14) /* Qwen2-VL, Qwen2.5-VL */                                                    \
            NAME(shape, 14, source, table, target);                                                           \
        else if (shape->patch == 16) /* Qwen3-VL */                                                           \
            NAME(shape, 16, source, table, target);                                                           \
        else                                                                                                  \
            NAME(shape, shape->patch, source, table, target);                                                 \
    }

DEFINE_FILL_PATCH(fill_patch_of_16_bits, uint16_t)
DEFINE_FILL_PATCH(fill_patch_of_32_bits, uint32_t)

/* The frame before once more: a still picture fills every moment, an odd video its last one. */
static void repeat_moment(const struct shape *shape, char *target)
{
    Py_ssize_t moment_bytes = shape->patch * shape->patch * shape->element_bytes;
    for (Py_ssize_t channel = 0; channel < CHANNELS; channel++) {
        char *moment = target + channel * shape->temporal * moment_bytes;
        memcpy(moment, moment - moment_bytes, (size_t)moment_bytes);
    }
}

/* All moments of the patch whose first pixel is at (top, left) of the frames from first_frame on. */
static void fill_all_moments(const struct shape *shape, const unsigned char *source, Py_ssize_t first_frame,
                             Py_ssize_t top, Py_ssize_t left, const void *table, char *target)
{
    Py_ssize_t moment_bytes = shape->patch * shape->patch * shape->element_bytes;
    for (Py_ssize_t moment = 0; moment < shape->temporal; moment++, target += moment_bytes) {
        Py_ssize_t frame = first_frame + moment;
        if (frame >= shape->frames) {
            repeat_moment(shape, target);
            continue;
        }
        const unsigned char *pixel =
            source + ((frame * shape->height + top) * shape->width + left) * CHANNELS;
        if (shape->element_bytes == sizeof(uint16_t))
            fill_patch_of_16_bits_of_any_size(shape, pixel, table, (uint16_t *)target);
        else
            fill_patch_of_32_bits_of_any_size(shape, pixel, table, (uint32_t *)target);
    }
}

/* Groups of merge x merge patches follow each other row by row; inside a group, its patches do. */
static void fill(const struct shape *shape, const unsigned char *source, const void *table, char *target)
{
    Py_ssize_t merge = shape->merge;
    Py_ssize_t row_bytes =
        CHANNELS * shape->temporal * shape->patch * shape->patch * shape->element_bytes;
    Py_ssize_t patches_of_a_step = shape->grid_high * shape->grid_wide;
    for (Py_ssize_t row = 0; row < shape->steps * patches_of_a_step; row++, target += row_bytes) {
        Py_ssize_t inside = row % (merge * merge), group = row % patches_of_a_step / (merge * merge);
        Py_ssize_t groups_wide = shape->grid_wide / merge;
        Py_ssize_t patch_y = group / groups_wide * merge + inside / merge;
        Py_ssize_t patch_x = group % groups_wide * merge + inside % merge;
        fill_all_moments(shape, source, row / patches_of_a_step * shape->temporal, patch_y * shape->patch,
                         patch_x * shape->patch, table, target);
    }
}

/* Whether a * b * ... fits; products of attacker-chosen sizes must not wrap around. */
static bool multiply(Py_ssize_t *product, Py_ssize_t factor)
{
    return !__builtin_mul_overflow(*product, factor, product);
}

/* Derive the grid and check all sizes against the buffers. False with ValueError set. */
static bool check(struct shape *shape, const Py_buffer *source, const Py_buffer *table, const Py_buffer *target)
{
    Py_ssize_t unit, source_bytes = CHANNELS, target_bytes = CHANNELS;
    if (shape->frames < 1 || shape->height < 1 || shape->width < 1 || shape->patch < 1 || shape->merge < 1 ||
        shape->temporal < 1) {
        PyErr_SetString(PyExc_ValueError, "every size must be at least 1");
        return false;
    }
    if (__builtin_mul_overflow(shape->patch, shape->merge, &unit) || shape->height % unit != 0 ||
        shape->width % unit != 0) {
        PyErr_SetString(PyExc_ValueError, "height and width must be multiples of patch * merge");
        return false;
    }
    if (table->len != 2 * CHANNELS * LEVELS && table->len != 4 * CHANNELS * LEVELS) {
        PyErr_SetString(PyExc_ValueError, "the table must have 3 * 256 elements of 2 or 4 bytes");
        return false;
    }
    shape->element_bytes = table->len / (CHANNELS * LEVELS);
    shape->grid_high = shape->height / shape->patch;
    shape->grid_wide = shape->width / shape->patch;
    shape->steps = (shape->frames - 1) / shape->temporal + 1;
    bool fits = multiply(&source_bytes, shape->frames) && multiply(&source_bytes, shape->height) &&
                multiply(&source_bytes, shape->width) && multiply(&target_bytes, shape->steps) &&
                multiply(&target_bytes, shape->temporal) && multiply(&target_bytes, shape->height) &&
                multiply(&target_bytes, shape->width) && multiply(&target_bytes, shape->element_bytes);
    if (!fits || source->len != source_bytes || target->len != target_bytes) {
        PyErr_SetString(PyExc_ValueError, "frames or patches are not of the size that the arguments say");
        return false;
    }
    /* Elements are read and written as integers of their width. */
    if ((uintptr_t)table->buf % (size_t)shape->element_bytes != 0 ||
        (uintptr_t)target->buf % (size_t)shape->element_bytes != 0) {
        PyErr_SetString(PyExc_ValueError, "table and patches must be aligned to their elements");
        return false;
    }
    return true;
}

static PyObject *patchify(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct shape shape = {0};
    Py_buffer source, table, target;
    bool checked;
    if (!PyArg_ParseTuple(arguments, "y*y*w*nnnnnn:patchify", &source, &table, &target, &shape.frames,
                          &shape.height, &shape.width, &shape.patch, &shape.merge, &shape.temporal))
        return NULL;
    checked = check(&shape, &source, &table, &target);
    if (checked) {
        Py_BEGIN_ALLOW_THREADS;
        fill(&shape, source.buf, table.buf, target.buf);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&table);
    PyBuffer_Release(&target);
    if (!checked)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"patchify", patchify, METH_VARARGS,
     "patchify(frames, table, patches, frame_count, height, width, patch, merge, temporal): see _pixels.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "gpu_workers._pixels",
    .m_doc = "8-bit frames to normalised patches.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__pixels(void)
{
    return PyModuleDef_Init(&definition);
}
