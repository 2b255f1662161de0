// A doorbell: kernels on a GPU ask for experts in pinned memory, a thread here has the pool compute them, and the GPU
// waits for their outputs there. One request is under way at a time.
#include "experts.c"

enum { MOST = 64, PAIRS = 256, OFF_S = 60 };
typedef struct {
    // The device writes these; a request is complete when `posted` is its number.
    _Atomic int64_t posted, awaited; // `awaited`: the GPU has nothing left to do but to wait for this number
    int64_t layer, tokens, top_k, fetched; // `fetched`: missing experts that come over the link
    _Atomic int64_t given_up;
    // The host writes these.
    _Alignas(128) _Atomic int64_t done;
    _Atomic int64_t code, requests, computed, cpu_ns, link_ns; // of the last expert of a request, by both lines
    _Alignas(256) _Atomic int64_t shares[MOST + 1]; // of so many missing experts the CPU computes so many; [0]: not off
    _Alignas(1024) int64_t ids[PAIRS]; // by pair of token and expert; below 0: not here
} mail;
_Static_assert(sizeof(mail) <= 4096, "x begins there");

// A line through times by number of experts, of which older ones fade.
typedef struct { double weight, n, t, nn, nt; } line;

typedef struct {
    pool *workers;
    mail *box;
    const uint16_t *x;
    uint16_t *out;
    const request *layers;
    int num_layers, is_fixed;
    double spin_s, off_since; // 0: not off
    _Atomic uint32_t is_closing;
    line cpu, link;
    pthread_t thread;
} doorbell;

static double time_of(const line *l, double n) {
    if (l->weight == 0) return 0;
    double mean = l->n / l->weight, spread = l->nn / l->weight - mean * mean;
    double slope = spread > .05 ? (l->nt / l->weight - mean * l->t / l->weight) / spread : l->t / (l->n + l->weight);
    return l->t / l->weight + (slope > 0 ? slope : 0) * (n - mean);
}

static void add(line *l, double n, double t) {
    if (l->weight > 16 && t > 3 * time_of(l, n)) t = 3 * time_of(l, n); // other processes had the core
    l->weight = .998 * l->weight + 1, l->n = .998 * l->n + n, l->t = .998 * l->t + t;
    l->nn = .998 * l->nn + n * n, l->nt = .998 * l->nt + n * t;
}

// Of the two lines, those that have what to go by; of a CPU that is far slower a few times are enough.
static int num_known(const doorbell *d) {
    if (d->cpu.weight > 4 && d->link.weight > 4 && d->cpu.t * d->link.n > 6 * d->link.t * d->cpu.n) return 2;
    return (d->cpu.weight > 32) + (d->link.weight > 32);
}

// The share of the CPU that ends the step first; until both lines have what to go by, one or two of an even number, so
// that a CPU which is ten times slower delays few steps, and by no more than that. What the CPU computes enters no
// slot, and a third of it is missed again, by both traces of docs/notes/expert-cache.md.
static void divide(doorbell *d) {
    double again = .33 * (time_of(&d->link, 2) - time_of(&d->link, 1));
    int is_known = num_known(d) == 2, is_used = 0;
    for (int64_t missing = 1; missing <= MOST; missing++) {
        int is_tried = missing % 2 == 0 || d->link.weight > 32; // with one expert a token there may be no even number
        int64_t best = is_known || d->cpu.weight > 32 || !is_tried ? 0 : missing < 4 ? 1 : 2;
        double least = time_of(&d->link, missing);
        for (int64_t share = 1; is_known && share <= missing; share++) {
            double a = time_of(&d->link, missing - share), b = time_of(&d->cpu, share);
            double t = (a > b ? a : b) + again * share;
            if (t < .97 * least) best = share, least = t;
        }
        atomic_store(&d->box->shares[missing], best);
        is_used |= best > 0 && missing <= 8;
    }
    d->off_since = is_known && !is_used ? now() : 0;
    atomic_store(&d->box->shares[0], d->off_since == 0); // or the GPU asks for nothing, and threads sleep
    atomic_store(&d->box->cpu_ns, 1e9 * (time_of(&d->cpu, 2) - time_of(&d->cpu, 1)));
    atomic_store(&d->box->link_ns, 1e9 * (time_of(&d->link, 2) - time_of(&d->link, 1)));
}

