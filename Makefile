# Two commands matter: `make demo` (set up, and see the model write) and `make test`.
# On Linux, choose torch's CPU build with  make demo TORCH_INDEX=<the address of that index>.
PYTHON ?= python3
BIN := .venv/bin
TORCH_INDEX ?=
INSTALL := $(BIN)/pip install -q --disable-pip-version-check -c .ci/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test notebooks exercises bench race clean

demo: .venv/base
	$(BIN)/python -m minserve generate "def area(" --temperature 0.8 --top-p 0.9 --seed 8 --max-tokens 300
	$(BIN)/python -m minserve doctor

# One thread: the models are tiny, and two threads that wait for one another on a busy machine are many times slower.
test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

exercises: .venv/dev
	$(BIN)/python -m pytest tests/exercises -q

notebooks: .venv/notebooks
	$(BIN)/jupyter lab chapters

bench: .venv/dev
	$(BIN)/python -m minserve bench serve --against transformers
	$(BIN)/python -m minserve bench decode --against transformers
	$(BIN)/python -m minserve bench engine
	$(BIN)/python -m minserve bench prefix
	$(BIN)/python -m minserve bench tree
	$(BIN)/python -m minserve bench delta
	$(BIN)/python -m minserve bench drafts

race: .venv/base
	$(BIN)/python -m minserve race

.venv/base: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/dev: .venv/base
	$(INSTALL) -e '.[dev]'
	touch $@

.venv/notebooks: .venv/dev
	$(INSTALL) -e '.[notebooks]'
	touch $@

clean:
	rm -rf .venv
