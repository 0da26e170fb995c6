/*
 * A CUDA driver, cuBLASLt, NVRTC and NCCL that accept every call and compute nothing.
 *
 * A program on this stub shows the time of the host, the number of launches and the memory that it asks for, on a machine without a
 * GPU. Its numbers are meaningless: device memory is never written, and copies to the host return constants. `build.sh` compiles
 * the stub and makes the names under which programs look for the libraries.
 *
 * Environment variables:
 *   STUB_DEVICES    number of GPUs (1)
 *   STUB_GIB        memory of each GPU in GiB (79.1); an allocation beyond it fails with CUDA_ERROR_OUT_OF_MEMORY
 *   STUB_DRIVER     CUDA version of the driver (13000 for 13.0)
 *   STUB_NVRTC      CUDA version of NVRTC (13000)
 *   STUB_LAUNCH_NS  nanoseconds that each launch, product and upload takes on the calling thread (0)
 *   STUB_NCCL_NS    nanoseconds for which a communicator reports ncclInProgress after a group of calls (20000)
 *   STUB_SOURCES    folder for the CUDA C++ source of each compiled kernel
 *   STUB_LOG        1: prints large allocations, refused allocations and copies to the host
 *   STUB_QUIET      1: does not print the counts at the end
 *
 * At exit the stub prints to standard error the peak memory of each GPU and how often each kind of call was made.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long Address;
typedef void *Handle;

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NCCL_IN_PROGRESS = 7 };
enum { MAX_DEVICES = 16, MAX_ALLOCATIONS = 1 << 16, CONTEXTS = 0x1000 };

/* ---- Settings ---- */

static double number(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text ? atof(text) : otherwise;
}

static int devices;
static size_t device_bytes;
static long launch_ns, nccl_ns;
static int logs;

/* ---- Counts ---- */

#define COUNTS(X)                                                                                                         \
  X(launches) X(products) X(allocations) X(frees) X(uploads) X(downloads) X(copies) X(fills) X(waits) X(stream_waits)       \
  X(events) X(records) X(queries) X(collectives) X(collective_polls) X(kernels)
#define DECLARE(name) static atomic_long name;
COUNTS(DECLARE)

/* ---- Time ---- */

static long now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000L + time.tv_nsec;
}

static void take_launch_time(void) {
  if (launch_ns == 0) return;
  for (long end = now_ns() + launch_ns; now_ns() < end;) {
  }
}

/* ---- Memory ---- */

static struct {
  Address address;
  size_t bytes;
  int device;
} allocated[MAX_ALLOCATIONS];
static size_t used[MAX_DEVICES], peak[MAX_DEVICES];
static int allocated_end;
static Address next_address = 0x7f0000000000ull;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

/* The context of device `i` is the handle CONTEXTS + i. */
static __thread Handle context = (Handle)(uintptr_t)CONTEXTS;

static int current_device(void) {
  intptr_t device = (intptr_t)context - CONTEXTS;
  return device >= 0 && device < MAX_DEVICES ? (int)device : 0;
}

static double gib(size_t bytes) { return bytes / 1073741824.0; }

static int allocate(Address *address, size_t bytes) {
  const size_t granule = 2 << 20;
  int device = current_device(), at = 0;
  bytes = (bytes + granule - 1) / granule * granule;
  pthread_mutex_lock(&memory_lock);
  while (at < allocated_end && allocated[at].address) at++;
  int fits = used[device] + bytes <= device_bytes && at < MAX_ALLOCATIONS;
  if (fits) {
    *address = next_address;
    next_address += bytes;
    allocated[at].address = *address;
    allocated[at].bytes = bytes;
    allocated[at].device = device;
    if (at == allocated_end) allocated_end++;
    used[device] += bytes;
    if (used[device] > peak[device]) peak[device] = used[device];
    allocations++;
  }
  size_t total = used[device];
  pthread_mutex_unlock(&memory_lock);
  if (logs && (!fits || bytes >= 64 << 20))
    fprintf(stderr, "stub: %s %.2f GiB, %.2f GiB in use on GPU %d\n", fits ? "allocated" : "refused", gib(bytes), gib(total),
            device);
  return fits ? SUCCESS : OUT_OF_MEMORY;
}

