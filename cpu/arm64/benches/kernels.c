/*
 * Programs for against_x86.rs, compiled for both architectures. `start` runs the one whose number
 * is its argument, puts the result and then a one at RESULT, and spins.
 */
typedef unsigned long u64;
typedef unsigned int u32;
typedef unsigned char u8;

#define RESULT ((volatile u64 *)0xff0000)
#define APART __attribute__((noinline))
#define BYTES 65536
#define NUMBERS 16384
#define SIDE 64
#define NODES 8192

static u64 seed = 88172645463325252UL;
static u32 table[256];
static u8 bytes[BYTES];
static int numbers[NUMBERS];
static int left[SIDE][SIDE], right[SIDE][SIDE], product[SIDE][SIDE];

struct node {
    struct node *less, *more;
    u64 key;
};
static struct node nodes[NODES];

void *memset(void *at, int value, u64 count)
{
    for (u8 *byte = at; count--; byte++)
        *byte = value;
    return at;
}

static u64 next(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

APART u64 checksum(void)
{
    u32 crc = ~0u;
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < BYTES; i++)
            crc = table[(crc ^ bytes[i]) & 255] ^ (crc >> 8);
    return crc;
}

APART void quicksort(int *v, int low, int high)
{
    while (low < high) {
        int pivot = v[(low + high) / 2], i = low, j = high;
        while (i <= j) {
            while (v[i] < pivot)
                i++;
            while (v[j] > pivot)
                j--;
            if (i <= j) {
                int kept = v[i];
                v[i++] = v[j];
                v[j--] = kept;
            }
        }
        if (j - low < high - i) {
            quicksort(v, low, j);
            low = i;
        } else {
            quicksort(v, i, high);
            high = j;
        }
    }
}

APART u64 sort(void)
{
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (int)next();
    quicksort(numbers, 0, NUMBERS - 1);
    return numbers[100];
}

APART u64 sieve(void)
{
    u64 primes = 0;
    for (int round = 0; round < 4; round++) {
        memset(bytes, 1, BYTES);
        primes = 0;
        for (u32 i = 2; i < BYTES; i++) {
            if (!bytes[i])
                continue;
            primes++;
            for (u32 j = 2 * i; j < BYTES; j += i)
                bytes[j] = 0;
        }
    }
    return primes;
}

APART u64 matrix(void)
{
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) {
            left[i][j] = i + j;
            right[i][j] = i - j;
        }
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < SIDE; i++)
            for (int j = 0; j < SIDE; j++) {
                int sum = 0;
                for (int k = 0; k < SIDE; k++)
                    sum += left[i][k] * right[k][j];
                product[i][j] = sum;
            }
    return product[3][5];
}

APART u64 collatz(void)
{
    u64 longest = 0;
    for (u64 i = 1; i < 8000; i++) {
        u64 n = i, steps = 0;
        for (; n != 1; steps++)
            n = n & 1 ? 3 * n + 1 : n >> 1;
        if (steps > longest)
            longest = steps;
    }
    return longest;
}

APART u64 tree(void)
{
    struct node *root = 0;
    for (int i = 0; i < 8000; i++) {
        u64 key = next() % 100000;
        struct node **at = &root;
        while (*at)
            at = key < (*at)->key ? &(*at)->less : &(*at)->more;
        nodes[i] = (struct node){ 0, 0, key };
        *at = &nodes[i];
    }
    u64 found = 0;
    for (int i = 0; i < 8000; i++) {
        u64 key = next() % 100000;
        struct node *n = root;
        while (n && n->key != key)
            n = key < n->key ? n->less : n->more;
        found += n != 0;
    }
    return found;
}

APART u64 fibonacci(int n)
{
    return n < 2 ? (u64)n : fibonacci(n - 1) + fibonacci(n - 2);
}

APART u64 text(void)
{
    u64 hash = 5381;
    for (int round = 0; round < 10; round++)
        for (int i = 0; i < BYTES; i++) {
            u8 c = bytes[i];
            if (c >= 'a' && c <= 'z')
                hash = hash * 33 + c;
            else if (c < 32)
                hash ^= c;
            else
                hash += c >> 1;
        }
    return hash;
}

APART u64 step(u64 x)
{
    switch (x & 15) {
    case 0: return x * 3;
    case 1: return x + 7;
    case 2: return x ^ 0x55;
    case 3: return x >> 1;
    case 4: return x - 9;
    case 5: return x * 5;
    case 6: return ~x;
    case 7: return x | 1;
    case 8: return x / 3;
    case 9: return x % 7;
    default: return x + 1;
    }
}

APART u64 cases(void)
{
    u64 x = 1;
    for (int i = 0; i < 300000; i++)
        x = step(x + i);
    return x;
}

APART u64 bits(void)
{
    u64 sum = 0;
    for (int i = 0; i < 100000; i++)
        for (u64 x = next(); x; x &= x - 1)
            sum++;
    return sum;
}

void start(u64 which)
{
    u64 result = 0;
    for (int i = 0; i < 256; i++) {
        u32 crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? 0xedb88320 ^ (crc >> 1) : crc >> 1;
        table[i] = crc;
    }
    for (int i = 0; i < BYTES; i++)
        bytes[i] = next();
    switch (which) {
    case 0: result = checksum(); break;
    case 1: result = sort(); break;
    case 2: result = sieve(); break;
    case 3: result = matrix(); break;
    case 4: result = collatz(); break;
    case 5: result = tree(); break;
    case 6: result = fibonacci(27); break;
    case 7: result = text(); break;
    case 8: result = cases(); break;
    case 9: result = bits(); break;
    }
    RESULT[0] = result;
    RESULT[1] = 1;
    for (;;)
        RESULT[2] = 0;
}
