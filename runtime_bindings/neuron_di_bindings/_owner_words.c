/* Words that several processes change at once, in memory that they all map; owner_words.py says
 * what they mean.
 *
 * A `Map` is as long as its file may ever become: its addresses stay when the file grows. Whoever
 * reads or writes behind the end of the file is killed by SIGBUS, so the caller knows where that is.
 * It is unmapped when the last object that shows its memory is gone.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

_Static_assert(__atomic_always_lock_free(8, 0), "a lock inside of a process protects no other");

typedef struct {
    PyObject_HEAD
    char *start;
    Py_ssize_t num_bytes;
    int is_writable;
} Map;

static PyObject *map_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "num_bytes", "writable", NULL};
    int fd, is_writable = 1;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in|p", names, &fd, &num_bytes, &is_writable))
        return NULL;
    if (num_bytes <= 0) {
        PyErr_SetString(PyExc_ValueError, "a map has at least one byte");
        return NULL;
    }
    Map *self = (Map *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    int protection = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *start = mmap(NULL, (size_t)num_bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (start == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->start = start;
    self->num_bytes = num_bytes;
    self->is_writable = is_writable;
    return (PyObject *)self;
}

static void map_dealloc(Map *self)
{
    if (self->start != NULL)
        munmap(self->start, (size_t)self->num_bytes);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static int map_getbuffer(Map *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->start, self->num_bytes,
                             !self->is_writable, flags);
}

static PyObject *map_populate(Map *self, PyObject *args)
{
    Py_ssize_t offset, length;
    if (!PyArg_ParseTuple(args, "nn", &offset, &length))
        return NULL;
    if (offset < 0 || length < 0 || offset > self->num_bytes - length) {
        PyErr_SetString(PyExc_ValueError, "outside of the map");
        return NULL;
    }
    const Py_ssize_t page = sysconf(_SC_PAGESIZE), first = offset / page * page;
    char *start = self->start + first;
    const int advice = self->is_writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
    if (length > 0 && madvise(start, (size_t)(length + offset - first), advice) != 0)
        failed = errno;
    Py_END_ALLOW_THREADS
    if (failed != 0 && failed != EINVAL) { /* EINVAL: an older kernel, which does it at first use */
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef map_methods[] = {
    {"populate", (PyCFunction)map_populate, METH_VARARGS,
     "populate(offset, length): make these bytes present, and mapped. OSError when the memory is not there."},
    {NULL},
};

static PyType_Slot map_slots[] = {
    {Py_tp_new, map_new},
    {Py_tp_dealloc, map_dealloc},
    {Py_tp_methods, map_methods},
    {Py_bf_getbuffer, map_getbuffer},
    {Py_tp_doc, "Map(fd, num_bytes, writable=True): a file's bytes, shared, as long as it may become."},
    {0},
};

static PyType_Spec map_spec = {
    .name = "neuron_di_bindings._owner_words.Map",
    .basicsize = sizeof(Map),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = map_slots,
};

/* Whether all ids lie in the words, and the lists are as long as they should be. */
static int check(const Py_buffer *words, const Py_buffer *ids, Py_ssize_t other_items)
{
    const Py_ssize_t num_words = words->len / 8, num_ids = ids->len / 8;
    const int64_t *id = ids->buf;
    if (num_ids != other_items) {
        PyErr_SetString(PyExc_ValueError, "the lists differ in length");
        return 0;
    }
    for (Py_ssize_t i = 0; i < num_ids; i++) {
        if (id[i] < 0 || id[i] >= num_words) {
            PyErr_SetString(PyExc_IndexError, "no such word");
            return 0;
        }
    }
    return 1;
}

static PyObject *swap(PyObject *module, PyObject *args)
{
    Py_buffer words, ids, expected, desired, swapped;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*y*y*w*", &words, &ids, &expected, &desired, &swapped))
        return NULL;
    PyObject *result = NULL;
    if (check(&words, &ids, expected.len / 8) && check(&words, &ids, desired.len / 8) &&
        check(&words, &ids, swapped.len)) {
        uint64_t *word = words.buf;
        const int64_t *id = ids.buf;
        const uint64_t *before = expected.buf, *after = desired.buf;
        Py_ssize_t count = 0;
        for (Py_ssize_t i = 0; i < ids.len / 8; i++) {
            uint64_t found = before[i];
            const int has = __atomic_compare_exchange_n(&word[id[i]], &found, after[i], 0,
                                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
            ((uint8_t *)swapped.buf)[i] = (uint8_t)has;
            count += has;
        }
        result = PyLong_FromSsize_t(count);
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&expected);
    PyBuffer_Release(&desired);
    PyBuffer_Release(&swapped);
    return result;
}

static PyObject *load(PyObject *module, PyObject *args)
{
    Py_buffer words, ids, out;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*", &words, &ids, &out))
        return NULL;
    PyObject *result = NULL;
    if (check(&words, &ids, out.len / 8)) {
        const uint64_t *word = words.buf;
        const int64_t *id = ids.buf;
        for (Py_ssize_t i = 0; i < ids.len / 8; i++)
            ((uint64_t *)out.buf)[i] = __atomic_load_n(&word[id[i]], __ATOMIC_SEQ_CST);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&out);
    return result;
}

static PyObject *fence(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyObject *release(PyObject *module, PyObject *args)
{
    int fd, failed;
    long long offset, length;
    (void)module;
    if (!PyArg_ParseTuple(args, "iLL", &fd, &offset, &length))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
    Py_END_ALLOW_THREADS
    if (failed != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"swap", swap, METH_VARARGS,
     "swap(words, ids, expected, desired, swapped): compare and swap each; returns how many did."},
    {"load", load, METH_VARARGS, "load(words, ids, out): read each."},
    {"fence", fence, METH_NOARGS,
     "fence(): what is read and written before comes before what is after, for every process."},
    {"release", release, METH_VARARGS,
     "release(fd, offset, length): give a file's memory back; it reads as zeros then."},
    {NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_owner_words",
    .m_doc = "Words that several processes change at once.",
    .m_size = 0,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__owner_words(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *type = PyType_FromSpec(&map_spec);
    if (type == NULL || PyModule_AddObject(module, "Map", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