static int release(Address address) {
  pthread_mutex_lock(&memory_lock);
  for (int at = 0; at < allocated_end; at++) {
    if (allocated[at].address == address) {
      used[allocated[at].device] -= allocated[at].bytes;
      allocated[at].address = 0;
      frees++;
      break;
    }
  }
  pthread_mutex_unlock(&memory_lock);
  return SUCCESS;
}

/*
 * What a copy to the host returns: ones. In a small copy the elements 0 and 12 are zero: in the reading of a training step they
 * are the outcome and the count of invalid gradients, so the step counts as taken.
 */
static void fill(void *host, size_t bytes) {
  float *values = host;
  size_t count = bytes / sizeof(float);
  for (size_t i = 0; i < count; i++) values[i] = 1.0f;
  if (bytes <= 4096 && count > 1) values[0] = 0.0f;
  if (bytes <= 4096 && count > 13) values[12] = 0.0f;
}

/* ---- Start and end ---- */

static void print_counts(void) {
  for (int device = 0; device < devices; device++)
    fprintf(stderr, "stub: peak memory of GPU %d: %.2f GiB\n", device, gib(peak[device]));
  fprintf(stderr, "stub:");
#define PRINT(name) fprintf(stderr, " %s %ld", #name, atomic_load(&name));
  COUNTS(PRINT)
  fprintf(stderr, "\n");
}

__attribute__((constructor)) static void start(void) {
  devices = (int)number("STUB_DEVICES", 1);
  if (devices < 1 || devices > MAX_DEVICES) {
    fprintf(stderr, "stub: invalid STUB_DEVICES: expected 1 to %d\n", MAX_DEVICES);
    exit(2);
  }
  device_bytes = (size_t)(number("STUB_GIB", 79.1) * 1073741824.0);
  launch_ns = (long)number("STUB_LAUNCH_NS", 0);
  nccl_ns = (long)number("STUB_NCCL_NS", 20000);
  logs = number("STUB_LOG", 0) != 0;
  if (number("STUB_QUIET", 0) == 0) atexit(print_counts);
}

static Handle new_handle(void) {
  static atomic_long next = 0x20000;
  return (Handle)(next += 16);
}

/* ---- CUDA: devices and contexts ---- */

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) {
  *version = (int)number("STUB_DRIVER", 13000);
  return SUCCESS;
}
int cuDeviceGetCount(int *count) {
  *count = devices;
  return SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return SUCCESS;
}
int cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, "NVIDIA H100 80GB HBM3");
  return SUCCESS;
}
int cuDeviceGetUuid(void *uuid, int device) {
  memset(uuid, 1 + device, 16);
  return SUCCESS;
}
int cuDeviceGetUuid_v2(void *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = device_bytes;
  return SUCCESS;
}
int cuDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", 4 + device);
  return SUCCESS;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return SUCCESS;
}

/* The attributes of an H100 SXM, by their numbers in cuda.h. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  static const int values[][2] = {
      {1, 1024},      {2, 1024},     {3, 1024},    {4, 64},        {5, 2147483647}, {6, 65535},  {7, 65535},    {8, 49152},
      {9, 65536},     {10, 32},      {12, 65536},  {13, 1980000},  {16, 132},       {36, 2619000}, {37, 5120},   {38, 52428800},
      {39, 2048},     {75, 9},       {76, 0},      {81, 233472},   {97, 232448},    {115, 1},
  };
  *value = 1;
  for (size_t i = 0; i < sizeof values / sizeof *values; i++)
    if (values[i][0] == attribute) *value = values[i][1];
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(Handle *result, int device) {
  *result = (Handle)(intptr_t)(CONTEXTS + device);
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxSetCurrent(Handle next) {
  context = next;
  return SUCCESS;
}
int cuCtxGetCurrent(Handle *result) {
  *result = context;
  return SUCCESS;
}
int cuCtxGetDevice(int *device) {
  *device = current_device();
  return SUCCESS;
}
int cuCtxSynchronize(void) {
  waits++;
  return SUCCESS;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}
int cuGetErrorName(int code, const char **name) {
  *name = "STUB";
  return SUCCESS;
}
int cuGetErrorString(int code, const char **text) {
  *text = "an error of the stub";
  return SUCCESS;
}

/* ---- CUDA: streams and events; all work is done at once ---- */

