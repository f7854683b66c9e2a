/* Finds the members of a JSON object without reading their values; json_object.py says why.
 *
 * Promise: whatever is taken apart here is JSON by RFC 8259, in UTF-8 and without half surrogates.
 * Of all else, and of some good JSON that clients hardly write, it says only that it does not
 * know: then others read it, and say what is wrong.
 *
 * Nothing here runs Python before all is read, so the bytes stay where they are.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__ /* every x86-64 has it */
#include <emmintrin.h>
#endif

typedef unsigned char Byte;

/* What is left of the text. */
typedef struct {
    const Byte *at, *end;
} Text;

/* Whether a byte of a string means only itself: not so a quote, an escape, or a character of
 * several bytes. */
static bool is_plain(Byte byte)
{
    return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\';
}

#ifdef __SSE2__

enum { STEP = 16 };

/* Which of the next STEP bytes are not plain: `first_odd` finds the first. 0: none. */
static uint64_t odd_bytes(const Byte *at)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    __m128i is_low = _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(0x1f)), bytes);
    __m128i is_mark = _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')),
                                   _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\')));
    /* Of each byte the highest bit, which a byte of a wide character has set itself. */
    __m128i odd = _mm_or_si128(_mm_or_si128(is_low, is_mark), bytes);
    return (uint64_t)_mm_movemask_epi8(odd);
}

static int first_odd(uint64_t odd)
{
    return __builtin_ctzll(odd);
}

#else

enum { STEP = 8 };

/* The highest bit of each byte that is below `limit`. A higher byte than the first such may be
 * taken for one, too. */
static uint64_t bytes_below(uint64_t word, uint64_t limit)
{
    const uint64_t ones = UINT64_MAX / 0xff;
    return (word - ones * limit) & ~word & ones << 7;
}

static uint64_t odd_bytes(const Byte *at)
{
    const uint64_t ones = UINT64_MAX / 0xff;
    uint64_t word = 0;
    for (int i = 0; i < STEP; i++) /* one load, on most machines */
        word |= (uint64_t)at[i] << 8 * i;
    return bytes_below(word, 0x20) | bytes_below(word ^ ones * '"', 1) |
           bytes_below(word ^ ones * '\\', 1) | (word & ones << 7);
}

static int first_odd(uint64_t odd)
{
    return __builtin_ctzll(odd) / 8;
}

#endif

/* Moves on to the first byte that is not plain. */
static void skip_plain(Text *text)
{
    const Byte *at = text->at, *end = text->end;
    uint64_t odd = 0;
    while (end - at >= STEP && (odd = odd_bytes(at)) == 0)
        at += STEP;
    if (odd != 0)
        at += first_odd(odd);
    else
        while (at < end && is_plain(*at))
            at++;
    text->at = at;
}

static bool has_byte(const Text *text, Byte byte)
{
    return text->at < text->end && *text->at == byte;
}

static bool skip_byte(Text *text, Byte byte)
{
    bool is_there = has_byte(text, byte);
    text->at += is_there;
    return is_there;
}

static void skip_space(Text *text)
{
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\n' || *text->at == '\r' ||
                                    *text->at == '\t'))
        text->at++;
}

/* One character of several bytes. Those are refused that have shorter forms, that are half of a
 * character, or above U+10FFFF: the second byte tells. */
static bool skip_wide(Text *text)
{
    Byte lead = text->at[0], low = 0x80, high = 0xbf;
    Py_ssize_t size;
    if (lead >= 0xc2 && lead <= 0xdf)
        size = 2;
    else if (lead >= 0xe0 && lead <= 0xef)
        size = 3;
    else if (lead >= 0xf0 && lead <= 0xf4)
        size = 4;
    else
        return false;
    if (text->end - text->at < size)
        return false;
    if (lead == 0xe0)
        low = 0xa0;
    else if (lead == 0xed)
        high = 0x9f;
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f;
    if (text->at[1] < low || text->at[1] > high)
        return false;
    for (Py_ssize_t i = 2; i < size; i++)
        if ((text->at[i] & 0xc0) != 0x80)
            return false;
    text->at += size;
    return true;
}

static signed char hex_values[256]; /* -1: no digit */

static void fill_hex_values(void)
{
    memset(hex_values, -1, sizeof hex_values);
    for (int i = 0; i < 16; i++) {
        hex_values[(Byte)"0123456789abcdef"[i]] = (signed char)i;
        hex_values[(Byte)"0123456789ABCDEF"[i]] = (signed char)i;
    }
}

static const bool is_escape[256] = {
    ['"'] = true, ['\\'] = true, ['/'] = true, ['b'] = true,
    ['f'] = true, ['n'] = true,  ['r'] = true, ['t'] = true,
};

/* The code of an escape as in \u20ac. -1: it is none. */
static int read_unicode_escape(Text *text)
{
    enum { ESCAPE_BYTES = 6 };
    if (text->end - text->at < ESCAPE_BYTES || text->at[0] != '\\' || text->at[1] != 'u')
        return -1;
    int code = 0;
    for (int i = 2; i < ESCAPE_BYTES; i++)
        code = code * 16 | hex_values[text->at[i]]; /* below 0 once it is */
    text->at += ESCAPE_BYTES;
    return code;
}

/* An escape, or the two of a surrogate pair, from the backslash. */
static bool skip_escape(Text *text)
{
    if (text->end - text->at < 2)
        return false;
    Byte kind = text->at[1];
    if (kind != 'u') {
        text->at += 2;
        return is_escape[kind];
    }
    int code = read_unicode_escape(text);
    if (code < 0xd800 || code > 0xdfff)
        return code >= 0;
    if (code > 0xdbff)
        return false;
    code = read_unicode_escape(text);
    return code >= 0xdc00 && code <= 0xdfff;
}

