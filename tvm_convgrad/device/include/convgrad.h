/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trains and predicts with the libraries that `convgrad build` and `convgrad export --inference` write: a C interface
 * that needs no header of TVM, and at run time libtvm_runtime and libtvm_ffi, but no Python and no compiler.
 *
 * Every function that returns int returns CONVGRAD_OK (0), or CONVGRAD_ERROR (1) and keeps a sentence that
 * convgrad_last_error() of the same thread gives. A call that is refused because of its arguments changes nothing.
 * A session is used by one thread at a time; several sessions may be used by several threads.
 *
 * Arrays are contiguous, in the order and the element types that convgrad_describe() gives, in the byte order of the
 * machine. Those that begin at a multiple of 64 bytes are read where they lie, others are copied.
 */
#ifndef CONVGRAD_H_
#define CONVGRAD_H_

#include <stddef.h>
#include <stdint.h>

#define CONVGRAD_VERSION "0.2.0" /* of this header */

#if defined(__GNUC__)
#define CONVGRAD_API __attribute__((visibility("default")))
#else
#define CONVGRAD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { CONVGRAD_OK = 0, CONVGRAD_ERROR = 1 };

/* A loaded library with its state: parameters, running statistics, what the optimizer keeps. */
typedef struct convgrad_session convgrad_session;

/* Memory that is read: where it begins, and how many bytes it has. */
typedef struct {
  const void *data;
  size_t bytes;
} convgrad_array;

/* Memory that is written. `bytes` must be exactly what the result takes. data == NULL: the result is not wanted. */
typedef struct {
  void *data;
  size_t bytes;
} convgrad_buffer;

/* A batch: each input of the model, in order, and the target of the loss (not read by convgrad_predict). */
typedef struct {
  const convgrad_array *inputs;
  size_t input_count;
  convgrad_array target;
} convgrad_batch;

/* Which tensor convgrad_describe() describes. */
enum { CONVGRAD_INPUT = 0, CONVGRAD_TARGET = 1, CONVGRAD_PREDICTION = 2, CONVGRAD_STATE = 3 };

/* A tensor. The strings and the extents live as long as the session. An extent of -1 is free. */
typedef struct {
  const char *name;
  const char *dtype; /* "float32", "int64", ... */
  const char *role;  /* of the state: "parameter", "frozen", "running_stat", "optimizer", "counter", ...; else "" */
  size_t rank;
  const int64_t *shape;
} convgrad_tensor;

/* Where a run stands; checkpoints have it. */
typedef struct {
  int64_t steps;    /* updates so far */
  int64_t epoch;    /* finished epochs */
  int64_t position; /* updates of the present epoch */
} convgrad_progress;

/* The version of this library; CONVGRAD_VERSION is that of the header. */
CONVGRAD_API const char *convgrad_version(void);

/* What was wrong with the last call of this thread that returned CONVGRAD_ERROR. */
CONVGRAD_API const char *convgrad_last_error(void);

/* The instruction sets of this CPU that artifacts may require, by LLVM's names, separated by spaces. */
CONVGRAD_API const char *convgrad_cpu_features(void);

/*
 * Work on `count` threads (0: all CPUs that this process may use). To be called before the first session is opened, by
 * a thread that will use it; otherwise TVM_NUM_THREADS says how many or, without it, all CPUs are used. An error if TVM's
 * pool was made before with another number.
 */
CONVGRAD_API int convgrad_use_threads(int count);

/*
 * Check the file at `path` from end to end (its seal, TVM's version, architecture, instruction sets), then load it, with
 * the initial state that it carries. An artifact is code: open only what you would execute.
 */
CONVGRAD_API int convgrad_open(const char *path, convgrad_session **session);

/* Free a session; NULL is allowed. */
CONVGRAD_API void convgrad_close(convgrad_session *session);

