# DDP Lab. `make` lists the targets; each sets up its environment, .venv, when that is missing or out of date.

.PHONY: help setup lab notebooks test train
SHELL = /bin/sh

# The environment is complete in itself: modules of another Python must not leak into it.
unexport PYTHONPATH PYTHONHOME
# Programs of the environment, such as torchrun, are found by name, also from notebooks. `exec`: ending make ends them.
IN_VENV = exec env VIRTUAL_ENV="$$PWD/.venv" PATH="$$PWD/.venv/bin:$$PATH"
# As root, JupyterLab starts only when told to.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

help:
	@echo "make lab     open the course in JupyterLab"
	@echo "make train   run the main training job in this terminal"
	@echo "make test    run every test and every notebook"
	@echo "make setup   only set up the environment, .venv"
	@echo "make notebooks   run the notebooks and save their outputs (for authors)"
	@echo
	@echo 'Options: ARGS="…" passes options on, as in make train ARGS="--model convnet";'
	@echo "PYTHON=… names the Python (3.11 or newer) to set up with."

setup:
	@sh .ci/set_up.sh

lab: setup
	@$(IN_VENV) JUPYTER_PREFER_ENV_PATH=1 .venv/bin/python -m jupyterlab $(AS_ROOT) \
		--LabApp.news_url=None --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

train: setup
	@$(IN_VENV) .venv/bin/python -m ddp_lab $(ARGS)

test: setup
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@$(IN_VENV) .venv/bin/python -m pytest --nbval $(ARGS)

notebooks: setup
	@$(IN_VENV) .venv/bin/python notebooks/save_outputs.py $(ARGS)
