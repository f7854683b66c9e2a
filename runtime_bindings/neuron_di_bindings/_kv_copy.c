/* Copies of KV, and what is reckoned for them, for Python: run_copy.py and block_runs.py say what it
 * all means. A list is an array of 64-bit numbers without gaps; of another, TypeError or
 * ValueError. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <ctype.h>
#include <stdlib.h>

#include "kv_copy.c"

#define LISTS_MAX 5

typedef struct {
    Py_buffer buffers[LISTS_MAX];
    int num_open;
} Lists;

static void close_lists(Lists *lists) {
    while (lists->num_open > 0) PyBuffer_Release(&lists->buffers[--lists->num_open]);
}

static int is_list(const Py_buffer *buffer) {
    const char *format = buffer->format;
    return buffer->ndim == 1 && buffer->itemsize == 8 && format != NULL && strlen(format) == 1 &&
           strchr("lqLQ", format[0]) != NULL;
}

/* `num_written`: so many of the last ones are written to. */
static int open_lists(Lists *lists, PyObject *const *objects, int num_lists, int num_written) {
    lists->num_open = 0;
    for (int i = 0; i < num_lists; i++) {
        const int is_written = i >= num_lists - num_written;
        const int flags = PyBUF_ND | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
        Py_buffer *buffer = &lists->buffers[i];
        if (PyObject_GetBuffer(objects[i], buffer, flags) < 0) {
            close_lists(lists);
            return 0;
        }
        lists->num_open++;
        if (!is_list(buffer)) {
            PyErr_SetString(PyExc_TypeError, "no list of 64-bit numbers");
            close_lists(lists);
            return 0;
        }
    }
    return 1;
}

static Py_ssize_t count_of(const Lists *lists, int i) { return lists->buffers[i].len / 8; }

/* Whether these lists are as long as the first of them, and of signed numbers. */
static int are_even(const Lists *lists, int first, int end) {
    for (int i = first; i < end; i++)
        if (count_of(lists, i) != count_of(lists, first) || isupper(lists->buffers[i].format[0])) {
            PyErr_SetString(PyExc_ValueError, "the lists differ");
            return 0;
        }
    return 1;
}

static int has_count(Py_ssize_t num_args, Py_ssize_t expected) {
    if (num_args != expected) PyErr_SetString(PyExc_TypeError, "another number of arguments");
    return num_args == expected;
}

