/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opens files that are damaged: damage STEP.so < LIST, each line "open PATH" or "load PATH". Prints for each "refused"
 * and the sentence, or "taken". Trains a step with the whole library at the end, as nothing may be broken by then.
 */
#include <convgrad.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void report(int code) { printf(code == CONVGRAD_OK ? "taken\n" : "refused %s\n", convgrad_last_error()); }

static void *zeros(size_t bytes) { return calloc(1, bytes); }

int main(int argc, char **argv) {
  static char line[4096];
  convgrad_session *session;
  if (argc != 2 || convgrad_open(argv[1], &session) != CONVGRAD_OK) return 1;
  while (fgets(line, sizeof(line), stdin) != NULL) {
    line[strcspn(line, "\n")] = 0;
    if (strncmp(line, "open ", 5) == 0) {
      convgrad_session *other = NULL;
      report(convgrad_open(line + 5, &other));
      convgrad_close(other);
    } else {
      report(convgrad_load_checkpoint(session, line + 5));
    }
  }
  convgrad_tensor x, y;
  if (convgrad_describe(session, CONVGRAD_INPUT, 0, &x) != CONVGRAD_OK ||
      convgrad_describe(session, CONVGRAD_TARGET, 0, &y) != CONVGRAD_OK) {
    return 1;
  }
  size_t inputs = 4, targets = 8;
  for (size_t i = 0; i < x.rank; ++i) inputs *= (size_t)x.shape[i];
  for (size_t i = 0; i < y.rank; ++i) targets *= (size_t)y.shape[i];
  void *input = zeros(inputs), *target = zeros(targets);
  const convgrad_array array = {input, inputs};
  const convgrad_batch batch = {&array, 1, {target, targets}};
  const convgrad_buffer none = {NULL, 0};
  float loss = 0;
  const int code = convgrad_train_step(session, &batch, &loss, none);
  printf("loss %.9g\n", (double)loss);
  free(input);
  free(target);
  convgrad_close(session);
  return code;
}
