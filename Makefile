# SPDX-License-Identifier: Apache-2.0
# make demo         train a residual CNN on handwritten digits, from an ONNX file to a test accuracy (3 minutes)
# make test         the test suite, without PyTorch
# make test-torch   the tests that compare with PyTorch; installs it
# make test-jax     the tests of the bridge to JAX, with Flax and Equinox; installs them
# make test-zoo     12 models of torchvision, timm and others, each built and compared with PyTorch; installs them
# make bench-zoo    all of the zoo in three formats, beside PyTorch, and the table in OUT: hours; no part of .ci/run
# make test-onednn  the tests that call oneDNN; installs it
# make test-cuda    the tests that call cuDNN, of which none needs a GPU; installs it (1.2 GB)
# make test-cutlass the tests that compile kernels of CUTLASS, of which none needs a GPU; installs nvcc (110 MB)
# make test-browser the report and the site in Chromium, screenshots in OUT/browser; says so and ends where there is none
# make test-gpu     the tests that need an NVIDIA GPU: they fail where there is none; no part of .ci/run
# make bench-gpu    cuDNN and CUTLASS beside PyTorch on a GPU: layers, training steps; installs PyTorch for CUDA (4 GB)
# make test-oldest  the test suite on the oldest TVM and tvm-ffi that are supported, in .venv-oldest; no part of .ci/run
# make test-relay   the tests of the Relay binding, in a real Relay (TVM 0.17, from the package index) in .venv-relay
# make test-host    TVM's own tests without and with this package; TVM_SOURCE names a checkout of TVM, without which it
#                   says so and ends; no part of .ci/run
# make bench-relay  16 gradients in Relay, Relax and PyTorch in turns; the table in OUT; installs PyTorch
# make test-relay-gpu  those of them that call cuDNN and CUTLASS, of which none needs a GPU; installs both in .venv
# make test-federated  the example of federated training, with Flower in .venv-federated
# make test-wheel   wheel and sdist in an empty environment, where README's commands are run; sizes of what extras install
# make test-device  builds for aarch64; a bundle of one, run by qemu, and kernels for NEON; of these it says so where there is no qemu
# make debian       Debian's packages for test-browser and test-device, as root: a browser, and what runs programs for aarch64
# make docs         the site, in OUT/site; links and anchors must be right
# make docs-serve   the site at http://127.0.0.1:8000, made anew when a page changes
# make lint         formatting, lint and types
# make install      install EXTRAS of pyproject.toml in .venv, which the targets do for themselves where it is not done
# make clean        remove .venv, .venv-oldest, .venv-relay, .venv-federated, out and build leftovers
#
# Everything else runs in .venv, which the first target makes. PYTHON is the interpreter to make it with.
PYTHON ?= python3
OUT ?= out
EPOCHS ?= 8
WORKERS ?= auto
# Tests of one file stay together, as they share what they compile; who is done early takes over from the others.
SHARED := -n $(WORKERS) --dist worksteal

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_TVM := apache-tvm==0.26.0 apache-tvm-ffi==0.1.13.post2
RELAY := .venv-relay
FEDERATED := .venv-federated
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
WHEEL := $$(echo $(VENV)/wheel/*.whl)
SOURCES := pyproject.toml $(shell find tvm_convgrad relax_ops relay_ops legalize -name '*.py' -o -name '*.cc' -o -name '*.h')

.PHONY: demo test test-torch test-jax test-zoo bench-zoo test-onednn test-cuda test-cutlass test-gpu bench-gpu test-oldest test-relay test-relay-gpu test-browser \
    bench-relay test-host test-federated test-wheel test-followed test-extras test-device debian docs docs-serve lint install clean
.DELETE_ON_ERROR:

# One stamp for each extra. The package is built once, as a wheel, and anew when a source has changed; build/ would bring
# back deleted files. Python compiles what it imports and keeps the bytecode, where the environment forbids that, too; pip
# does not compile all that is installed (0, as pip reads the values of its options that begin with "no" the other way round).
unexport PYTHONDONTWRITEBYTECODE
export PIP_NO_COMPILE := 0
$(VENV)/made:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/package: $(VENV)/made $(SOURCES)
	rm -rf build $(VENV)/wheel
	$(PIP) wheel --no-deps --wheel-dir $(VENV)/wheel .
	$(PIP) install --force-reinstall --no-deps "$(WHEEL)"
	touch $@

$(VENV)/with-%: $(VENV)/package
	$(PIP) install "$(WHEEL)[$*]"
	touch $@

# Several extras at once, EXTRAS="test lint": then targets that need no others can run side by side.
install: $(VENV)/package
	$(PIP) install "$(WHEEL)[$$(echo $(EXTRAS) | tr ' ' ,)]"
	touch $(EXTRAS:%=$(VENV)/with-%)

demo: $(VENV)/with-demo
	@mkdir -p $(OUT) && rm -rf $(OUT)/checkpoints
	$(BIN)/python examples/digits_cnn.py --out $(OUT)
	$(BIN)/convgrad build $(OUT)/digits_cnn.onnx -o $(OUT)/step.so --lr 0.05 --momentum 0.9 --weight-decay 0.001
	$(BIN)/convgrad explain $(OUT)/step.so
	$(BIN)/convgrad run $(OUT)/step.so --data $(OUT)/digits.npz --epochs $(EPOCHS) --plot $(OUT)/loss.png \
	    --checkpoint-dir $(OUT)/checkpoints --require-accuracy 0.97
	$(BIN)/python examples/show_digits.py $(OUT)/step.so $(OUT)/digits.npz $(OUT)/checkpoints $(OUT)/digits.png
	@echo "training step: $(OUT)/step.so    loss curve: $(OUT)/loss.png    test digits: $(OUT)/digits.png"

test: $(VENV)/with-test
	$(BIN)/pytest $(SHARED)

test-torch: $(VENV)/with-test $(VENV)/with-torch
	$(BIN)/pytest $(SHARED) -m torch

test-jax: $(VENV)/with-test $(VENV)/with-jax-models
	$(BIN)/pytest $(SHARED) -m jax tests/jax_bridge tests/bench

test-zoo: $(VENV)/with-test $(VENV)/with-zoo
	$(BIN)/pytest $(SHARED) -m zoo tests/zoo

bench-zoo: $(VENV)/with-zoo
	@mkdir -p $(OUT)
	$(BIN)/python -m benchmarks.zoo --out $(OUT)/zoo --markdown $(OUT)/zoo.md

test-onednn: $(VENV)/with-test $(VENV)/with-onednn
	$(BIN)/pytest $(SHARED) -m onednn

test-cuda: $(VENV)/with-test $(VENV)/with-cuda
	$(BIN)/pytest $(SHARED) -m cuda tests/offload tests/cli

test-cutlass: $(VENV)/with-test $(VENV)/with-cutlass $(VENV)/with-sass
	$(BIN)/pytest $(SHARED) -m cutlass

test-browser: $(VENV)/with-test $(VENV)/with-browser docs
	@command -v chromium >/dev/null || { echo "test-browser: not run: there is no chromium"; exit 0; }; \
	CONVGRAD_SITE=$(abspath $(OUT))/site CONVGRAD_SCREENSHOTS=$(abspath $(OUT))/browser $(BIN)/pytest -m browser tests/browser

test-gpu: $(VENV)/with-test $(VENV)/with-cuda
	$(BIN)/pytest -m gpu tests/gpu

# Tables of steps and of layers, and their JSON, in OUT: whole steps, each type by cuDNN, CUTLASS's strong points. What
# cannot be measured fails the target at its end.
GPU_BENCH := $(BIN)/convgrad bench --target cuda
GPU_LAYERS := $(GPU_BENCH) --seconds 0.2
bench-gpu: $(VENV)/with-cuda $(VENV)/with-torch
	@mkdir -p $(OUT); failed=0; \
	table() { name=$$1; shift; "$$@" --json $(OUT)/$$name.json --markdown $(OUT)/$$name.md || failed=1; }; \
	for type in float32 float16; do for model in resnet18 mobilenet_v2; do \
	    $(GPU_BENCH) --step $$model --batch 32 --dtype $$type --json $(OUT)/step-$$model-$$type.json || failed=1; \
	done; done; \
	networks="--suite resnet50,mobilenet_v2 --batch 32,256 --direction all"; \
	for type in float32 float16 bfloat16; do table cudnn-$$type $(GPU_LAYERS) $$networks --dtype $$type; done; \
	table cudnn-tf32 env CONVGRAD_CUDNN=tf32,transforms,nondeterministic $(GPU_LAYERS) $$networks; \
	table cutlass-float16 $(GPU_LAYERS) --impl cutlass --suite resnet50 --batch 32 --layout NHWC --dtype float16 \
	    --direction wgrad,forward --against torch,cudnn; \
	exit $$failed

$(OLDEST)/with-test: $(SOURCES)
	$(PYTHON) -m venv $(OLDEST)
	rm -rf build
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check '.[test]' $(OLDEST_TVM)
	touch $@

test-oldest: $(OLDEST)/with-test
	$(OLDEST)/bin/pytest $(SHARED)

# Exit code 3 is "the wheel that carries Relay cannot be had", for which the script has printed the reason; then there is nothing to do.
# The tests fail if any of them was skipped. One compares with PyTorch, which stands in .venv.
test-relay: $(VENV)/with-torch
	@code=0; test $(RELAY)/made -nt tests/relay_ops/make_venv.py || $(PYTHON) tests/relay_ops/make_venv.py $(RELAY) || code=$$?; \
	if [ $$code = 3 ]; then echo "test-relay: not run"; exit 0; fi; \
	[ $$code = 0 ] && touch $(RELAY)/made && CONVGRAD_TORCH_PYTHON=$(abspath $(BIN)/python) \
	    $(RELAY)/bin/python -m pytest $(SHARED) tests/relay_ops

bench-relay: $(VENV)/with-torch
	@mkdir -p $(OUT)
	test $(RELAY)/made -nt tests/relay_ops/make_venv.py || $(PYTHON) tests/relay_ops/make_venv.py $(RELAY)
	touch $(RELAY)/made
	$(BIN)/python benchmarks/relay_lane.py --relay $(RELAY)/bin/python --markdown $(OUT)/relay.md

test-host: $(VENV)/with-test $(VENV)/with-torch
	$(BIN)/python -m tests.host.compare --workers $(WORKERS)

# The packages of .venv stand behind those of .venv-relay; CUTLASS's headers are in the wheel of today's TVM.
test-relay-gpu: $(VENV)/with-test $(VENV)/with-cuda $(VENV)/with-cutlass
	@code=0; test -e $(RELAY)/made || $(PYTHON) tests/relay_ops/make_venv.py $(RELAY) || code=$$?; \
	if [ $$code = 3 ]; then echo "test-relay-gpu: not run"; exit 0; fi; \
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	[ $$code = 0 ] && touch $(RELAY)/made && CONVGRAD_GPU_PACKAGES=$$packages CONVGRAD_RELAX_PYTHON=$(BIN)/python \
	    CUTLASS_PATH=$$packages/tvm/3rdparty/cutlass $(RELAY)/bin/python -m pytest $(SHARED) tests/relay_ops/gpu

$(FEDERATED)/made: $(VENV)/package
	$(PYTHON) -m venv $(FEDERATED)
	$(FEDERATED)/bin/python -m pip --quiet --disable-pip-version-check install "$(WHEEL)[test,federated]"
	$(FEDERATED)/bin/python -m pip --quiet --disable-pip-version-check install --force-reinstall --no-deps "$(WHEEL)"
	touch $@

test-federated: $(FEDERATED)/made
	$(FEDERATED)/bin/pytest -m federated tests/distributed

# build makes the wheel of the sdist, so that what is missing in that shows.
test-wheel: $(VENV)/with-demo $(VENV)/with-release
	rm -rf build $(OUT)/dist
	$(BIN)/python -m build --quiet --outdir $(OUT)/dist
	$(MAKE) -j2 -Otarget test-followed test-extras

test-followed:
	$(BIN)/python -m tests.release.five_minutes $(OUT)/dist

test-extras:
	$(BIN)/python -m tests.release.extras $(OUT)/dist

# Without root, or without Debian, the tests that need them say what is missing.
DEBIAN := chromium qemu-user-static libstdc++6-arm64-cross
debian:
	@dpkg -s $(DEBIAN) >/dev/null 2>&1 || { apt-get update -q && apt-get install -y -q --no-install-recommends $(DEBIAN); } \
	    || echo "debian: not installed: $(DEBIAN)"

# Wheels of TVM for aarch64, whose libraries a bundle takes; the versions are those of .venv.
$(VENV)/aarch64: $(VENV)/with-test
	$(BIN)/python -c 'from tvm_convgrad.device.wheels import fetch; from tvm_convgrad.training.runtime.artifact import versions; \
	    from pathlib import Path; fetch("aarch64", versions(), Path("$@"))'

# Where qemu is missing, tests of the mark cross that need it are skipped.
test-device: $(VENV)/with-test $(VENV)/with-cross
	$(BIN)/pytest -m cross tests/artifact tests/cli tests/kernels
	@command -v qemu-aarch64-static >/dev/null || { echo "test-device: not run: there is no qemu-aarch64-static"; exit 0; }; \
	$(MAKE) $(VENV)/aarch64 && CONVGRAD_AARCH64_WHEELS=$(abspath $(VENV))/aarch64 $(BIN)/pytest -m device tests/device

# The variable silences an announcement of other versions.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(VENV)/with-docs
	$(MKDOCS) build --site-dir $(abspath $(OUT))/site

docs-serve: $(VENV)/with-docs
	$(MKDOCS) serve

lint: $(VENV)/with-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) $(RELAY) $(FEDERATED) $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