/* The SHA-256 of the artifact in hex, and its manifest, a JSON object. */
CONVGRAD_API const char *convgrad_id(const convgrad_session *session);
CONVGRAD_API const char *convgrad_manifest(const convgrad_session *session);

/* How many tensors of a kind there are, and number `index` of them. An inference library has no target and no state. */
CONVGRAD_API size_t convgrad_count(const convgrad_session *session, int kind);
CONVGRAD_API int convgrad_describe(const convgrad_session *session, int kind, size_t index, convgrad_tensor *tensor);

/* The learning rate of the next updates; at first that of `convgrad build --lr`, or of a loaded checkpoint. */
CONVGRAD_API int convgrad_set_learning_rate(convgrad_session *session, float rate);
CONVGRAD_API float convgrad_learning_rate(const convgrad_session *session);

/* Train on a batch: `loss` before the update (may be NULL), and the predictions of the batch. */
CONVGRAD_API int convgrad_train_step(convgrad_session *session, const convgrad_batch *batch, float *loss,
                                     convgrad_buffer predictions);

/*
 * The step in two, of libraries that were built with --split. convgrad_gradients() computes the gradients of all
 * parameters into `flat`, which has convgrad_flat_size() floats, and moves the running statistics; convgrad_apply()
 * updates the parameters by them. Between the two, gradients of several batches or devices may be averaged; then
 * `number` tells their dropout masks apart (-1: the updates so far).
 */
CONVGRAD_API int convgrad_gradients(convgrad_session *session, const convgrad_batch *batch, int64_t number, float *loss,
                                    float *flat, size_t flat_size, convgrad_buffer predictions);
CONVGRAD_API int convgrad_apply(convgrad_session *session, const float *flat, size_t flat_size);

/* The loss and predictions of a batch with running statistics and without dropout; of libraries built with --split. */
CONVGRAD_API int convgrad_eval_step(convgrad_session *session, const convgrad_batch *batch, float *loss,
                                    convgrad_buffer predictions);

/* The predictions of the inputs of a batch. */
CONVGRAD_API int convgrad_predict(convgrad_session *session, const convgrad_batch *batch, convgrad_buffer predictions);

/*
 * All parameters in one vector of convgrad_flat_size() floats, in the order of the state, each at a multiple of 16
 * floats, with zeros between them; gradients lie at the same places. Parameters must be float32.
 */
CONVGRAD_API size_t convgrad_flat_size(const convgrad_session *session);
CONVGRAD_API int convgrad_get_parameters(const convgrad_session *session, float *flat, size_t flat_size);
CONVGRAD_API int convgrad_set_parameters(convgrad_session *session, const float *flat, size_t flat_size);

/* One tensor of the state by its name. */
CONVGRAD_API int convgrad_get_state(const convgrad_session *session, const char *name, convgrad_buffer value);
CONVGRAD_API int convgrad_set_state(convgrad_session *session, const char *name, convgrad_array value);

/* Go back to the initial state, and to the beginning of a run. */
CONVGRAD_API int convgrad_reset(convgrad_session *session);

/*
 * Where the run stands. Updates count themselves; the caller says when an epoch has ended. The seed of the order of the
 * data (at first 0) is what `convgrad run --resume --seed` reads from checkpoints.
 */
CONVGRAD_API int convgrad_get_progress(const convgrad_session *session, convgrad_progress *progress);
CONVGRAD_API int convgrad_end_epoch(convgrad_session *session);
CONVGRAD_API int convgrad_set_seed(convgrad_session *session, int64_t seed);

/*
 * Write or read a checkpoint: the sealed file of `convgrad run --checkpoint-dir`, which the other side reads. It is
 * written whole or not at all. One of another artifact, and a damaged one, is refused.
 */
CONVGRAD_API int convgrad_save_checkpoint(const convgrad_session *session, const char *path);
CONVGRAD_API int convgrad_load_checkpoint(convgrad_session *session, const char *path);

#ifdef __cplusplus
}
#endif

#endif /* CONVGRAD_H_ */
