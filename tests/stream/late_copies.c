// A CUDA runtime that is as late as its rules allow, in front of one whose copies are made at once.
//
//     cc -shared -fPIC -O1 -o late.so late_copies.c -ldl -lpthread && LD_PRELOAD=./late.so python PROGRAM
//
// Each stream is a queue of copies, fills and waits. They run when something forces them: a synchronisation of
// their stream or of an event after them, another stream that waits for such an event and is forced itself, a copy
// that the host must see the end of, or memory that is freed. Most events answer 1000 questions with "not ready"
// before they are forced. A copy from pageable memory takes its source at once, as CUDA does into its staging memory.
// Streams do not wait for the default stream, as those of torch do not.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_READY = 600 };                           // cudaErrorNotReady
enum { FEW = 2, MANY = 1000 };                      // answers "not ready" of an event
enum { UNREGISTERED = 0 };                          // cudaMemoryTypeUnregistered
enum { TO_DEVICE = 1, TO_HOST = 2 };                // cudaMemcpyKind

typedef struct Stream Stream;
typedef struct {  // all that was submitted to a stream up to here
    Stream *stream;
    size_t end;
} Mark;
typedef struct {  // a copy, a fill if `from` is NULL, or a wait if `to` is NULL
    void *to;
    const void *from;
    void *staged;
    size_t size;
    int value;
    Mark after;
} Work;
struct Stream {
    void *handle;
    Work *work;
    size_t count, done, room;
    int asked;  // since it was last found at its end
    Stream *next;
};
typedef struct Event {
    void *handle;
    Mark mark;
    int questions;  // that are still answered with "not ready"
    struct Event *next;
} Event;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams;
static Event *events;
static unsigned records;

static Stream *stream_of(void *handle) {
    for (Stream *one = streams; one; one = one->next)
        if (one->handle == handle) return one;
    Stream *made = calloc(1, sizeof *made);
    made->handle = handle;
    made->next = streams;
    return streams = made;
}

static Event *event_of(void *handle) {
    for (Event *one = events; one; one = one->next)
        if (one->handle == handle) return one;
    Event *made = calloc(1, sizeof *made);
    made->handle = handle;
    made->next = events;
    return events = made;
}

static int is_pageable(const void *memory) {
    static int (*ask)(void *, const void *);
    int found[64] = {0};  // cudaPointerAttributes; the type is the first member
    if (!ask) ask = dlsym(RTLD_NEXT, "cudaPointerGetAttributes");
    return ask(found, memory) || found[0] == UNREGISTERED;
}

static void submit(void *handle, Work work) {
    Stream *stream = stream_of(handle);
    if (stream->count == stream->room) {
        stream->room = stream->room ? 2 * stream->room : 64;
        stream->work = realloc(stream->work, stream->room * sizeof *stream->work);
    }
    stream->work[stream->count++] = work;
}

static void force(Mark mark) {
    while (mark.stream && mark.stream->done < mark.end) {
        Work work = mark.stream->work[mark.stream->done];
        if (!work.to) force(work.after);
        else if (work.from) memmove(work.to, work.from, work.size);
        else memset(work.to, work.value, work.size);
        free(work.staged);
        mark.stream->done++;
    }
}

static Mark all_of(Stream *stream) { return (Mark){stream, stream->count}; }

static void force_all(void) {
    for (Stream *one = streams; one; one = one->next) force(all_of(one));
}

#define LOCKED(...) do { pthread_mutex_lock(&mutex); __VA_ARGS__; pthread_mutex_unlock(&mutex); } while (0)

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    Work work = {.to = to, .from = from, .size = size};
    if (!size) return 0;
    if (kind == TO_DEVICE && is_pageable(from)) work.from = work.staged = memcpy(malloc(size), from, size);
    LOCKED(submit(stream, work); if (kind == TO_HOST && is_pageable(to)) force(all_of(stream_of(stream))));
    return 0;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    (void)kind;
    LOCKED(force(all_of(stream_of(NULL))); memmove(to, from, size));
    return 0;
}

int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    if (size) LOCKED(submit(stream, (Work){.to = to, .value = value, .size = size}));
    return 0;
}

int cudaEventRecord(void *event, void *stream) {
    LOCKED(Event *one = event_of(event); one->mark = all_of(stream_of(stream)); one->questions = records++ % 4 ? MANY : FEW);
    return 0;
}

int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    LOCKED(submit(stream, (Work){.after = event_of(event)->mark}));
    return 0;
}

int cudaEventQuery(void *event) {
    int answer = 0;
    LOCKED(Event *one = event_of(event);
           if (one->mark.stream && one->mark.stream->done < one->mark.end && one->questions-- > 0) answer = NOT_READY;
           else force(one->mark));
    return answer;
}

int cudaStreamQuery(void *stream) {
    int answer = 0;
    LOCKED(Stream *one = stream_of(stream);
           if (one->done < one->count && one->asked++ < MANY) answer = NOT_READY;
           else { force(all_of(one)); one->asked = 0; });
    return answer;
}

int cudaEventSynchronize(void *event) { LOCKED(force(event_of(event)->mark)); return 0; }
int cudaStreamSynchronize(void *stream) { LOCKED(force(all_of(stream_of(stream)))); return 0; }
int cudaDeviceSynchronize(void) { LOCKED(force_all()); return 0; }

#define AFTER_ALL(NAME) \
    int NAME(void *memory) { \
        LOCKED(force_all()); \
        return ((int (*)(void *))dlsym(RTLD_NEXT, #NAME))(memory); \
    }
AFTER_ALL(cudaFree)
AFTER_ALL(cudaFreeHost)
AFTER_ALL(cudaHostUnregister)