/* A string, from its first quote to behind its last. */
static bool skip_string(Text *text)
{
    if (!skip_byte(text, '"'))
        return false;
    for (;;) {
        skip_plain(text);
        if (text->at == text->end || *text->at < 0x20)
            return false;
        if (*text->at == '"')
            break;
        while (has_byte(text, '\\')) /* as these do where a text is not English */
            if (!skip_escape(text))
                return false;
        while (text->at < text->end && *text->at >= 0x80) /* they come in rows */
            if (!skip_wide(text))
                return false;
    }
    text->at++;
    return true;
}

static bool skip_digits(Text *text)
{
    const Byte *begin = text->at;
    while (text->at < text->end && *text->at >= '0' && *text->at <= '9')
        text->at++;
    return text->at > begin;
}

/* A number without an exponent. */
static bool skip_number(Text *text)
{
    skip_byte(text, '-');
    if (!skip_byte(text, '0') && !skip_digits(text))
        return false;
    return !skip_byte(text, '.') || skip_digits(text);
}

static bool skip_word(Text *text, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(text->end - text->at) < size || memcmp(text->at, word, size) != 0)
        return false;
    text->at += size;
    return true;
}

static bool skip_scalar(Text *text)
{
    if (text->at == text->end)
        return false;
    switch (*text->at) {
    case '"':
        return skip_string(text);
    case 't':
        return skip_word(text, "true");
    case 'f':
        return skip_word(text, "false");
    case 'n':
        return skip_word(text, "null");
    default:
        return skip_number(text);
    }
}

/* A member's name and its colon. */
static bool skip_name(Text *text)
{
    skip_space(text);
    if (!skip_string(text))
        return false;
    skip_space(text);
    return skip_byte(text, ':');
}

/* A value of any kind, without what is before and behind it. One that is nested more deeply than
 * there are bits is left to others. */
static bool skip_value(Text *text)
{
    enum { DEPTH_MAX = 64 };
    uint64_t objects = 0; /* a bit for each array, 0, or object, 1, that is open; innermost lowest */
    int depth = 0;
    do {
        if (depth > 0)
            skip_space(text);
        bool is_object = has_byte(text, '{'), is_empty = false;
        if (is_object || has_byte(text, '[')) {
            if (depth == DEPTH_MAX)
                return false;
            objects = objects << 1 | is_object;
            depth++;
            text->at++;
            skip_space(text);
            is_empty = has_byte(text, is_object ? '}' : ']');
            if (!is_empty) {
                if (is_object && !skip_name(text))
                    return false;
                continue;
            }
        } else if (!skip_scalar(text)) {
            return false;
        }
        while (depth > 0) { /* behind a value, or in something empty */
            skip_space(text);
            if (!is_empty && skip_byte(text, ',')) {
                if ((objects & 1) && !skip_name(text))
                    return false;
                break;
            }
            if (!skip_byte(text, (objects & 1) ? '}' : ']'))
                return false;
            is_empty = false;
            objects >>= 1;
            depth--;
        }
    } while (depth > 0);
    return true;
}

/* Where a member is. */
typedef struct {
    const Byte *name, *name_end, *value, *value_end;
} Member;

enum { MEMBERS_MAX = 64, NAME_BYTES_MAX = 64 };

/* One whose name is plain, as all are that a request may have. */
static bool read_member(Text *text, Member *member)
{
    skip_space(text);
    if (!skip_byte(text, '"'))
        return false;
    member->name = text->at;
    skip_plain(text);
    member->name_end = text->at;
    if (member->name_end - member->name > NAME_BYTES_MAX || !skip_byte(text, '"'))
        return false;
    skip_space(text);
    if (!skip_byte(text, ':'))
        return false;
    skip_space(text);
    member->value = text->at;
    bool is_there = skip_value(text);
    member->value_end = text->at;
    return is_there;
}

/* The number of members of the object that the text is. -1: not known. */
static int read_members(Text text, Member *members)
{
    int num = 0;
    skip_space(&text);
    if (!skip_byte(&text, '{'))
        return -1;
    skip_space(&text);
    if (!has_byte(&text, '}')) {
        do {
            if (num == MEMBERS_MAX || !read_member(&text, &members[num++]))
                return -1;
            skip_space(&text);
        } while (skip_byte(&text, ','));
    }
    if (!skip_byte(&text, '}'))
        return -1;
    skip_space(&text);
    return text.at == text.end ? num : -1;
}

static PyObject *members_of(PyObject *Py_UNUSED(module), PyObject *body)
{
    if (!PyBytes_Check(body)) {
        PyErr_SetString(PyExc_TypeError, "members_of(body: bytes)");
        return NULL;
    }
    const Byte *begin = (const Byte *)PyBytes_AS_STRING(body);
    Member members[MEMBERS_MAX];
    int num = read_members((Text){begin, begin + PyBytes_GET_SIZE(body)}, members);
    if (num < 0)
        Py_RETURN_NONE;
    PyObject *list = PyList_New(num);
    for (int i = 0; list != NULL && i < num; i++) {
        const Member *each = &members[i];
        PyObject *item = Py_BuildValue(
            "(s#nn)", (const char *)each->name, (Py_ssize_t)(each->name_end - each->name),
            (Py_ssize_t)(each->value - begin), (Py_ssize_t)(each->value_end - begin));
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static PyMethodDef functions[] = {
    {"members_of", members_of, METH_O,
     "members_of(body, /)\n--\n\n"
     "Of each member of the JSON object that the bytes are, its name, and where its value begins "
     "and ends. None: it is no such object, or not known to be one."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_json_members",
    .m_doc = "JSON objects, taken apart.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__json_members(void)
{
    fill_hex_values();
    return PyModule_Create(&definition);
}
