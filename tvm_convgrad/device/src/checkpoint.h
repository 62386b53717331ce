// SPDX-License-Identifier: Apache-2.0
// Checkpoints: the sealed files of tvm_convgrad/training/runtime/checkpoint.py.
#ifndef CONVGRAD_SRC_CHECKPOINT_H_
#define CONVGRAD_SRC_CHECKPOINT_H_

#include <string>

#include "session.h"

namespace convgrad {

void SaveCheckpoint(const Session& session, const std::string& path);

// Gives the session the state and the progress of a checkpoint; a refused one changes nothing.
void LoadCheckpoint(Session* session, const std::string& path);

}  // namespace convgrad

#endif  // CONVGRAD_SRC_CHECKPOINT_H_
