/* siphash.c - SipHash-1-3 with 128 bits of output (Aumasson and Bernstein, 2012), over text that comes in pieces. */
#include <string.h>

#include "core.h"

static inline uint64_t rotated(uint64_t word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static inline uint64_t little_endian_word(const unsigned char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word); /* layout.h: little-endian machines only */
    return word;
}

static inline void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotated(v[1], 13) ^ v[0];
    v[3] = rotated(v[3], 16) ^ v[2];
    v[0] = rotated(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = rotated(v[1], 17) ^ v[2];
    v[3] = rotated(v[3], 21) ^ v[0];
    v[2] = rotated(v[2], 32);
}

static inline void absorb(uint64_t v[4], uint64_t word)
{
    v[3] ^= word;
    sip_round(v);
    v[0] ^= word;
}

static uint64_t squeeze(uint64_t v[4])
{
    for (int round = 0; round < 3; round++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

void siphash_begin(struct siphash *hash, const unsigned char key[SIPHASH_BYTES])
{
    uint64_t low = little_endian_word(key), high = little_endian_word(key + 8);
    *hash = (struct siphash){.v = {
                                 low ^ 0x736f6d6570736575ull,
                                 high ^ 0x646f72616e646f6dull ^ 0xee, /* 0xee: 128 bits of output */
                                 low ^ 0x6c7967656e657261ull,
                                 high ^ 0x7465646279746573ull,
                             }};
}

/* Bytes that fill up the word under way; how many of `bytes` that took. */
static size_t fill_word(struct siphash *hash, const unsigned char *bytes, size_t nbytes)
{
    size_t held = hash->nbytes % 8, taken = 0;
    if (held == 0)
        return 0;
    for (; held < 8 && taken < nbytes; taken++)
        hash->word |= (uint64_t)bytes[taken] << (8 * held++);
    if (held == 8) {
        absorb(hash->v, hash->word);
        hash->word = 0;
    }
    return taken;
}

void siphash_update(struct siphash *hash, const unsigned char *bytes, size_t nbytes)
{
    size_t position = fill_word(hash, bytes, nbytes);
    hash->nbytes += nbytes;
    uint64_t v[4]; /* in registers over the long run */
    memcpy(v, hash->v, sizeof v);
    for (; nbytes - position >= 8; position += 8)
        absorb(v, little_endian_word(bytes + position));
    memcpy(hash->v, v, sizeof v);
    size_t held = (hash->nbytes - (nbytes - position)) % 8;
    for (; position < nbytes; position++)
        hash->word |= (uint64_t)bytes[position] << (8 * held++);
}

void siphash_end(struct siphash *hash, unsigned char digest[SIPHASH_BYTES])
{
    absorb(hash->v, hash->word | hash->nbytes << 56);
    hash->v[2] ^= 0xee;
    uint64_t low = squeeze(hash->v);
    hash->v[1] ^= 0xdd;
    uint64_t high = squeeze(hash->v);
    memcpy(digest, &low, sizeof low);
    memcpy(digest + sizeof low, &high, sizeof high);
}
