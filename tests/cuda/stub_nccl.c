/* A stand-in for libnccl.so.2 that works on host memory, for tests without a GPU.
 *
 * Ranks are threads of one process. A group executes when its last ncclGroupEnd is called: every rank posts its
 * operations and each result is computed from all ranks' buffers, so the results are real. Every call is recorded with
 * the arguments that arrived. The stub_* functions at the end make it stuck or failing.
 * What is imitated of NCCL on purpose: NaN loses in min and max, counts and dtypes of the ranks are not compared.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
enum { MAX_RANKS = 8, MAX_WORLDS = 256, MAX_QUEUE = 4096, MAX_CALLS = 4096 };

typedef struct { char internal[128]; } UniqueId;
typedef struct {
  int kind, dtype, op, peer;
  size_t count;
  const char *send;
  char *recv;
  struct Comm *comm;
} Op;

typedef struct {
  UniqueId id;
  int size, joined, arrived, is_broken;
  unsigned long turn;
  Op *posted[MAX_RANKS];
  pthread_cond_t moved;
} World;

typedef struct Comm {
  World *world;
  int rank, is_aborted;
} Comm;

typedef struct { char name[24]; size_t count; int dtype, op, peer, in_group; void *stream; } Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static World worlds[MAX_WORLDS];
static int num_worlds, num_ids;
static Call calls[MAX_CALLS];
static int num_calls;
static char last_error[256];

/* Knobs. */
enum { VERSION = 23203 };
static int is_computing = 1, fail_code, async_code;
static int is_stuck; /* calls that would block wait for this to become 0 */
static pthread_cond_t unstuck = PTHREAD_COND_INITIALIZER;

static __thread int depth;
static __thread Op queue[MAX_QUEUE];
static __thread int queued;
static __thread int group_error;

static void record(const char *name, size_t count, int dtype, int op, int peer, void *stream) {
  pthread_mutex_lock(&lock);
  if (num_calls < MAX_CALLS) {
    Call *call = &calls[num_calls++];
    snprintf(call->name, sizeof call->name, "%s", name);
    call->count = count, call->dtype = dtype, call->op = op, call->peer = peer;
    call->in_group = depth, call->stream = stream;
  }
  pthread_mutex_unlock(&lock);
}

static int refuse(int code, const char *message) {
  snprintf(last_error, sizeof last_error, "%s", message);
  return code;
}

static void linger(void) {
  pthread_mutex_lock(&lock);
  while (is_stuck) pthread_cond_wait(&unstuck, &lock);
  pthread_mutex_unlock(&lock);
}

static int width(int dtype) {
  static const int widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return widths[dtype];
}

static float from_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static uint32_t to_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

static double half_to_double(uint16_t half) {
  int exponent = half >> 10 & 31, fraction = half & 1023;
  double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                                : ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
  return half & 0x8000 ? -value : value;
}

