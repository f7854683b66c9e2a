/* Takes a token that is nothing but its text from a worker's frame to its client's socket without
 * running Python; token_lane.py says when it is used.
 *
 * Promise: no byte reaches a socket that is not this client's. A socket's number is kept in one
 * place, `Outlet.fd`, and used in one place, `outlet_send`, which looks at it right before the
 * system call. `Outlet.close()` sets it to -1, and nothing ever sets it again. The connection
 * calls close() when it is lost, which is before its transport gives the number back.
 *
 * Promise: bytes keep their order. While bytes of this client may wait in its transport
 * (`is_blocked`), all that follow go there, too. Nothing follows a piece that was cut off.
 *
 * Every call that may run Python is marked so: after it, lanes and outlets may be closed. Whatever
 * makes a Python object may run a finalizer, too; nothing borrowed is held across it. The GIL
 * is held all the time; MSG_DONTWAIT means that nothing waits meanwhile.
 *
 * Next: token_sends.inc.c
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE anyway */
#endif

_Static_assert(sizeof(size_t) == 8, "a text's escaped size is added up without a check");

/* Attributes' names. Strings made anew at each use would fill Python's cache of attributes. */
static PyObject *name_write, *name_get_write_buffer_size, *name_first_token_s, *name_last_token_s;
static PyObject *name_bounds, *name_counts, *name_sums;
static PyObject *name_hear_told, *name_frames_came, *name_is_closing, *name_abort;

/* Outlet: a connection's way out. */

typedef struct {
    PyObject_HEAD
    PyObject *transport; /* NULL: closed */
    PyObject *head;      /* bytes of a response that a first token is to begin; NULL: none */
    int fd;              /* -1: never written directly; so it is when closed */
    char has_written;
    char is_blocked; /* bytes may wait in the transport */
    char is_queued;  /* bytes wait to be sent, by token_sends.inc.c */
} Outlet;

static int sends_flush(void);

static void outlet_forget(Outlet *self)
{
    self->fd = -1;
    Py_CLEAR(self->head);
    Py_CLEAR(self->transport);
}

/* Whether a transport that bytes were given to has sent them all. One that is closing drops what it
 * is given, and its buffer is soon empty: then nothing may follow. -1: an exception. Runs Python. */
static int has_sent_all(PyObject *transport)
{
    PyObject *size = PyObject_CallMethodNoArgs(transport, name_get_write_buffer_size);
    if (size == NULL)
        return -1;
    Py_ssize_t num_waiting = PyLong_AsSsize_t(size);
    Py_DECREF(size);
    if (num_waiting != 0)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *closing = PyObject_CallMethodNoArgs(transport, name_is_closing);
    if (closing == NULL)
        return -1;
    int is_closing = PyObject_IsTrue(closing);
    Py_DECREF(closing);
    return is_closing < 0 ? -1 : !is_closing;
}

/* Whether the next bytes may go to the socket directly. -1: an exception. May run Python. */
static int outlet_is_free(Outlet *self)
{
    if (self->is_queued && sends_flush() < 0)
        return -1;
    if (self->fd < 0)
        return 0;
    if (!self->is_blocked)
        return 1;
    PyObject *transport = Py_NewRef(self->transport); /* there: fd is -1 where it is not */
    int is_free = has_sent_all(transport);
    Py_DECREF(transport);
    if (is_free <= 0)
        return is_free;
    self->is_blocked = 0;
    return self->fd >= 0;
}

/* Sends what the socket takes at once, and says how many bytes that were. Whatever error there
 * is, the transport finds it, too: it is given what was not sent. Runs no Python. */
