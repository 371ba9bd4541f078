# fmt, lint, types and test are what CI expects to pass; test-slow and bench take minutes.
.PHONY: all fmt lint types test test-slow bench lock defaults

all: lint types test

fmt:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .
	lint-imports

types:
	mypy

test:
	pytest

test-slow:
	pytest -m slow

bench:
	python benchmarks/convert.py

# The exact versions CI installs, with hashes and without index addresses.
lock:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header -o requirements.lock

# What transformers' config classes leave unsaid in config.json, for a new version of transformers.
defaults:
	python scripts/class_defaults.py --verbose
