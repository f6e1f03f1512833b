/* strings.c - where the long strings of a JSON text are, so that their content need not become objects. */
#include <string.h>

#include "core.h"

#define EVERY_BYTE(value) (0x0101010101010101ull * (value))

/* Whether a byte is not printable ASCII: below 0x20, or 0x80 and above. */
static bool has_odd_byte(const unsigned char *text, size_t nbytes)
{
    uint64_t odd = 0;
    size_t position = 0;
    for (; position + 8 <= nbytes; position += 8) {
        uint64_t word;
        memcpy(&word, text + position, sizeof word);
        odd |= word | ((word - EVERY_BYTE(0x20)) & ~word);
    }
    for (; position < nbytes; position++)
        odd |= text[position] < 0x20 ? 0x80 : text[position];
    return (odd & EVERY_BYTE(0x80)) != 0;
}

/* The position of the quote that ends the string which begins at `start`, or nbytes. Linear: the quote is
 * looked for again only once an escape has passed it. */
static size_t string_end(const unsigned char *text, size_t nbytes, size_t start, bool *has_escape)
{
    size_t position = start, quote = start;
    bool quote_known = false;
    *has_escape = false;
    while (position < nbytes) {
        if (!quote_known || quote < position) {
            const unsigned char *found = memchr(text + position, '"', nbytes - position);
            if (found == NULL)
                return nbytes;
            quote = (size_t)(found - text);
            quote_known = true;
        }
        const unsigned char *escape = memchr(text + position, '\\', quote - position);
        if (escape == NULL)
            return quote;
        *has_escape = true;
        position = (size_t)(escape - text) + 2;
    }
    return nbytes;
}

size_t long_strings(const unsigned char *text, size_t nbytes, size_t min_bytes, struct string_extent *found,
                    size_t capacity)
{
    size_t count = 0, position = 0;
    while (position < nbytes && count < capacity) {
        const unsigned char *quote = memchr(text + position, '"', nbytes - position);
        if (quote == NULL)
            break;
        size_t start = (size_t)(quote - text) + 1;
        bool has_escape;
        size_t end = string_end(text, nbytes, start, &has_escape);
        if (end >= nbytes)
            break;
        if (end - start >= min_bytes && !has_escape && !has_odd_byte(text + start, end - start))
            found[count++] = (struct string_extent){.start = start, .end = end};
        position = end + 1;
    }
    return count;
}