static Py_ssize_t outlet_send(const Outlet *self, const char *data, Py_ssize_t size)
{
    ssize_t num_sent;
    if (self->fd < 0)
        return 0;
    do
        num_sent = send(self->fd, data, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (num_sent < 0 && errno == EINTR);
    return num_sent < 0 ? 0 : (Py_ssize_t)num_sent;
}

/* Gives bytes to the transport; drops them when closed. May run Python. */
static int outlet_hand_over(Outlet *self, PyObject *bytes)
{
    if (self->transport == NULL)
        return 0;
    self->has_written = 1;
    self->is_blocked = 1; /* before the call: what is written inside it follows these bytes */
    PyObject *transport = Py_NewRef(self->transport);
    PyObject *done = PyObject_CallMethodOneArg(transport, name_write, bytes);
    Py_DECREF(transport);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Ends a connection whose client has some bytes of a piece and will not get the others: what else
 * it is sent it would take for them. The exception that there is stays. Runs Python. */
static void outlet_break(Outlet *self)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *transport = Py_XNewRef(self->transport);
    outlet_forget(self);
    if (transport != NULL) {
        Py_XDECREF(PyObject_CallMethodNoArgs(transport, name_abort));
        Py_DECREF(transport);
    }
    PyErr_Restore(type, error, traceback); /* and drops what there was of the call */
}

/* Gives what the socket did not take to the transport. Runs Python. */
static int outlet_hand_over_rest(Outlet *self, const char *data, Py_ssize_t size)
{
    PyObject *rest = PyBytes_FromStringAndSize(data, size);
    int rc = rest == NULL ? -1 : outlet_hand_over(self, rest);
    Py_XDECREF(rest);
    if (rc < 0)
        outlet_break(self);
    return rc;
}

/* Writes directly, to an outlet that was just found free. What the socket does not take goes to
 * the transport. May run Python. */
static int outlet_write_directly(Outlet *self, const char *data, Py_ssize_t size)
{
    self->has_written = 1;
    Py_ssize_t num_sent = outlet_send(self, data, size);
    if (num_sent == size)
        return 0;
    return outlet_hand_over_rest(self, data + num_sent, size - num_sent);
}

static PyObject *outlet_write(Outlet *self, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int rc = 0;
    if (view.len > 0 && self->transport != NULL) {
        rc = outlet_is_free(self);
        if (rc > 0) {
            rc = outlet_write_directly(self, view.buf, view.len);
        } else if (rc == 0) {
            /* A copy of what the caller may change later. */
            PyObject *bytes = PyBytes_CheckExact(data)
                                  ? Py_NewRef(data)
                                  : PyBytes_FromStringAndSize(view.buf, view.len);
            rc = bytes == NULL ? -1 : outlet_hand_over(self, bytes);
            Py_XDECREF(bytes);
        }
    }
    PyBuffer_Release(&view);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *outlet_block(Outlet *self, PyObject *Py_UNUSED(none))
{
    if (self->is_queued && sends_flush() < 0)
        return NULL;
    self->is_blocked = 1;
    Py_RETURN_NONE;
}

static PyObject *outlet_close(Outlet *self, PyObject *Py_UNUSED(none))
{
    outlet_forget(self);
    Py_RETURN_NONE;
}

static PyObject *outlet_get_head(Outlet *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->head == NULL ? Py_None : self->head);
}

static int outlet_set_head(Outlet *self, PyObject *head, void *Py_UNUSED(closure))
{
    if (head == NULL || (head != Py_None && !PyBytes_CheckExact(head))) {
        PyErr_SetString(PyExc_TypeError, "a head is bytes, or None");
        return -1;
    }
    if (head == Py_None)
        Py_CLEAR(self->head);
    else
        Py_XSETREF(self->head, Py_NewRef(head));
    return 0;
}

static PyObject *outlet_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "transport", NULL};
    int fd;
    PyObject *transport;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO:Outlet", names, &fd, &transport))
        return NULL;
    Outlet *self = (Outlet *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->transport = Py_NewRef(transport);
    self->fd = fd < 0 ? -1 : fd;
    return (PyObject *)self;
}

static int outlet_traverse(Outlet *self, visitproc visit, void *arg)
{
    Py_VISIT(self->transport);
    return 0;
}

static int outlet_clear(Outlet *self)
{
    outlet_forget(self);
    return 0;
}