static uint16_t double_to_half(double value) {
  uint16_t sign = signbit(value) ? 0x8000 : 0;
  double size = fabs(value);
  if (isnan(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  int exponent = size < ldexp(1, -14) ? -14 : ilogb(size);
  double fraction = nearbyint(ldexp(size, 10 - exponent)); /* 10 bits after the point, ties to even */
  return sign | (uint16_t)(((exponent + 14) << 10) + (int)fraction);
}

/* Every element as a long double: wide enough for 64-bit integers on x86 and ARM. */
static long double load(const char *data, size_t index, int dtype) {
  const void *at = data + index * width(dtype);
  switch (dtype) {
    case INT8: return *(const int8_t *)at;
    case UINT8: return *(const uint8_t *)at;
    case INT32: return *(const int32_t *)at;
    case UINT32: return *(const uint32_t *)at;
    case INT64: return *(const int64_t *)at;
    case UINT64: return *(const uint64_t *)at;
    case FLOAT16: return half_to_double(*(const uint16_t *)at);
    case FLOAT32: return *(const float *)at;
    case FLOAT64: return *(const double *)at;
    default: return from_bits((uint32_t) * (const uint16_t *)at << 16);
  }
}

static void store(char *data, size_t index, int dtype, long double value) {
  void *at = data + index * width(dtype);
  switch (dtype) {
    case INT8: *(int8_t *)at = (int8_t)(int64_t)value; break;
    case UINT8: *(uint8_t *)at = (uint8_t)(int64_t)value; break;
    case INT32: *(int32_t *)at = (int32_t)(int64_t)value; break;
    case UINT32: *(uint32_t *)at = (uint32_t)(int64_t)value; break;
    case INT64: *(int64_t *)at = (int64_t)value; break;
    case UINT64: *(uint64_t *)at = (uint64_t)value; break;
    case FLOAT16: *(uint16_t *)at = double_to_half(value); break;
    case FLOAT32: *(float *)at = (float)value; break;
    case FLOAT64: *(double *)at = (double)value; break;
    default: {
      uint32_t bits = to_bits((float)value);
      *(uint16_t *)at = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
}

/* Reduce element `index` of all ranks' send buffers. */
static long double reduced(World *world, Op **ops, size_t index) {
  long double result = 0;
  for (int rank = 0; rank < world->size; rank++) {
    Op *op = ops[rank];
    long double value = load(op->send, index, op->dtype);
    if (rank == 0) result = value;
    else if (op->op == PROD) result *= value;
    else if (op->op == MAX) result = fmaxl(result, value);
    else if (op->op == MIN) result = fminl(result, value);
    else result += value;
  }
  return ops[0]->op == AVG ? result / world->size : result;
}

/* Compute this rank's result into `result`; return its length in elements, 0 for none. */
static size_t compute(Op *mine, World *world, char *result) {
  Op **ops = world->posted;
  int rank = mine->comm->rank, bytes = width(mine->dtype);
  size_t count = mine->count;
  switch (mine->kind) {
    case REDUCE:
      if (mine->peer != rank) return 0; /* fall through */
    case ALL_REDUCE:
      for (size_t i = 0; i < count; i++) store(result, i, mine->dtype, reduced(world, ops, i));
      return count;
    case REDUCE_SCATTER:
      for (size_t i = 0; i < count; i++) store(result, i, mine->dtype, reduced(world, ops, rank * count + i));
      return count;
    case BROADCAST:
      memcpy(result, ops[mine->peer]->send, count * bytes);
      return count;
    default: /* ALL_GATHER */
      for (int peer = 0; peer < world->size; peer++) memcpy(result + peer * count * bytes, ops[peer]->send, count * bytes);
      return count * world->size;
  }
}

/* Wait until all ranks of the world are here; with the lock held. */
static int meet(World *world) {
  unsigned long turn = world->turn;
  if (++world->arrived == world->size) {
    world->arrived = 0, world->turn++;
    pthread_cond_broadcast(&world->moved);
  }
  while (world->turn == turn && !world->is_broken) pthread_cond_wait(&world->moved, &lock);
  return world->is_broken ? refuse(REMOTE_ERROR, "the world is broken") : SUCCESS;
}

static int run_collective(Op *op) {
  World *world = op->comm->world;
  size_t nbytes = op->count * width(op->dtype) * (op->kind == ALL_GATHER ? world->size : 1);
  char *result = malloc(nbytes ? nbytes : 1);
  size_t count = 0;
  pthread_mutex_lock(&lock);
  world->posted[op->comm->rank] = op;
  int status = meet(world);
  if (!status && is_computing) count = compute(op, world, result);
  if (!status) status = meet(world); /* all have read: now the buffers may be overwritten, also in place */
  pthread_mutex_unlock(&lock);
  if (!status && count) memcpy(op->recv, result, count * width(op->dtype));
  free(result);
  return status;
}

static int run_queue(void) {
  int status = group_error, num_ops = queued;
  queued = 0, group_error = SUCCESS;
  for (int i = 0; i < num_ops && !status; i++) status = run_collective(&queue[i]);
  return status;
}

static int enqueue(const char *name, int kind, const void *send, void *recv, size_t count, int dtype, int op, int peer,
                   Comm *comm, void *stream) {
  record(name, count, dtype, op, peer, stream);
  linger();
  int status = SUCCESS;
  if (fail_code) status = refuse(fail_code, "the stub was told to fail");
  else if (!comm || comm->is_aborted) status = refuse(INVALID_ARGUMENT, "no such communicator");
  else if (dtype < 0 || dtype > BFLOAT16) status = refuse(INVALID_ARGUMENT, "no such dtype");
  else if (op > AVG) status = refuse(INVALID_ARGUMENT, "no such op");
  if (status) {
    if (depth) group_error = status;
    return status;
  }
  queue[queued++] = (Op){kind, dtype, op, peer, count, send, recv, comm};
  return depth ? SUCCESS : run_queue();
}

int ncclGetVersion(int *out) { *out = VERSION; return SUCCESS; }

int ncclGetUniqueId(UniqueId *id) {
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(i % 3 ? i + num_ids * 7 : 0); /* zeros in every third place */
  id->internal[127] = (char)++num_ids;
  return fail_code ? refuse(fail_code, "the stub was told to fail") : SUCCESS;
}

int ncclCommInitRank(Comm **out, int size, UniqueId id, int rank) {
  record("init", size, 0, 0, rank, NULL);
  linger();
  if (fail_code) return refuse(fail_code, "the stub was told to fail");
  pthread_mutex_lock(&lock);
  World *world = NULL;
  for (int i = 0; i < num_worlds; i++)
    if (!memcmp(&worlds[i].id, &id, sizeof id)) world = &worlds[i];
  if (!world) {
    world = &worlds[num_worlds++];
    world->id = id, world->size = size;
    pthread_cond_init(&world->moved, NULL);
  }
  Comm *comm = calloc(1, sizeof *comm);
  comm->world = world, comm->rank = rank,
  pthread_mutex_unlock(&lock);
  *out = comm;
  return SUCCESS;
}

int ncclCommInitAll(Comm **out, int size, const int *devices) { (void)out, (void)size, (void)devices; return INVALID_USAGE; }

int ncclCommDestroy(Comm *comm) {
  record("destroy", 0, 0, 0, comm->rank, NULL);
  linger();
  comm->is_aborted = 1;
  return SUCCESS;
}

int ncclCommAbort(Comm *comm) {
  record("abort", 0, 0, 0, comm->rank, NULL);
  pthread_mutex_lock(&lock);
  comm->is_aborted = 1, comm->world->is_broken = 1;
  pthread_cond_broadcast(&comm->world->moved);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  (void)comm;
  *state = async_code;
  return SUCCESS;
}

int ncclCommCount(Comm *comm, int *out) { *out = comm->world->size; return SUCCESS; }
int ncclCommCuDevice(Comm *comm, int *out) { (void)comm; *out = 0; return SUCCESS; }
int ncclCommUserRank(Comm *comm, int *out) { *out = comm->rank; return SUCCESS; }
const char *ncclGetErrorString(int status) { (void)status; return "an error of the stub"; }
const char *ncclGetLastError(Comm *comm) { (void)comm; return last_error; }

int ncclGroupStart(void) { depth++; return SUCCESS; }

int ncclGroupEnd(void) {
  if (!depth) return refuse(INVALID_USAGE, "not in a group");
  return --depth ? SUCCESS : run_queue();
}

int ncclAllReduce(const void *send, void *recv, size_t count, int dtype, int op, Comm *comm, void *stream) {
  return enqueue("all_reduce", ALL_REDUCE, send, recv, count, dtype, op, -1, comm, stream);
}
int ncclReduce(const void *send, void *recv, size_t count, int dtype, int op, int root, Comm *comm, void *stream) {
  return enqueue("reduce", REDUCE, send, recv, count, dtype, op, root, comm, stream);
}
int ncclBroadcast(const void *send, void *recv, size_t count, int dtype, int root, Comm *comm, void *stream) {
  return enqueue("broadcast", BROADCAST, send, recv, count, dtype, SUM, root, comm, stream);
}
int ncclBcast(void *data, size_t count, int dtype, int root, Comm *comm, void *stream) {
  return enqueue("broadcast", BROADCAST, data, data, count, dtype, SUM, root, comm, stream);
}
int ncclReduceScatter(const void *send, void *recv, size_t count, int dtype, int op, Comm *comm, void *stream) {
  return enqueue("reduce_scatter", REDUCE_SCATTER, send, recv, count, dtype, op, -1, comm, stream);
}
int ncclAllGather(const void *send, void *recv, size_t count, int dtype, Comm *comm, void *stream) {
  return enqueue("all_gather", ALL_GATHER, send, recv, count, dtype, SUM, -1, comm, stream);
}
/* pynccl does not load a library without these two. */
int ncclSend(void) { return refuse(INVALID_ARGUMENT, "the stub has no messages"); }
int ncclRecv(void) { return refuse(INVALID_ARGUMENT, "the stub has no messages"); }


/* Control, for the tests. */

void stub_set(const char *name, int value) {
  struct { const char *name; int *knob; } knobs[] = {
      {"is_computing", &is_computing}, {"fail_code", &fail_code}, {"async_code", &async_code}, {"is_stuck", &is_stuck}};
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++)
    if (!strcmp(knobs[i].name, name)) *knobs[i].knob = value;
  pthread_cond_broadcast(&unstuck);
  pthread_mutex_unlock(&lock);
}

void stub_reset(void) {
  pthread_mutex_lock(&lock);
  is_computing = 1, num_calls = num_worlds = 0, last_error[0] = 0;
  memset(worlds, 0, sizeof worlds); /* the ranks of the test have ended */
  fail_code = async_code = is_stuck = 0;
  pthread_cond_broadcast(&unstuck);
  pthread_mutex_unlock(&lock);
}

int stub_num_calls(void) { return num_calls; }
const Call *stub_call(int index) { return &calls[index]; }