int cuStreamCreate(Handle *stream, unsigned flags) {
  *stream = new_handle();
  return SUCCESS;
}
int cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(Handle stream) { return SUCCESS; }
int cuStreamSynchronize(Handle stream) {
  waits++;
  return SUCCESS;
}
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
  stream_waits++;
  return SUCCESS;
}
int cuStreamIsCapturing(Handle stream, int *status) {
  *status = 0;
  return SUCCESS;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  *mode = 0;
  return SUCCESS;
}
int cuEventCreate(Handle *event, unsigned flags) {
  events++;
  *event = new_handle();
  return SUCCESS;
}
int cuEventDestroy_v2(Handle event) { return SUCCESS; }
int cuEventRecord(Handle event, Handle stream) {
  records++;
  return SUCCESS;
}
int cuEventSynchronize(Handle event) {
  waits++;
  return SUCCESS;
}
int cuEventQuery(Handle event) {
  queries++;
  return SUCCESS;
}
int cuEventElapsedTime(float *milliseconds, Handle from, Handle to) {
  *milliseconds = 1;
  return SUCCESS;
}
int cuEventElapsedTime_v2(float *milliseconds, Handle from, Handle to) { return cuEventElapsedTime(milliseconds, from, to); }
int cuCtxRecordEvent(Handle of, Handle event) {
  records++;
  return SUCCESS;
}
int cuCtxWaitEvent(Handle of, Handle event) {
  stream_waits++;
  return SUCCESS;
}

/* ---- CUDA: memory ---- */

int cuMemAlloc_v2(Address *address, size_t bytes) { return allocate(address, bytes); }
int cuMemAllocAsync(Address *address, size_t bytes, Handle stream) { return allocate(address, bytes); }
int cuMemFree_v2(Address address) { return release(address); }
int cuMemFreeAsync(Address address, Handle stream) { return release(address); }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  pthread_mutex_lock(&memory_lock);
  *free = device_bytes - used[current_device()];
  pthread_mutex_unlock(&memory_lock);
  *total = device_bytes;
  return SUCCESS;
}
int cuMemGetAddressRange_v2(Address *start, size_t *bytes, Address address) {
  int code = 1;
  pthread_mutex_lock(&memory_lock);
  for (int at = 0; at < allocated_end && code != SUCCESS; at++) {
    if (allocated[at].address && address - allocated[at].address < allocated[at].bytes) {
      *start = allocated[at].address;
      *bytes = allocated[at].bytes;
      code = SUCCESS;
    }
  }
  pthread_mutex_unlock(&memory_lock);
  return code;
}
int cuPointerGetAttribute(void *value, int attribute, Address address) {
  size_t bytes;
  /* The identity of an allocation, which the stub never uses twice: its address. */
  return cuMemGetAddressRange_v2(value, &bytes, address);
}
int cuMemAllocHost_v2(void **host, size_t bytes) {
  *host = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *host ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemHostAlloc(void **host, size_t bytes, unsigned flags) { return cuMemAllocHost_v2(host, bytes); }
int cuMemFreeHost(void *host) {
  free(host);
  return SUCCESS;
}
int cuMemcpyHtoD_v2(Address to, const void *from, size_t bytes) {
  uploads++;
  take_launch_time();
  return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Handle stream) { return cuMemcpyHtoD_v2(to, from, bytes); }
int cuMemcpyDtoH_v2(void *to, Address from, size_t bytes) {
  downloads++;
  if (logs) fprintf(stderr, "stub: copied %zu bytes to the host\n", bytes);
  fill(to, bytes);
  return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, Handle stream) { return cuMemcpyDtoH_v2(to, from, bytes); }
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Handle stream) {
  copies++;
  return SUCCESS;
}
int cuMemcpy2DAsync_v2(const void *copy, Handle stream) {
  copies++;
  take_launch_time();
  return SUCCESS;
}
int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Handle stream) {
  fills++;
  return SUCCESS;
}

/* ---- CUDA: kernels ---- */

