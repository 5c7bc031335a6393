"""The package's shape: layers, exports, and what a rank must not have to import."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_lab

FOLDER = Path(ddp_lab.__file__).parent
LAYERS = {
    0: {"charts", "cures", "data", "devices", "events", "hello", "models", "phases", "progress", "stacks", "transport"},
    1: {"calls", "leftovers", "tracing", "train"},
    2: {"figures", "mismatch", "terminal", "worker"},
    3: {"dashboard", "processes", "reports", "spacetime"},
    4: {"diagnosis", "machine"},
    5: {"doctor", "launcher"},
    6: {"__init__", "__main__"},
}
RANK_SIDE = ["data", "devices", "events", "hello", "models", "phases", "tracing", "train", "transport", "worker"]
DRAWING = ("IPython", "ipywidgets", "matplotlib")
LAYER = {module: layer for layer, modules in LAYERS.items() for module in modules}


def imports_of(module: str) -> set[str]:
    """The modules of the lab that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ddp_lab":
            found |= {name.name for name in node.names if (FOLDER / f"{name.name}.py").exists()}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_lab."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("ddp_lab.")}
    return found


def test_every_module_has_a_layer():
    assert {file.stem for file in FOLDER.glob("*.py")} == set(LAYER)


@pytest.mark.parametrize("module", sorted(LAYER))
def test_modules_import_lower_layers_only(module):
    assert {other for other in imports_of(module) if LAYER[other] >= LAYER[module]} == set()


def test_the_check_of_layers_sees_imports():
    assert {"devices", "events", "models"} <= imports_of("train")
    assert "figures" in imports_of("launcher")  # inside a function


def test_exports_are_sorted_and_exist():
    assert ddp_lab.__all__ == sorted(ddp_lab.__all__)
    for name in ddp_lab.__all__:
        assert callable(getattr(ddp_lab, name)), name
    assert set(ddp_lab.__all__) <= set(dir(ddp_lab))
    with pytest.raises(AttributeError, match="no attribute 'lanch'"):
        _ = ddp_lab.lanch


@pytest.mark.parametrize("name", ["train", "doctor", "hello"])
def test_a_function_wins_over_the_module_of_its_name(name):
    importlib.reload(importlib.import_module(f"ddp_lab.{name}"))
    assert callable(getattr(ddp_lab, name))


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_the_lab_is_light():
    loaded = loaded_after("import ddp_lab")
    assert not loaded & {*DRAWING, "torch", "torchvision", "rich"}


def test_ranks_never_pay_for_what_draws():
    code = "\n".join(f"import ddp_lab.{module}" for module in RANK_SIDE)
    assert not loaded_after(code) & {*DRAWING, "rich", "psutil"}


def test_launching_without_a_notebook_imports_nothing_that_draws():
    code = "import ddp_lab\nddp_lab.launch(ddp_lab.hello, world_size=1, on_event=None)"
    assert not loaded_after(code) & {*DRAWING, "rich"}


def functions():
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node


def statement_lines(node) -> int:
    """The lines of a function less its docstring."""
    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
    return node.end_lineno - first.lineno + 1


def test_functions_are_small():
    sizes = sorted((statement_lines(node), file.name, node.name) for file, node in functions())
    assert sizes[len(sizes) // 2][0] <= 10
    assert [size for size in sizes if size[0] > 40] == []


def test_public_functions_have_a_docstring():
    undocumented = [
        f"{file.name}: {node.name}"
        for file, node in functions()
        if not node.name.startswith("_") and node.col_offset == 0 and not ast.get_docstring(node)
    ]
    assert undocumented == []
