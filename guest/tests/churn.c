/* Runs on the building machine: uses and then damages churn's heap, and tests its histogram. */
#include "../workloads/latency.h"
#include "../workloads/objects.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGES 300
#define BYTES (PAGES * OBJECTS_PAGE)

static struct objects heap;
static _Alignas(OBJECTS_PAGE) char memory[BYTES], before[BYTES];
static bool live[BYTES]; /* the bytes of the heap's memory that are in use */

static void work(uint64_t *random) {
    for (int i = 0; i < 20000; i++) {
        uint64_t r = lacuna_random(random), number = lacuna_below(r, heap.count);
        uint64_t *o = objects_find(&heap, number);
        if (!o || (r & 7) == 0) {
            if (!o || objects_replace(&heap, number, r))
                exit(1);
            continue;
        }
        uint64_t words = objects_words(objects_size(&heap, heap.place[number]));
        objects_update(&heap, o, 2 + r % (words - 2), r);
    }
}

static const char *verdict(void) {
    const void *where;
    const char *wrong = objects_check(&heap, &where);
    if (wrong && ((const char *)where < memory || (const char *)where >= memory + BYTES))
        return "where?";
    return wrong ? wrong : "ok";
}

static void set_live(const void *at, size_t bytes) {
    memset(live + ((const char *)at - memory), true, bytes);
}

static void find_live(void) {
    set_live(heap.place, heap.count * sizeof *heap.place);
    for (uint64_t i = 0; i < heap.count; i++) {
        uint64_t place = heap.place[i];
        set_live(objects_at(&heap, place), objects_words(objects_size(&heap, place)) * 8);
    }
    for (unsigned size = 0; size < OBJECTS_SIZES; size++) {
        for (uint64_t next = heap.free[size]; next; next = objects_at(&heap, next - 1)[1])
            set_live(objects_at(&heap, next - 1), 3 * 8);
    }
}

/* For each page: damages it (makes it zero, or as it was before the work), and prints the check's
 * verdict. */
static void damage(const char *how, size_t from, size_t bytes) {
    static char saved[OBJECTS_PAGE];
    for (uint64_t page = 0; page < PAGES; page++) {
        char *at = memory + page * OBJECTS_PAGE + from;
        const char *old = before + page * OBJECTS_PAGE + from;
        memcpy(saved, at, bytes);
        if (strcmp(how, "zero"))
            memcpy(at, old, bytes);
        else
            memset(at, 0, bytes);
        bool same = true;
        for (size_t i = 0; i < bytes; i++)
            same &= saved[i] == at[i] || !live[at - memory + i];
        printf("%s %s\n", how, same ? "same" : verdict());
        memcpy(at, saved, bytes);
    }
}

static int objects(void) {
    uint64_t random = 4711;
    memset(memory, 0xa5, BYTES);
    objects_init(&heap, memory, PAGES, 1);
    printf("init %s\n", verdict());
    work(&random);
    printf("work %s\n", verdict());
    memcpy(before, memory, BYTES);
    work(&random);
    printf("work %s\n", verdict());
    find_live();
    damage("zero", 0, OBJECTS_PAGE);
    damage("old", 0, OBJECTS_PAGE);
    damage("half", 1056, 2000);
    return 0;
}

/* The histogram of 1 .. 100000, and the histogram of no value. */
static int latency(void) {
    static struct latency l;
    printf("%lu\n", latency_percentile(&l, 5000));
    for (uint64_t v = 1; v <= 100000; v++)
        latency_add(&l, v);
    uint64_t parts[] = {0, 1, 5000, 9900, 9990, 9999, 10000};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        printf("%lu %lu\n", parts[i], latency_percentile(&l, parts[i]));
    for (unsigned i = 0; i < LATENCY_BUCKETS; i++) {
        uint64_t end = latency_end(i);
        bool last = i + 1 == LATENCY_BUCKETS;
        if (latency_bucket(end) != i || (!last && latency_bucket(end + 1) != i + 1))
            return 1;
    }
    return latency_end(LATENCY_BUCKETS - 1) != UINT64_MAX;
}

int main(int argc, char **argv) { return argc > 1 && *argv[1] == 'o' ? objects() : latency(); }