int cuModuleLoadData(Handle *module, const void *image) {
  *module = new_handle();
  return SUCCESS;
}
int cuModuleGetFunction(Handle *function, Handle module, const char *name) {
  *function = new_handle();
  return SUCCESS;
}
int cuModuleUnload(Handle module) { return SUCCESS; }
int cuFuncSetAttribute(Handle function, int attribute, int value) { return SUCCESS; }
int cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   Handle stream, void **arguments, void **extra) {
  launches++;
  take_launch_time();
  return SUCCESS;
}

/* ---- NVRTC ---- */

int nvrtcVersion(int *major, int *minor) {
  int version = (int)number("STUB_NVRTC", 13000);
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return SUCCESS;
}
int nvrtcCreateProgram(Handle *program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
  long index = kernels++;
  const char *folder = getenv("STUB_SOURCES");
  *program = new_handle();
  if (folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/kernel_%04ld.cu", folder, index);
    FILE *file = fopen(path, "w");
    if (file) {
      fputs(source, file);
      fclose(file);
    } else {
      fprintf(stderr, "stub: cannot write %s\n", path);
    }
  }
  return SUCCESS;
}
int nvrtcCompileProgram(Handle program, int count, const char *const *options) { return SUCCESS; }
int nvrtcDestroyProgram(Handle *program) { return SUCCESS; }
static const char PTX[] = "// ptx";
int nvrtcGetPTXSize(Handle program, size_t *bytes) {
  *bytes = sizeof PTX;
  return SUCCESS;
}
int nvrtcGetPTX(Handle program, char *ptx) {
  memcpy(ptx, PTX, sizeof PTX);
  return SUCCESS;
}
int nvrtcGetProgramLogSize(Handle program, size_t *bytes) {
  *bytes = 1;
  return SUCCESS;
}
int nvrtcGetProgramLog(Handle program, char *text) {
  *text = 0;
  return SUCCESS;
}
const char *nvrtcGetErrorString(int code) { return "an error of the stub"; }

/* ---- cuBLASLt ---- */