static void outlet_dealloc(Outlet *self)
{
    PyObject_GC_UnTrack(self);
    outlet_forget(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef outlet_methods[] = {
    {"write", (PyCFunction)outlet_write, METH_O, "Write bytes: directly, or behind what waits."},
    {"block", (PyCFunction)outlet_block, METH_NOARGS,
     "Others write to the transport: look at its buffer before the next direct write."},
    {"close", (PyCFunction)outlet_close, METH_NOARGS,
     "The connection is lost: what is written from now on is dropped."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef outlet_members[] = {
    {"has_written", T_BOOL, offsetof(Outlet, has_written), 0, "set by every write"},
    {"fd", T_INT, offsetof(Outlet, fd), READONLY, "-1: never written directly, or closed"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef outlet_attributes[] = {
    {"head", (getter)outlet_get_head, (setter)outlet_set_head,
     "what a first token is to be written behind, once: its date is made anew; None: nothing", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject OutletType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "neuron_di_proxy._token_lane.Outlet",
    .tp_doc = "A connection's way out: to its socket directly while nothing waits before it.",
    .tp_basicsize = sizeof(Outlet),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = outlet_new,
    .tp_dealloc = (destructor)outlet_dealloc,
    .tp_traverse = (traverseproc)outlet_traverse,
    .tp_clear = (inquiry)outlet_clear,
    .tp_methods = outlet_methods,
    .tp_getset = outlet_attributes,
    .tp_members = outlet_members,
};

/* Lane: the way of one leg's tokens to an outlet. */

typedef struct {
    PyObject_HEAD
    bool is_open; /* all the pointers are there while it is; afterwards none is */
    bool is_first; /* takes an answer's first token only */
    long long due;
    long long end; /* no token has this index or a later one */
    long long num_taken;
    double last_s;
    Outlet *outlet;
    PyObject *write;           /* takes an event that cannot be sent, or not directly */
    PyObject *begun;           /* of a first one: called when the answer was begun directly */
    PyObject *before, *behind; /* bytes: an event's, around a text */
    PyObject *record, *ids;
    Py_buffer bounds, counts, sums; /* of the histogram of gaps */
} Lane;

/* A token, as it lies in its frame. */
typedef struct {
    uint64_t number, index, id;
    const unsigned char *text;
    size_t text_size;
} Token;

#include "token_sends.inc.c"

static void lane_forget(Lane *self)
{
    self->is_open = false;
    Py_CLEAR(self->outlet);
    Py_CLEAR(self->write);
    Py_CLEAR(self->begun);
    Py_CLEAR(self->before);
    Py_CLEAR(self->behind);
    Py_CLEAR(self->record);
    Py_CLEAR(self->ids);
    PyBuffer_Release(&self->bounds);
    PyBuffer_Release(&self->counts);
    PyBuffer_Release(&self->sums);
}

/* Counts as Histogram.observe does. */
static void lane_count_gap(Lane *self, double gap_s)
{
    const double *bounds = self->bounds.buf;
    Py_ssize_t low = 0, high = self->bounds.shape[0];
    while (low < high) { /* bisect_left */
        Py_ssize_t middle = (low + high) / 2;
        if (bounds[middle] < gap_s)
            low = middle + 1;
        else
            high = middle;
    }
    ((int64_t *)self->counts.buf)[low] += 1;
    *(double *)self->sums.buf += gap_s;
}

/* Writes a text as msgspec's JSON does, without the quotes: at most six bytes for each of it. */
static char *put_escaped(char *out, const unsigned char *text, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = text[i];
        if (byte >= 0x20 && byte != '"' && byte != '\\') {
            *out++ = (char)byte;
            continue;
        }
        *out++ = '\\';
        switch (byte) {
        case '"':
        case '\\':
            *out++ = (char)byte;
            break;
        case '\b':
            *out++ = 'b';
            break;
        case '\f':
            *out++ = 'f';
            break;
        case '\n':
            *out++ = 'n';
            break;
        case '\r':
            *out++ = 'r';
            break;
        case '\t':
            *out++ = 't';
            break;
        default:
            memcpy(out, "u00", 3);
            out[3] = digits[byte >> 4];
            out[4] = digits[byte & 15];
            out += 5;
        }
    }
    return out;
}

static char *put_bytes(char *out, PyObject *bytes)
{
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    memcpy(out, PyBytes_AS_STRING(bytes), size);
    return out + size;
}

enum { CHUNK_HEAD_MAX = 16 + 2, CHUNK_TAIL = 2, SMALL_CHUNK = 4096 };

/* Writes a chunk's head to end where its data begins. Returns where the head begins. */
static char *put_chunk_head(char *data, size_t size)
{
    char *at = data;
    *--at = '\n';
    *--at = '\r';
    do {
        *--at = "0123456789abcdef"[size & 15];
        size >>= 4;
    } while (size > 0);
    return at;
}

/* Writes the time over the date that a response's head has, if it has one. */
static void put_date(char *head, size_t size)
{
    static const char line[] = "\r\ndate: ", days[] = "SunMonTueWedThuFriSat",
                      months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    enum { DATE_BYTES = 29 }; /* RFC 9110, IMF-fixdate: always as many */
    char *at = memmem(head, size, line, sizeof line - 1), date[64];
    time_t now = time(NULL);
    struct tm utc;
    if (at == NULL || gmtime_r(&now, &utc) == NULL)
        return;
    at += sizeof line - 1;
    if ((size_t)(head + size - at) < DATE_BYTES + 2 || memcmp(at + DATE_BYTES, "\r\n", 2) != 0)
        return;
    snprintf(date, sizeof date, "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT",
             days + 3 * (utc.tm_wday % 7), utc.tm_mday, months + 3 * (utc.tm_mon % 12),
             utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
    memcpy(at, date, DATE_BYTES);
}

/* Says that a response was begun, also where an exception is on its way. Runs Python. */
static int tell_begun(PyObject *begun)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *done = PyObject_CallNoArgs(begun);
    int rc = done == NULL || type != NULL ? -1 : 0;
    Py_XDECREF(done);
    if (type != NULL)
        PyErr_Restore(type, error, traceback); /* and drops what there was of the call */
    return rc;
}

/* Begins a response with its head and a first chunk, and says so. May run Python. */
static int lane_begin(Lane *self, Outlet *outlet, const char *chunk, size_t size)
{
    PyObject *head = outlet->head, *begun = Py_NewRef(self->begun);
    outlet->head = NULL; /* it is ours, and nobody's twice */
    size_t head_size = (size_t)PyBytes_GET_SIZE(head);
    PyObject *all = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head_size + size));
    int rc = -1;
    if (all != NULL) {
        char *data = PyBytes_AS_STRING(all);
        memcpy(data, PyBytes_AS_STRING(head), head_size);
        put_date(data, head_size);
        memcpy(data + head_size, chunk, size);
        /* What is left is in the transport before anybody may write behind it. */
        rc = outlet_write_directly(outlet, data, PyBytes_GET_SIZE(all));
        if (tell_begun(begun) < 0)
            rc = -1;
    }
    Py_DECREF(head);
    Py_DECREF(begun);
    Py_XDECREF(all);
    return rc;
}

/* Gives an event to the client. There is room around it for a chunk's head and tail. May run
 * Python. */
static int lane_give(Lane *self, uint64_t number, char *event, size_t size)
{
    Outlet *outlet = (Outlet *)Py_NewRef(self->outlet);
    int rc = self->is_first && outlet->head == NULL ? 0 : outlet_is_free(outlet);
    if (rc >= 0 && !self->is_open) {
        rc = 0; /* closed meanwhile: its client wants no more */
    } else if (rc > 0 && (!self->is_first || outlet->head != NULL)) {
        char *chunk = put_chunk_head(event, size);
        memcpy(event + size, "\r\n", CHUNK_TAIL);
        size = (size_t)(event + size + CHUNK_TAIL - chunk);
        rc = 0;
        if (self->is_first)
            rc = lane_begin(self, outlet, chunk, size);
        else if (!sends_gather(self, number, chunk, size))
            rc = outlet_write_directly(outlet, chunk, (Py_ssize_t)size);
    } else if (rc >= 0 && outlet->transport != NULL) {
        PyObject *write = Py_NewRef(self->write), *done = NULL;
        PyObject *bytes = PyBytes_FromStringAndSize(event, (Py_ssize_t)size);
        if (bytes != NULL)
            done = PyObject_CallOneArg(write, bytes);
        rc = done == NULL ? -1 : 0;
        Py_XDECREF(done);
        Py_XDECREF(bytes);
        Py_DECREF(write);
    }
    Py_DECREF(outlet);
    return rc < 0 ? -1 : 0;
}

/* Makes a text's event and gives it to the client. May run Python, when the event is made. */
static int lane_write(Lane *self, const Token *token)
{
    char small[SMALL_CHUNK], *room = small;
    size_t needed = CHUNK_HEAD_MAX + (size_t)PyBytes_GET_SIZE(self->before) +
                    6 * token->text_size + 2 + (size_t)PyBytes_GET_SIZE(self->behind) +
                    CHUNK_TAIL;
    if (needed > sizeof small && (room = PyMem_Malloc(needed)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    char *event = room + CHUNK_HEAD_MAX;
    char *end = put_bytes(event, self->before);
    *end++ = '"';
    end = put_escaped(end, token->text, token->text_size);
    *end++ = '"';
    end = put_bytes(end, self->behind);
    int rc = lane_give(self, token->number, event, (size_t)(end - event));
    if (room != small)
        PyMem_Free(room);
    return rc;
}

/* Takes a token that is this lane's next. May run Python. */
static int lane_take_token(Lane *self, const Token *token, PyObject *now)
{
    double now_s = PyFloat_AS_DOUBLE(now);
    PyObject *id = PyLong_FromUnsignedLongLong(token->id);
    if (id == NULL)
        return -1;
    int rc = PyList_Append(self->ids, id);
    Py_DECREF(id);
    if (rc < 0)
        return -1;
    self->due = self->is_first ? INT64_MAX : self->due + 1; /* nothing is due after a first one */
    self->num_taken++;
    if (self->last_s > 0)
        lane_count_gap(self, now_s - self->last_s);
    self->last_s = now_s;
    PyObject *record = Py_NewRef(self->record);
    rc = PyObject_SetAttr(record, name_last_token_s, now);
    if (rc == 0 && self->is_first)
        rc = PyObject_SetAttr(record, name_first_token_s, now);
    Py_DECREF(record);
    if (rc == 0 && token->text_size > 0 && self->is_open)
        rc = lane_write(self, token);
    if (rc == 0 && self->is_first)
        lane_forget(self);
    return rc;
}

static PyObject *lane_take(Lane *self, PyObject *Py_UNUSED(none))
{
    long long num_taken = self->num_taken;
    self->num_taken = 0;
    return PyLong_FromLongLong(num_taken);
}

static PyObject *lane_close(Lane *self, PyObject *Py_UNUSED(none))
{
    lane_forget(self);
    Py_RETURN_NONE;
}

/* Opens one of the histogram's arrays, of eight-byte numbers. */
static int open_numbers(PyObject *histogram, PyObject *name, char format, int flags,
                        Py_buffer *view)
{
    PyObject *numbers = PyObject_GetAttr(histogram, name);
    if (numbers == NULL)
        return -1;
    int rc = PyObject_GetBuffer(numbers, view, PyBUF_FORMAT | PyBUF_ND | flags);
    Py_DECREF(numbers);
    if (rc < 0)
        return -1;
    if (view->ndim != 1 || view->itemsize != 8 || view->format == NULL ||
        view->format[0] != format || view->format[1] != '\0' || (uintptr_t)view->buf % 8 != 0) {
        PyErr_Format(PyExc_TypeError, "%U must be an array of '%c'", name, format);
        return -1;
    }
    return 0;
}

static int lane_open_gaps(Lane *self, PyObject *gaps)
{
    if (open_numbers(gaps, name_bounds, 'd', 0, &self->bounds) < 0 ||
        open_numbers(gaps, name_counts, 'q', PyBUF_WRITABLE, &self->counts) < 0 ||
        open_numbers(gaps, name_sums, 'd', PyBUF_WRITABLE, &self->sums) < 0)
        return -1;
    if (self->counts.shape[0] != self->bounds.shape[0] + 1 || self->sums.shape[0] != 1) {
        PyErr_SetString(PyExc_ValueError, "a histogram has a count for each bound and one more");
        return -1;
    }
    return 0;
}

static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"outlet", "write", "before", "behind",   "due", "record",
                            "ids",    "gaps",  "last_s", "begun",  NULL};
    PyObject *outlet, *write, *before, *behind, *record, *ids, *gaps, *begun = Py_None;
    long long due;
    double last_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OSSLOO!Od|O:Lane", names, &OutletType,
                                     &outlet, &write, &before, &behind, &due, &record,
                                     &PyList_Type, &ids, &gaps, &last_s, &begun))
        return NULL;
    if (!PyCallable_Check(write) || (begun != Py_None && !PyCallable_Check(begun))) {
        PyErr_SetString(PyExc_TypeError, "write and begun must be callable");
        return NULL;
    }
    Lane *self = (Lane *)type->tp_alloc(type, 0); /* all zero: closed */
    if (self == NULL)
        return NULL;
    self->due = due;
    self->end = INT64_MAX;
    self->last_s = last_s;
    self->is_first = begun != Py_None;
    self->begun = Py_NewRef(begun);
    self->outlet = (Outlet *)Py_NewRef(outlet);
    self->write = Py_NewRef(write);
    self->before = Py_NewRef(before);
    self->behind = Py_NewRef(behind);
    self->record = Py_NewRef(record);
    self->ids = Py_NewRef(ids);
    if (lane_open_gaps(self, gaps) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->is_open = true;
    return (PyObject *)self;
}

static int lane_traverse(Lane *self, visitproc visit, void *arg)
{
    Py_VISIT(self->outlet);
    Py_VISIT(self->write);
    Py_VISIT(self->begun);
    Py_VISIT(self->record);
    Py_VISIT(self->ids);
    Py_VISIT(self->bounds.obj);
    Py_VISIT(self->counts.obj);
    Py_VISIT(self->sums.obj);
    return 0;
}

static int lane_clear(Lane *self)
{
    lane_forget(self);
    return 0;
}

static void lane_dealloc(Lane *self)
{
    PyObject_GC_UnTrack(self);
    lane_forget(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef lane_methods[] = {
    {"take", (PyCFunction)lane_take, METH_NOARGS,
     "How many tokens came through since it was last asked."},
    {"close", (PyCFunction)lane_close, METH_NOARGS, "Take nothing any more."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef lane_members[] = {
    {"due", T_LONGLONG, offsetof(Lane, due), 0, "index of the next token it takes"},
    {"end", T_LONGLONG, offsetof(Lane, end), 0, "it takes no token of this index or a later one"},
    {"last_s", T_DOUBLE, offsetof(Lane, last_s), READONLY, "when the last token came through"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "neuron_di_proxy._token_lane.Lane",
    .tp_doc = "The way of one leg's tokens to its client's outlet.",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = lane_new,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_methods = lane_methods,
    .tp_members = lane_members,
};

/* A frame's msgpack. The readers return false at whatever they do not know: the caller then
 * decodes the frame by msgspec, which knows it or says what is wrong. */

typedef struct {
    const unsigned char *at, *end;
} Reader;

static bool read_byte(Reader *reader, unsigned char *byte)
{
    if (reader->at == reader->end)
        return false;
    *byte = *reader->at++;
    return true;
}

static bool read_big_endian(Reader *reader, size_t size, uint64_t *value)
{
    if ((size_t)(reader->end - reader->at) < size)
        return false;
    *value = 0;
    while (size-- > 0)
        *value = *value << 8 | *reader->at++;
    return true;
}

static bool read_uint(Reader *reader, uint64_t *value)
{
    unsigned char tag;
    if (!read_byte(reader, &tag))
        return false;
    if (tag < 0x80) { /* positive fixint */
        *value = tag;
        return true;
    }
    return tag >= 0xcc && tag <= 0xcf && /* uint8, 16, 32, 64 */
           read_big_endian(reader, (size_t)1 << (tag - 0xcc), value);
}

static bool read_array_size(Reader *reader, uint64_t *size)
{
    unsigned char tag;
    if (!read_byte(reader, &tag))
        return false;
    if ((tag & 0xf0) == 0x90) { /* fixarray */
        *size = tag & 0x0f;
        return true;
    }
    return (tag == 0xdc || tag == 0xdd) && /* array16, 32 */
           read_big_endian(reader, tag == 0xdc ? 2 : 4, size);
}

static bool is_continuation(unsigned char byte) { return (byte & 0xc0) == 0x80; }

/* As Python's strict decoder: nothing overlong, no surrogates, nothing above U+10FFFF. */
static bool is_utf8(const unsigned char *at, size_t size)
{
    const unsigned char *end = at + size;
    while (at < end) {
        unsigned char lead = *at++;
        if (lead < 0x80)
            continue;
        size_t num_left = (size_t)(end - at);
        if (lead >= 0xc2 && lead <= 0xdf) {
            if (num_left < 1 || !is_continuation(at[0]))
                return false;
            at += 1;
        } else if (lead >= 0xe0 && lead <= 0xef) {
            if (num_left < 2 || !is_continuation(at[0]) || !is_continuation(at[1]) ||
                (lead == 0xe0 && at[0] < 0xa0) || (lead == 0xed && at[0] > 0x9f))
                return false;
            at += 2;
        } else if (lead >= 0xf0 && lead <= 0xf4) {
            if (num_left < 3 || !is_continuation(at[0]) || !is_continuation(at[1]) ||
                !is_continuation(at[2]) || (lead == 0xf0 && at[0] < 0x90) ||
                (lead == 0xf4 && at[0] > 0x8f))
                return false;
            at += 3;
        } else {
            return false;
        }
    }
    return true;
}

static bool read_text(Reader *reader, Token *token)
{
    unsigned char tag;
    uint64_t size;
    if (!read_byte(reader, &tag))
        return false;
    if ((tag & 0xe0) == 0xa0) /* fixstr */
        size = tag & 0x1f;
    else if (tag < 0xd9 || tag > 0xdb || /* str8, 16, 32 */
             !read_big_endian(reader, (size_t)1 << (tag - 0xd9), &size))
        return false;
    if (size > (uint64_t)(reader->end - reader->at) || !is_utf8(reader->at, size))
        return false;
    token->text = reader->at;
    token->text_size = size;
    reader->at += size;
    return true;
}

static bool read_token(Reader *reader, Token *token)
{
    uint64_t num_fields;
    return read_array_size(reader, &num_fields) && num_fields == 4 &&
           read_uint(reader, &token->number) && read_uint(reader, &token->index) &&
           read_uint(reader, &token->id) && read_text(reader, token);
}

enum { TELLS_TWO = 0x92, TELLS_THREE = 0x93, EMPTY = 0x90, NIL = 0xc0 };

/* Reads a payload up to its events. The tokens are to be freed, in any case. */
static bool read_tokens(Reader *reader, Token **tokens, size_t *num_tokens)
{
    enum { TOKEN_BYTES_MIN = 5 };
    unsigned char head; /* an array of two or three; other ways to write that are not known here */
    uint64_t num;
    *tokens = NULL;
    if (!read_byte(reader, &head) || (head != TELLS_TWO && head != TELLS_THREE) ||
        !read_array_size(reader, &num) ||
        num > (uint64_t)(reader->end - reader->at) / TOKEN_BYTES_MIN)
        return false;
    *num_tokens = num;
    *tokens = PyMem_Malloc(num * sizeof(Token));
    if (*tokens == NULL)
        return false;
    for (size_t i = 0; i < num; i++)
        if (!read_token(reader, &(*tokens)[i]))
            return false;
    return reader->at < reader->end; /* there are events to follow */
}

/* What follows the tokens, as a payload that has none. None: no events, and no status. */
static PyObject *read_rest(const Reader *reader, unsigned char head)
{
    size_t size = (size_t)(reader->end - reader->at);
    bool has_status = head == TELLS_THREE;
    if (size == 1u + has_status && reader->at[0] == EMPTY &&
        (!has_status || reader->at[1] == NIL))
        Py_RETURN_NONE;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size + 2);
    if (rest == NULL)
        return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(rest);
    out[0] = head;
    out[1] = EMPTY;
    memcpy(out + 2, reader->at, size);
    return rest;
}

/* Whether an open lane waits for just this token. A first one is more than its text where it has
 * none: an answer begins with it all the same. After it, such a lane waits for nothing. */
static bool lane_awaits(const Lane *lane, const Token *token)
{
    return token->index < (unsigned long long)lane->end &&
           (long long)token->index == lane->due && (!lane->is_first || token->text_size > 0);
}

/* The open lane that waits for a token, a new reference. NULL without an exception: none; a lane
 * that waits for another one is closed, so that nothing overtakes. */
static Lane *lane_for(PyObject *lanes, const Token *token)
{
    PyObject *number = PyLong_FromUnsignedLongLong(token->number);
    if (number == NULL)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(lanes, number); /* borrowed */
    Py_DECREF(number);
    if (found == NULL)
        return NULL;
    if (!Py_IS_TYPE(found, &LaneType)) {
        PyErr_SetString(PyExc_TypeError, "lanes must be a dict of Lanes");
        return NULL;
    }
    Lane *lane = (Lane *)Py_NewRef(found);
    if (lane->is_open && lane_awaits(lane, token))
        return lane;
    lane_forget(lane);
    Py_DECREF(lane);
    return NULL;
}

static int append_token(PyObject *others, const Token *token)
{
    PyObject *item = Py_BuildValue("(KKKs#)", (unsigned long long)token->number,
                                   (unsigned long long)token->index, (unsigned long long)token->id,
                                   (const char *)token->text, (Py_ssize_t)token->text_size);
    if (item == NULL)
        return -1;
    int rc = PyList_Append(others, item);
    Py_DECREF(item);
    return rc;
}

/* Notes the exception of a token's lane, which is closed: the token's leg must hear of it. */
static int append_failure(PyObject *failures, uint64_t number, Lane *lane)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    lane_forget(lane);
    PyObject *item = Py_BuildValue("(KO)", (unsigned long long)number, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    if (item == NULL)
        return -1;
    int rc = PyList_Append(failures, item);
    Py_DECREF(item);
    return rc;
}

/* Brings a token to its lane, or to the others. May run Python. */
static int relay_token(const Token *token, PyObject *lanes, PyObject *now, PyObject *others,
                       PyObject *failures)
{
    Lane *lane = lane_for(lanes, token);
    if (lane == NULL)
        return PyErr_Occurred() ? -1 : append_token(others, token);
    int rc = lane_take_token(lane, token, now);
    if (rc < 0 && PyErr_ExceptionMatches(PyExc_Exception))
        rc = append_failure(failures, token->number, lane);
    Py_DECREF(lane);
    return rc; /* -1 for an exit or an interrupt, too */
}

/* Relays a payload's tokens. Returns (tokens that no lane took, all that it says but tokens, as a
 * payload or None, failures). A payload that is not understood here is returned as a whole.
 * May run Python; the payload stays where it is as long as the caller holds it. */
static PyObject *relay_payload(const unsigned char *payload, size_t size, PyObject *lanes,
                               PyObject *now)
{
    Reader reader = {payload, payload + size};
    Token *tokens;
    size_t num_tokens = 0, num_relayed = 0;
    PyObject *result = NULL, *rest, *others = PyList_New(0), *failures = PyList_New(0), *outer;
    if (read_tokens(&reader, &tokens, &num_tokens)) {
        rest = read_rest(&reader, payload[0]);
    } else {
        rest = PyBytes_FromStringAndSize((const char *)payload, (Py_ssize_t)size);
        num_tokens = 0;
    }
    if (rest != NULL && others != NULL && failures != NULL &&
        sends_begin(num_tokens, failures, &outer) == 0) {
        while (num_relayed < num_tokens && sends_part() == 0 &&
               relay_token(&tokens[num_relayed], lanes, now, others, failures) == 0)
            num_relayed++;
        if (sends_end(outer) == 0 && num_relayed == num_tokens)
            result = PyTuple_Pack(3, others, rest, failures);
    }
    PyMem_Free(tokens);
    Py_XDECREF(rest);
    Py_XDECREF(others);
    Py_XDECREF(failures);
    return result;
}

static PyObject *relay_told(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 3 || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "relay_told(payload, lanes: dict, now_s)");
        return NULL;
    }
    double now_s = PyFloat_AsDouble(args[2]);
    if (now_s == -1.0 && PyErr_Occurred())
        return NULL;
    PyObject *result = NULL, *now = PyFloat_FromDouble(now_s);
    if (now == NULL)
        return NULL;
    Py_buffer payload; /* as long as it is held, its bytes stay where they are */
    if (PyObject_GetBuffer(args[0], &payload, PyBUF_SIMPLE) == 0) {
        result = relay_payload(payload.buf, (size_t)payload.len, args[1], now);
        PyBuffer_Release(&payload);
    }
    Py_DECREF(now);
    return result;
}

/* LinkReader: the base of a link's protocol, to whom its transport gives what comes. */

typedef struct {
    PyObject_HEAD
    PyObject *lanes; /* a dict: leg number to Lane */
    PyObject *now_s; /* a function */
    int num_silent;
    char has_partial; /* some of a frame has come: the protocol keeps it */
} LinkReader;

/* Reads a frame's length; what follows it is its payload, all of which is there. */
static bool read_length(Reader *reader, uint64_t *length)
{
    enum { LENGTH_BYTES = 4 };
    return read_big_endian(reader, LENGTH_BYTES, length) &&
           *length <= (uint64_t)(reader->end - reader->at);
}

/* Whether nothing has come but whole frames. */
static bool are_whole_frames(Reader reader)
{
    uint64_t length;
    while (reader.at < reader.end) {
        if (!read_length(&reader, &length))
            return false;
        reader.at += length;
    }
    return true;
}

/* Relays all frames. Returns a list of what their lanes did not take, frame by frame; None: they took
 * all. May run Python. */
static PyObject *reader_relay(LinkReader *self, Reader reader, PyObject *now)
{
    PyObject *left = Py_NewRef(Py_None);
    uint64_t length;
    for (; reader.at < reader.end && read_length(&reader, &length); reader.at += length) {
        PyObject *relayed = relay_payload(reader.at, length, self->lanes, now);
        if (relayed == NULL)
            goto failed;
        bool is_all = PyList_GET_SIZE(PyTuple_GET_ITEM(relayed, 0)) == 0 &&
                      PyTuple_GET_ITEM(relayed, 1) == Py_None &&
                      PyList_GET_SIZE(PyTuple_GET_ITEM(relayed, 2)) == 0;
        if (!is_all && left == Py_None)
            Py_SETREF(left, PyList_New(0));
        int rc = left == NULL ? -1 : is_all ? 0 : PyList_Append(left, relayed);
        Py_DECREF(relayed);
        if (rc < 0)
            goto failed;
    }
    return left;
failed:
    Py_XDECREF(left);
    return NULL;
}

/* Hears one frame after the other. What is more than tokens takes longer than they do, so no token
 * waits for it: their lanes see to it that nothing overtakes within a leg. Runs Python. */
static PyObject *reader_hear_all(LinkReader *self, Reader reader)
{
    PyObject *now = PyObject_CallNoArgs(self->now_s);
    if (now == NULL)
        return NULL;
    if (!PyFloat_Check(now)) {
        PyErr_SetString(PyExc_TypeError, "now_s must return a float");
        Py_DECREF(now);
        return NULL;
    }
    PyObject *left = reader_relay(self, reader, now), *done = NULL;
    Py_DECREF(now);
    if (left == NULL || left == Py_None)
        return left;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(left); i++) {
        PyObject *said = PyList_GET_ITEM(left, i); /* the list is nobody else's */
        Py_XDECREF(done);
        done = PyObject_CallMethodObjArgs((PyObject *)self, name_hear_told,
                                          PyTuple_GET_ITEM(said, 0), PyTuple_GET_ITEM(said, 1),
                                          PyTuple_GET_ITEM(said, 2), NULL);
        if (done == NULL)
            break;
    }
    Py_DECREF(left);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    Py_RETURN_NONE;
}

static PyObject *reader_data_received(LinkReader *self, PyObject *data)
{
    self->num_silent = 0;
    if (PyBytes_CheckExact(data) && !self->has_partial) {
        const unsigned char *start = (const unsigned char *)PyBytes_AS_STRING(data);
        Reader reader = {start, start + PyBytes_GET_SIZE(data)};
        if (are_whole_frames(reader))
            return reader_hear_all(self, reader);
    }
    return PyObject_CallMethodOneArg((PyObject *)self, name_frames_came, data);
}

static int reader_init(LinkReader *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"now_s", NULL};
    PyObject *now_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:LinkReader", names, &now_s))
        return -1;
    Py_XSETREF(self->now_s, Py_NewRef(now_s));
    return 0;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                            PyObject *Py_UNUSED(kwargs))
{
    LinkReader *self = (LinkReader *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->now_s = Py_NewRef(Py_None);
    self->lanes = PyDict_New();
    if (self->lanes == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int reader_traverse(LinkReader *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lanes);
    Py_VISIT(self->now_s);
    return 0;
}

static int reader_clear(LinkReader *self)
{
    if (self->lanes != NULL) /* stays a dict as long as there is a reader */
        PyDict_Clear(self->lanes);
    return 0;
}

static void reader_dealloc(LinkReader *self)
{
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->lanes);
    Py_CLEAR(self->now_s);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef reader_methods[] = {
    {"data_received", (PyCFunction)reader_data_received, METH_O,
     "Relay the tokens of whole frames, and give what else they say to `hear_told`, frame by frame; "
     "give bytes that are not whole frames to `frames_came`."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef reader_members[] = {
    {"lanes", T_OBJECT_EX, offsetof(LinkReader, lanes), READONLY, "leg number to Lane"},
    {"num_silent", T_INT, offsetof(LinkReader, num_silent), 0, "0 when anything comes"},
    {"has_partial", T_BOOL, offsetof(LinkReader, has_partial), 0,
     "some of a frame has come: what comes next is not the begin of one"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject LinkReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "neuron_di_proxy._token_lane.LinkReader",
    .tp_doc = "The base of a link's protocol: what its lanes take never comes to Python.",
    .tp_basicsize = sizeof(LinkReader),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = reader_new,
    .tp_init = (initproc)reader_init,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_traverse = (traverseproc)reader_traverse,
    .tp_clear = (inquiry)reader_clear,
    .tp_methods = reader_methods,
    .tp_members = reader_members,
};

static PyMethodDef functions[] = {
    {"relay_told", (PyCFunction)(void (*)(void))relay_told, METH_FASTCALL,
     "relay_told(payload, lanes, now_s, /)\n--\n\n"
     "Relay the tokens of a frame's payload that lanes wait for. Returns all others, what the frame "
     "says beside tokens, and the failures of lanes."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_token_lane",
    .m_doc = "Steady tokens, from a worker's frame to a client's socket.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__token_lane(void)
{
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&name_write, "write"},   {&name_get_write_buffer_size, "get_write_buffer_size"},
        {&name_bounds, "bounds"}, {&name_last_token_s, "last_token_s"},
        {&name_first_token_s, "first_token_s"},
        {&name_counts, "counts"}, {&name_sums, "sums"},
        {&name_hear_told, "hear_told"}, {&name_frames_came, "frames_came"},
        {&name_is_closing, "is_closing"}, {&name_abort, "abort"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddType(module, &OutletType) < 0 || PyModule_AddType(module, &LaneType) < 0 ||
        PyModule_AddType(module, &LinkReaderType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