// A request took the CPU `cpu_s` for `count` experts, and the link `link_s` for `fetched`, or 0: the CPU was later.
static void learn(doorbell *d, int64_t count, double cpu_s, int64_t fetched, double link_s) {
    int known = num_known(d);
    if (count) add(&d->cpu, count, cpu_s);
    if (link_s > 0) add(&d->link, fetched, link_s);
    atomic_fetch_add(&d->box->computed, count);
    int is_due = !(atomic_fetch_add(&d->box->requests, 1) % 64) || num_known(d) != known;
    if (is_due && !d->is_fixed) divide(d);
}

static void look_again(doorbell *d) {
    if (d->off_since == 0 || now() - d->off_since < OFF_S) return;
    d->cpu = (line){0};
    divide(d);
}

static void answer(doorbell *d, int64_t number) {
    mail *box = d->box;
    double begin = now();
    request asked = d->layers[box->layer];
    asked.tokens = box->tokens, asked.top_k = box->top_k, asked.is_apart = 1;
    asked.x = d->x, asked.out = d->out;
    int64_t count = 0, fetched = box->fetched, pairs = asked.tokens * asked.top_k, ids[PAIRS];
    memcpy(ids, box->ids, sizeof ids); // a step that raised leaves its request, and the next one writes over it
    asked.ids = ids;
    for (int64_t i = 0, before; i < pairs; i++) {
        for (before = 0; before < i && ids[before] != ids[i]; before++);
        count += ids[i] >= 0 && before == i;
    }
    int code = count ? experts_run(d->workers, &asked) : FINE;
    for (int64_t i = 0; code && i < pairs * asked.down.outputs; i++) d->out[i] = 0x7FC0; // NaN: not to be used
    if (code) atomic_store(&box->code, code);
    int is_late = atomic_load(&box->awaited) == number;
    atomic_store(&box->done, number);
    double cpu_s = now() - begin, link_s = 0;
    while (!is_late && atomic_load(&box->awaited) != number && atomic_load(&box->posted) == number
           && now() - begin < .01 && !atomic_load(&d->is_closing));
    if (!is_late && atomic_load(&box->awaited) == number) link_s = now() - begin;
    learn(d, count, cpu_s, fetched, link_s);
}

static void *attend(void *given) {
    doorbell *d = given;
    const struct timespec nap = {0, 1000000};
    int64_t seen = atomic_load(&d->box->done);
    pin(d->workers->seats[0].core);
    for (double last = now(); !atomic_load(&d->is_closing);) {
        int64_t posted = atomic_load(&d->box->posted);
        if (posted != seen) answer(d, seen = posted), last = now();
        else if (now() - last > d->spin_s) nanosleep(&nap, 0), look_again(d);
#ifdef HAS_X86
        else _mm_pause();
#endif
    }
    return 0;
}

// `workers` belong to it from here on. NULL: the system has no memory or no thread for it.
doorbell *doorbell_start(pool *workers, void *box, const void *x, void *out, const request *layers, int num_layers,
                         int is_fixed, double spin_s) {
    doorbell *d = calloc(1, sizeof *d);
    if (d) {
        d->workers = workers, d->box = box, d->x = x, d->out = out, d->layers = layers, d->num_layers = num_layers;
        d->is_fixed = is_fixed, d->spin_s = spin_s;
        if (!is_fixed) divide(d);
        if (!pthread_create(&d->thread, 0, attend, d)) return d;
    }
    free(d);
    experts_stop(workers);
    return 0;
}

// 0: it has ended; else it may still read and write its memory. The device waits for nothing by now.
int doorbell_stop(doorbell *d) {
    struct timespec end;
    atomic_store(&d->is_closing, 1);
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 2 + (time_t)d->workers->patience_s;
    if (pthread_timedjoin_np(d->thread, 0, &end)) return STUCK;
    int code = d->workers->is_broken ? STUCK : FINE;
    experts_stop(d->workers);
    free(d);
    return code;
}