/* cublasLtMatmulHeuristicResult_t has 96 bytes; the size of the workspace stands behind the 64 of the algorithm. */
enum { HEURISTIC_BYTES = 96, WORKSPACE_OFFSET = 64, WORKSPACE = 32 << 20 };

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(Handle *library) {
  *library = new_handle();
  return SUCCESS;
}
int cublasLtDestroy(Handle library) { return SUCCESS; }
int cublasLtMatmulDescCreate(Handle *description, int compute, int scale) { return cublasLtCreate(description); }
int cublasLtMatmulDescDestroy(Handle description) { return SUCCESS; }
int cublasLtMatmulDescSetAttribute(Handle description, int attribute, const void *value, size_t bytes) { return SUCCESS; }
int cublasLtMatrixLayoutCreate(Handle *layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  return cublasLtCreate(layout);
}
int cublasLtMatrixLayoutDestroy(Handle layout) { return SUCCESS; }
int cublasLtMatrixLayoutSetAttribute(Handle layout, int attribute, const void *value, size_t bytes) { return SUCCESS; }
int cublasLtMatmulPreferenceCreate(Handle *preference) { return cublasLtCreate(preference); }
int cublasLtMatmulPreferenceDestroy(Handle preference) { return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(Handle preference, int attribute, const void *value, size_t bytes) { return SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(Handle library, Handle description, Handle a, Handle b, Handle c, Handle d, Handle preference,
                                   int requested, char *results, int *found) {
  size_t workspace = WORKSPACE;
  memset(results, 0, HEURISTIC_BYTES);
  memcpy(results + WORKSPACE_OFFSET, &workspace, sizeof workspace);
  *found = 1;
  return SUCCESS;
}
int cublasLtMatmulAlgoCheck(Handle library, Handle description, Handle a, Handle b, Handle c, Handle d, const void *algorithm,
                            char *result) {
  memset(result, 0, HEURISTIC_BYTES);
  return SUCCESS;
}
int cublasLtMatmul(Handle library, Handle description, const void *alpha, const void *a, Handle a_layout, const void *b,
                   Handle b_layout, const void *beta, const void *c, Handle c_layout, void *d, Handle d_layout,
                   const void *algorithm, void *workspace, size_t bytes, Handle stream) {
  products++;
  take_launch_time();
  return SUCCESS;
}

/* ---- NCCL 2.27: non-blocking communicators, whose ranks need not meet ---- */

typedef struct {
  int rank, size;
  /* Until then it reports that a call is in progress. */
  atomic_long busy_until;
} Comm;

typedef struct {
  char bytes[128];
} UniqueId;

enum { MAX_GROUP = 1024 };
static __thread int group_depth, group_size;
static __thread Comm *group[MAX_GROUP];

/* NCCL ends a group of a non-blocking communicator on a thread that it starts, and returns at once. */
static int end_group(void) {
  long until = now_ns() + nccl_ns;
  for (int i = 0; i < group_size; i++) atomic_store(&group[i]->busy_until, until);
  int code = group_size > 0 && nccl_ns > 0 ? NCCL_IN_PROGRESS : SUCCESS;
  group_size = 0;
  return code;
}

static int call_on(Comm *comm) {
  int is_new = 1;
  for (int i = 0; i < group_size; i++) is_new &= group[i] != comm;
  if (is_new && group_size < MAX_GROUP) group[group_size++] = comm;
  return group_depth > 0 ? SUCCESS : end_group();
}

static int new_comm(Comm **comm, int size, int rank) {
  *comm = calloc(1, sizeof **comm);
  (*comm)->rank = rank;
  (*comm)->size = size;
  return call_on(*comm);
}

int ncclGetVersion(int *version) {
  *version = 22700;
  return SUCCESS;
}
const char *ncclGetErrorString(int code) { return "an error of the stub"; }
const char *ncclGetLastError(Comm *comm) { return ""; }
int ncclGetUniqueId(UniqueId *id) {
  memset(id, 7, sizeof *id);
  return SUCCESS;
}
int ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, void *config) { return new_comm(comm, size, rank); }
int ncclCommSplit(Comm *parent, int colour, int key, Comm **comm, void *config) {
  if (colour >= 0) return new_comm(comm, parent->size, key);
  *comm = NULL;
  return call_on(parent);
}
int ncclCommGetAsyncError(Comm *comm, int *code) {
  collective_polls++;
  *code = now_ns() < atomic_load(&comm->busy_until) ? NCCL_IN_PROGRESS : SUCCESS;
  return SUCCESS;
}
int ncclCommUserRank(Comm *comm, int *rank) {
  *rank = comm->rank;
  return SUCCESS;
}
int ncclCommCount(Comm *comm, int *size) {
  *size = comm->size;
  return SUCCESS;
}
int ncclCommFinalize(Comm *comm) { return SUCCESS; }
int ncclCommDestroy(Comm *comm) {
  free(comm);
  return SUCCESS;
}
/* Another thread may still poll it. */
int ncclCommAbort(Comm *comm) { return SUCCESS; }
int ncclGroupStart(void) {
  group_depth++;
  return SUCCESS;
}
int ncclGroupEnd(void) { return --group_depth > 0 ? SUCCESS : end_group(); }

static int collective(Comm *comm) {
  collectives++;
  return call_on(comm);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Comm *comm, Handle stream) {
  return collective(comm);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, Handle stream) { return collective(comm); }
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Comm *comm, Handle stream) {
  return collective(comm);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, Handle stream) {
  return collective(comm);
}
int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, Handle stream) { return collective(comm); }
int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, Handle stream) { return collective(comm); }

int ncclMemAlloc(void **address, size_t bytes) {
  Address found = 0;
  int code = allocate(&found, bytes);
  *address = (void *)found;
  return code;
}
int ncclMemFree(void *address) { return release((Address)address); }
int ncclCommRegister(Comm *comm, void *address, size_t bytes, Handle *registration) {
  *registration = new_handle();
  return SUCCESS;
}
int ncclCommDeregister(Comm *comm, Handle registration) { return SUCCESS; }
int ncclCommWindowRegister(Comm *comm, void *address, size_t bytes, Handle *window, int flags) {
  *window = new_handle();
  return call_on(comm);
}
int ncclCommWindowDeregister(Comm *comm, Handle window) { return SUCCESS; }
