# Every target sets up all that it needs in .venv, on a machine with or without a GPU.
#   make demo   find a faster softmax (on the GPU if there is one, else modelled)
#   make test   linters, types and tests
#   make test-slow   minutes-long tests: ten kills, long hostile candidates

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch's own index of CPU builds; asked only when pip finds no CPU build without it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: demo test test-slow lint docs clean

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kernelband needs Python 3.11 or later; name one with make PYTHON=...")'
	@echo "installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	@$(PIP) -e '.[test]'
else
	@$(PIP) -c constraints-cpu.txt -e '.[test]' 2>$(VENV)/install.log \
	  || $(PIP) --extra-index-url $(TORCH_CPU_INDEX) -c constraints-cpu.txt -e '.[test]'
endif
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/kernelband optimize examples/softmax --pulls 12 --seed 0

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" -q

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow -v

docs: $(VENV)/.installed
	$(BIN)/python docs/figures.py

clean:
	rm -rf $(VENV) runs
