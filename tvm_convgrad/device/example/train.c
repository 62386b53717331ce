/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trains with a step that `convgrad build` wrote, in C: libconvgrad, libtvm_runtime and libtvm_ffi, no Python.
 *
 *     train STEP.so STEPS [X.raw Y.raw] [--load FROM.ckpt] [--save TO.ckpt]
 *
 * One batch is used for all steps. X.raw and Y.raw hold it as plain numbers in the types that the step takes; without
 * them it is made up. Prints the loss of each step with enough digits to tell any two floats apart.
 */
#include <convgrad.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const char *what) {
  fprintf(stderr, "train: %s: %s\n", what, convgrad_last_error());
  return 1;
}

/* The number of elements of a tensor, and its bytes; 0 if an extent is free. */
static size_t elements(const convgrad_tensor *tensor) {
  size_t count = 1;
  for (size_t i = 0; i < tensor->rank; ++i) count *= tensor->shape[i] < 0 ? 0 : (size_t)tensor->shape[i];
  return count;
}

/* The bits of an element stand at the end of its type's name; a bool has a byte. */
static size_t element_bytes(const convgrad_tensor *tensor) {
  const char *bits = tensor->dtype + strcspn(tensor->dtype, "0123456789");
  return *bits == '\0' ? 1 : (size_t)atol(bits) / 8;
}

/* Store a number as an element of a tensor's type: floats over -1 to 1 (float16: -0.5 or 0.5), integers 0 to
 * classes - 1. Numbers are little-endian, as on all CPUs that steps are built for. */
static void store(void *data, size_t i, const convgrad_tensor *tensor, int64_t classes) {
  const size_t bytes = element_bytes(tensor);
  const int is_bool = strcmp(tensor->dtype, "bool") == 0;
  const uint64_t whole = (uint64_t)((int64_t)i % (is_bool ? 2 : bytes == 1 && classes > 128 ? 128 : classes));
  const float number = (float)((int64_t)i * 7919 % 1001 - 500) / 500.0F;
  char *at = (char *)data + i * bytes;
  if (strcmp(tensor->dtype, "float32") == 0) {
    memcpy(at, &number, bytes);
  } else if (strcmp(tensor->dtype, "float64") == 0) {
    const double wide = number;
    memcpy(at, &wide, bytes);
  } else if (strcmp(tensor->dtype, "bfloat16") == 0) {
    uint32_t word;
    memcpy(&word, &number, sizeof(word));
    const uint16_t high = (uint16_t)(word >> 16);
    memcpy(at, &high, bytes);
  } else if (strcmp(tensor->dtype, "float16") == 0) {
    const uint16_t half = number < 0 ? 0xB800 : 0x3800; /* -0.5 and 0.5 */
    memcpy(at, &half, bytes);
  } else {
    for (size_t byte = 0; byte < bytes; ++byte) at[byte] = (char)(whole >> (8 * byte) & 0xFF);
  }
}

/* Memory for a tensor: from a file, or made up by `store`. */
static void *values(const convgrad_tensor *tensor, const char *path, int64_t classes) {
  const size_t count = elements(tensor), bytes = count * element_bytes(tensor);
  void *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (data == NULL) return NULL;
  if (path != NULL) {
    FILE *file = fopen(path, "rb");
    const size_t read = file == NULL ? 0 : fread(data, 1, bytes, file);
    const int more = file != NULL && fgetc(file) != EOF;
    if (file != NULL) fclose(file);
    if (read == bytes && !more) return data;
    fprintf(stderr, "train: %s: must hold exactly %zu bytes\n", path, bytes);
    free(data);
    return NULL;
  }
  for (size_t i = 0; i < count; ++i) {
    store(data, i, tensor, classes);
  }
  return data;
}

/* Train `steps` steps on one batch. */
static int train(convgrad_session *session, long steps, const char *x_path, const char *y_path) {
  convgrad_tensor x, y, prediction;
  if (convgrad_describe(session, CONVGRAD_INPUT, 0, &x) != CONVGRAD_OK ||
      convgrad_describe(session, CONVGRAD_TARGET, 0, &y) != CONVGRAD_OK ||
      convgrad_describe(session, CONVGRAD_PREDICTION, 0, &prediction) != CONVGRAD_OK) {
    return failed("the step");
  }
  if (convgrad_count(session, CONVGRAD_INPUT) != 1 || elements(&x) == 0) {
    fprintf(stderr, "train: this example needs one input and a fixed batch: build with --batch N\n");
    return 1;
  }
  void *inputs = values(&x, x_path, 1);
  /* Classes are axis 1 of [batch, classes, ...], but two where the model returns its loss itself: what its target
   * means is not known then, and Y.raw may be needed. */
  const char *manifest = convgrad_manifest(session);
  const int is_own = manifest != NULL && strstr(manifest, "\"loss\":\"model\"") != NULL;
  const int64_t classes = !is_own && prediction.rank > 1 && prediction.shape[1] > 1 ? prediction.shape[1] : 2;
  void *target = inputs == NULL ? NULL : values(&y, y_path, classes);
  int code = target == NULL;
  if (code == 0) {
    const convgrad_array input = {inputs, elements(&x) * element_bytes(&x)};
    const convgrad_batch batch = {&input, 1, {target, elements(&y) * element_bytes(&y)}};
    const convgrad_buffer not_wanted = {NULL, 0};
    convgrad_progress progress;
    for (long step = 0; step < steps && code == 0; ++step) {
      float loss;
      if (convgrad_train_step(session, &batch, &loss, not_wanted) != CONVGRAD_OK ||
          convgrad_get_progress(session, &progress) != CONVGRAD_OK) {
        code = failed("step");
      } else {
        printf("step %lld loss %.9g\n", (long long)progress.steps, (double)loss);
      }
    }
  }
  free(inputs);
  free(target);
  return code;
}

int main(int argc, char **argv) {
  const char *load = NULL, *save = NULL, *places[4] = {NULL, NULL, NULL, NULL};
  int count = 0;
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--load") == 0 && i + 1 < argc) {
      load = argv[++i];
    } else if (strcmp(argv[i], "--save") == 0 && i + 1 < argc) {
      save = argv[++i];
    } else if (count < 4) {
      places[count++] = argv[i];
    }
  }
  const long steps = count >= 2 ? atol(places[1]) : 0;
  if ((count != 2 && count != 4) || steps < 1) {
    fprintf(stderr, "usage: train STEP.so STEPS [X.raw Y.raw] [--load FROM.ckpt] [--save TO.ckpt]\n");
    return 2;
  }
  convgrad_session *session;
  if (convgrad_open(places[0], &session) != CONVGRAD_OK) return failed("open");
  int code = load != NULL && convgrad_load_checkpoint(session, load) != CONVGRAD_OK ? failed("load") : 0;
  if (code == 0) code = train(session, steps, places[2], places[3]);
  if (code == 0 && save != NULL && convgrad_save_checkpoint(session, save) != CONVGRAD_OK) code = failed("save");
  convgrad_close(session);
  return code;
}