static int read_numbers(PyObject *const *objects, int64_t *found, int count) {
    for (int i = 0; i < count; i++) {
        found[i] = PyLong_AsLongLong(objects[i]);
        if (found[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

/* A number of Python's own: to ask another would run code, which may change the list. */
static int is_number(PyObject *object) {
    if (!PyLong_Check(object)) PyErr_SetString(PyExc_TypeError, "no number");
    return PyLong_Check(object);
}

static void copy_listed(const int64_t *addresses, const Lists *lists) {
    const Py_buffer *list = lists->buffers;
    Py_BEGIN_ALLOW_THREADS
    copy_runs((char *)(intptr_t)addresses[0], (const char *)(intptr_t)addresses[1], list[0].buf,
              list[1].buf, list[2].buf, count_of(lists, 0));
    Py_END_ALLOW_THREADS
}

static PyObject *py_copy(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    int64_t addresses[2];
    Lists lists;
    if (!has_count(num_args, 5) || !read_numbers(args, addresses, 2) ||
        !open_lists(&lists, args + 2, 3, 0))
        return NULL;
    const int is_right = are_even(&lists, 0, 3);
    if (is_right) copy_listed(addresses, &lists);
    close_lists(&lists);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

/* What each word of a table is to be: `tag` | a number, which has no bit of the tag's. */
typedef struct {
    PyObject *items;
    uint64_t tag, number_max;
} Promise;

/* From the last three arguments. To be closed. */
static int open_promise(Promise *promise, PyObject *const *args) {
    promise->tag = PyLong_AsUnsignedLongLong(args[1]);
    promise->number_max = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return 0;
    promise->items = PySequence_Fast(args[0], "no list of numbers");
    return promise->items != NULL;
}

static void close_promise(Promise *promise) { Py_DECREF(promise->items); }

/* Whether words ids[i] are as promised, by two of the lists. A new reference, or NULL. */
static PyObject *is_kept(const Promise *promise, const Lists *lists, int table) {
    const uint64_t *words = lists->buffers[table].buf;
    const int64_t *ids = lists->buffers[table + 1].buf;
    const Py_ssize_t count = count_of(lists, table + 1);
    if (count != PySequence_Fast_GET_SIZE(promise->items)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= count_of(lists, table)) {
            PyErr_SetString(PyExc_IndexError, "no such word");
            return NULL;
        }
        PyObject *item = PySequence_Fast_GET_ITEM(promise->items, i);
        if (!is_number(item)) return NULL;
        const uint64_t number = PyLong_AsUnsignedLongLong(item);
        if (number == UINT64_MAX && PyErr_Occurred()) { /* negative, or too large */
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
        const uint64_t word = __atomic_load_n(&words[ids[i]], __ATOMIC_SEQ_CST);
        if (number > promise->number_max || word != (promise->tag | number)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *py_are_words(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Promise promise;
    Lists lists;
    if (!has_count(num_args, 5) || !open_lists(&lists, args, 2, 0)) return NULL;
    PyObject *result = NULL;
    if (open_promise(&promise, args + 2)) {
        result = is_kept(&promise, &lists, 0);
        close_promise(&promise);
    }
    close_lists(&lists);
    return result;
}

static PyObject *py_copy_promised(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    int64_t addresses[2];
    Promise promise;
    Lists lists;
    if (!has_count(num_args, 10) || !read_numbers(args, addresses, 2) ||
        !open_lists(&lists, args + 2, 5, 0))
        return NULL;
    PyObject *result = NULL;
    if (are_even(&lists, 0, 3) && open_promise(&promise, args + 7)) {
        copy_listed(addresses, &lists);
        result = is_kept(&promise, &lists, 3); /* after the last byte */
        close_promise(&promise);
    }
    close_lists(&lists);
    return result;
}

static PyObject *py_place(PyObject *module, PyObject *argument) {
    (void)module;
    Py_buffer buffer;
    if (PyObject_GetBuffer(argument, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    const int is_right = buffer.len == sizeof(Placing);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        place(buffer.buf);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "no placing");
    }
    PyBuffer_Release(&buffer);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

static int read_items(PyObject *items, int64_t *out, Py_ssize_t count) {
    if (count != PySequence_Fast_GET_SIZE(items)) {
        PyErr_SetString(PyExc_ValueError, "the lists differ in length");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(items, i);
        if (!is_number(item) || !read_numbers(&item, &out[i], 1)) return 0;
    }
    return 1;
}

static PyObject *py_read(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Lists lists;
    if (!has_count(num_args, 2) || !open_lists(&lists, args + 1, 1, 1)) return NULL;
    PyObject *items = PySequence_Fast(args[0], "no list of numbers");
    const int is_right = items && read_items(items, lists.buffers[0].buf, count_of(&lists, 0));
    Py_XDECREF(items);
    close_lists(&lists);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

/* What is beyond 63 bits wraps around: runs are checked before anything is copied. */
static int64_t times(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }
static int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static Py_ssize_t join_blocks(const Lists *lists, int64_t block_bytes) {
    const Py_buffer *list = lists->buffers;
    const int64_t *sources = list[0].buf, *destinations = list[1].buf;
    int64_t *from = list[2].buf, *to = list[3].buf, *lengths = list[4].buf;
    Py_ssize_t num_runs = 0;
    for (Py_ssize_t i = 0; i < count_of(lists, 0); i++) {
        if (i > 0 && sources[i] == plus(sources[i - 1], 1) &&
            destinations[i] == plus(destinations[i - 1], 1)) {
            lengths[num_runs - 1] = plus(lengths[num_runs - 1], block_bytes);
            continue;
        }
        from[num_runs] = times(sources[i], block_bytes);
        to[num_runs] = times(destinations[i], block_bytes);
        lengths[num_runs++] = block_bytes;
    }
    return num_runs;
}

static PyObject *py_join_blocks(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    int64_t block_bytes;
    Lists lists;
    if (!has_count(num_args, 6) || !read_numbers(args + 5, &block_bytes, 1) ||
        !open_lists(&lists, args, 5, 3))
        return NULL;
    PyObject *result = NULL;
    if (are_even(&lists, 0, 5)) result = PyLong_FromSsize_t(join_blocks(&lists, block_bytes));
    close_lists(&lists);
    return result;
}

/* Sets bits first … end - 1. Whether all of them were free. */
static int take(uint64_t *bits, uint64_t first, uint64_t end) {
    for (uint64_t i = first / 64; i <= (end - 1) / 64; i++) {
        uint64_t wanted = UINT64_MAX;
        if (i == first / 64) wanted &= UINT64_MAX << first % 64;
        if (i == (end - 1) / 64) wanted &= UINT64_MAX >> (63 - (end - 1) % 64);
        if (bits[i] & wanted) return 0;
        bits[i] |= wanted;
    }
    return 1;
}

#define BITS_MAX (1 << 20)

/* Of runs within a memory, in any order: whether they surely do not overlap. There is a bit for as
 * many bytes as all starts and lengths are multiples of: blocks are large, so these are few. */
static int are_apart(const int64_t *starts, const int64_t *lengths, Py_ssize_t count) {
    int64_t all = 0, first = INT64_MAX, end = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        all |= starts[i] | lengths[i];
        if (starts[i] < first) first = starts[i];
        if (starts[i] + lengths[i] > end) end = starts[i] + lengths[i];
    }
    const int shift = __builtin_ctzll((uint64_t)all);
    const uint64_t num_bits = (uint64_t)(end - first) >> shift;
    uint64_t *bits = num_bits <= BITS_MAX ? calloc(num_bits / 64 + 1, sizeof *bits) : NULL;
    int are_free = bits != NULL;
    for (Py_ssize_t i = 0; are_free && i < count; i++) {
        const uint64_t start = (uint64_t)(starts[i] - first) >> shift;
        are_free = take(bits, start, start + ((uint64_t)lengths[i] >> shift));
    }
    free(bits);
    return are_free;
}

/* No sum of two numbers that were not checked: it may be beyond 63 bits. */
static int is_inside(int64_t offset, int64_t length, int64_t num_bytes) {
    return offset >= 0 && length <= num_bytes && offset <= num_bytes - length;
}

static int are_sound(const Lists *lists, int64_t source_bytes, int64_t destination_bytes) {
    const Py_buffer *list = lists->buffers;
    const int64_t *sources = list[0].buf, *destinations = list[1].buf, *lengths = list[2].buf;
    const Py_ssize_t count = count_of(lists, 0);
    int64_t free_from = 0;
    int is_in_order = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (lengths[i] <= 0 || !is_inside(sources[i], lengths[i], source_bytes) ||
            !is_inside(destinations[i], lengths[i], destination_bytes))
            return 0;
        is_in_order &= destinations[i] >= free_from;
        free_from = destinations[i] + lengths[i];
    }
    return count > 0 && (is_in_order || are_apart(destinations, lengths, count));
}

static int is_below(const Lists *lists, int i, int64_t end) {
    const int64_t *ids = lists->buffers[i].buf;
    int are = 1;
    for (Py_ssize_t k = 0; k < count_of(lists, i); k++) are &= ids[k] >= 0 && ids[k] < end;
    return are;
}

static PyObject *py_are_below(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    int64_t end;
    Lists lists;
    if (!has_count(num_args, 2) || !read_numbers(args + 1, &end, 1) ||
        !open_lists(&lists, args, 1, 0))
        return NULL;
    const int are = is_below(&lists, 0, end);
    close_lists(&lists);
    return PyBool_FromLong(are);
}

static PyObject *py_are_sound(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    int64_t ends[3]; /* of the source's bytes, the destination's, and ids */
    Lists lists;
    if (!has_count(num_args, 7) || !read_numbers(args + 4, ends, 3) ||
        !open_lists(&lists, args, 4, 0))
        return NULL;
    PyObject *result = NULL;
    if (are_even(&lists, 0, 3))
        result = PyBool_FromLong(is_below(&lists, 3, ends[2]) &&
                                 are_sound(&lists, ends[0], ends[1]));
    close_lists(&lists);
    return result;
}

typedef uint64_t (*Hash)(const void *bytes, size_t length, uint64_t seed);

static void hash_blocks(Hash hash, const char *base, int64_t block_bytes, uint64_t seed,
                        const int64_t *ids, uint64_t *hashes, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        hashes[i] = hash(base + ids[i] * block_bytes, block_bytes, seed + i);
}

static PyObject *py_hash_blocks(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    int64_t numbers[3]; /* the addresses of the function and of block 0, and bytes of a block */
    Lists lists;
    if (!has_count(num_args, 7) || !read_numbers(args, numbers, 3)) return NULL;
    const uint64_t seed = PyLong_AsUnsignedLongLong(args[3]);
    if (seed == UINT64_MAX && PyErr_Occurred()) return NULL;
    const int is_long = PyObject_IsTrue(args[6]);
    if (is_long < 0 || !open_lists(&lists, args + 4, 2, 1)) return NULL;
    const Py_buffer *list = lists.buffers;
    const Py_ssize_t count = count_of(&lists, 0);
    const int is_right = count_of(&lists, 1) == count;
    if (is_right) {
        PyThreadState *thread = is_long ? PyEval_SaveThread() : NULL;
        hash_blocks((Hash)(intptr_t)numbers[0], (const char *)(intptr_t)numbers[1], numbers[2],
                    seed, list[0].buf, list[1].buf, count);
        if (is_long) PyEval_RestoreThread(thread);
    } else {
        PyErr_SetString(PyExc_ValueError, "the lists differ in length");
    }
    close_lists(&lists);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

#define FAST(NAME, HELP) \
    { #NAME, (PyCFunction)(void (*)(void))py_##NAME, METH_FASTCALL, HELP }

static PyMethodDef functions[] = {
    FAST(copy, "copy(destination, source, destination_offsets, source_offsets, lengths): addresses, "
               "and lists."),
    FAST(copy_promised, "copy(...), and then are_words(...): the arguments of both."),
    {"place", py_place, METH_O, "place(placing): the bytes of a Placing."},
    FAST(read, "read(items, out): a list's or tuple's numbers."),
    FAST(join_blocks, "join_blocks(source_ids, destination_ids, source_offsets, "
                      "destination_offsets, lengths, block_bytes): fills three; returns how far."),
    FAST(are_below, "are_below(ids, end): whether each is of 0 to end - 1."),
    FAST(are_sound, "are_sound(source_offsets, destination_offsets, lengths, ids, source_bytes, "
                    "destination_bytes, ids_end): whether a transfer surely may start."),
    FAST(hash_blocks, "hash_blocks(hash, address, block_bytes, seed, ids, hashes, is_long): fills "
                      "hashes, by a function of bytes, length and seed."),
    FAST(are_words, "are_words(words, ids, numbers, tag, number_max): whether all are as said."),
    {NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kv_copy",
    .m_doc = "Copies of KV, and what is reckoned for them.",
    .m_size = 0,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__kv_copy(void) { return PyModule_Create(&definition); }
