// Times every kernel, copy and fill of a program by CUPTI's injection. The program needs no change.
//
//   cc -O2 -shared -fPIC cupti_trace.c -o libtrace.so -I/usr/local/cuda/include -I$CUPTI/include $CUPTI/lib64/libcupti.so
//   CUDA_INJECTION64_PATH=$PWD/libtrace.so TRACE_OUT=trace.tsv burn-megatron-bench step --device cuda ..
//
// Each line of TRACE_OUT is one kernel with one grid: ms, launches, mean us, grid, block, registers, shared memory, local
// memory per thread (spilled registers), name. The last line has the time from the first launch to the last one, the busy
// time, and the gaps of 20 us and more. TRACE_SKIP_MS leaves out the first milliseconds, as of compilation and warm-up.
#include <cupti.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 8192
#define NAME 200
#define GAP_NS 20000

typedef struct {
  char name[NAME];
  int grid[3], block[3], registers, shared, local;
  uint64_t ns, launches;
} Row;

typedef struct {
  uint64_t start, end;
} Span;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Row rows[ROWS];
static int used;
static Span *spans;
static size_t count, room;
static uint64_t first_start, skip_ns;

/* Returns the row of a kernel with a grid, a new one if needed, or NULL if there are too many. */
static Row *find(const char *name, const int *grid, const int *block, int registers, int shared, int local) {
  for (int i = 0; i < used; i++) {
    Row *row = &rows[i];
    if (!strncmp(row->name, name, NAME - 1) && !memcmp(row->grid, grid, sizeof row->grid) && row->shared == shared)
      return row;
  }
  if (used == ROWS) return NULL;
  Row *row = &rows[used++];
  snprintf(row->name, NAME, "%s", name);
  memcpy(row->grid, grid, sizeof row->grid);
  memcpy(row->block, block, sizeof row->block);
  row->registers = registers;
  row->shared = shared;
  row->local = local;
  return row;
}

static void add_span(uint64_t start, uint64_t end) {
  if (count == room) {
    size_t larger = room ? 2 * room : 1 << 16;
    Span *moved = realloc(spans, larger * sizeof *spans);
    if (!moved) return;
    spans = moved;
    room = larger;
  }
  spans[count++] = (Span){start, end};
}

static void add(Row *row, uint64_t start, uint64_t end) {
  if (!start || end < start) return;
  if (!first_start || start < first_start) first_start = start;
  if (start < first_start + skip_ns) return;
  add_span(start, end);
  if (!row) return;
  row->ns += end - start;
  row->launches++;
}

static void add_record(CUpti_Activity *record) {
  static const int none[3];
  char name[64];
  if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || record->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
    CUpti_ActivityKernel9 *k = (void *)record;
    int shared = k->staticSharedMemory + k->dynamicSharedMemory;
    add(find(k->name ? k->name : "?", &k->gridX, &k->blockX, k->registersPerThread, shared, k->localMemoryPerThread),
        k->start, k->end);
  } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    CUpti_ActivityMemcpy5 *m = (void *)record;
    snprintf(name, sizeof name, "memcpy kind %d, %llu bytes", m->copyKind, (unsigned long long)m->bytes);
    add(find(name, none, none, 0, 0, 0), m->start, m->end);
  } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    CUpti_ActivityMemset4 *m = (void *)record;
    add(find("memset", none, none, 0, 0, 0), m->start, m->end);
  }
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *records) {
  *size = 8 << 20;
  *buffer = aligned_alloc(64, *size);
  *records = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)context, (void)stream, (void)size;
  CUpti_Activity *record = NULL;
  pthread_mutex_lock(&lock);
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) add_record(record);
  pthread_mutex_unlock(&lock);
  free(buffer);
}

static int by_time(const void *a, const void *b) {
  const Row *x = a, *y = b;
  return (x->ns < y->ns) - (x->ns > y->ns);
}

static int by_start(const void *a, const void *b) {
  const Span *x = a, *y = b;
  return (x->start > y->start) - (x->start < y->start);
}

static void write_rows(FILE *file) {
  qsort(rows, used, sizeof *rows, by_time);
  for (int i = 0; i < used; i++) {
    Row *r = &rows[i];
    if (!r->launches) continue;
    fprintf(file, "%.3f\t%llu\t%.2f\t%dx%dx%d\t%dx%dx%d\t%d\t%d\t%d\t%s\n", r->ns / 1e6, (unsigned long long)r->launches,
            r->ns / 1e3 / r->launches, r->grid[0], r->grid[1], r->grid[2], r->block[0], r->block[1], r->block[2],
            r->registers, r->shared, r->local, r->name);
  }
}

static void write_gaps(FILE *file) {
  if (!count) return;
  qsort(spans, count, sizeof *spans, by_start);
  uint64_t end = spans[0].start, busy = 0, gaps = 0, idle = 0;
  for (size_t i = 0; i < count; i++) {
    if (spans[i].start > end) {
      uint64_t gap = spans[i].start - end;
      if (gap >= GAP_NS) gaps++, idle += gap;
      end = spans[i].start;
    }
    if (spans[i].end > end) {
      busy += spans[i].end - end;
      end = spans[i].end;
    }
  }
  fprintf(file, "# span %.3f ms, busy %.3f ms, %llu gaps >= %d us of %.3f ms, %zu records\n",
          (end - spans[0].start) / 1e6, busy / 1e6, (unsigned long long)gaps, GAP_NS / 1000, idle / 1e6, count);
}

static void finish(void) {
  cuptiActivityFlushAll(1);
  pthread_mutex_lock(&lock);
  const char *path = getenv("TRACE_OUT");
  FILE *file = fopen(path ? path : "trace.tsv", "w");
  if (file) {
    write_rows(file);
    write_gaps(file);
    fclose(file);
  }
  pthread_mutex_unlock(&lock);
}

/* The driver calls this function when it loads the library. */
int InitializeInjection(void) {
  const char *skip = getenv("TRACE_SKIP_MS");
  skip_ns = skip ? strtoull(skip, NULL, 10) * 1000000ull : 0;
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  CUptiResult result = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  if (result != CUPTI_SUCCESS) fprintf(stderr, "trace: cuptiActivityEnable failed with %d\n", result);
  atexit(finish);
  return 1;
}
