"""Modules import downwards only, and what is slow to import is imported where it is used."""

import ast
from pathlib import Path

import pytest

import interp

PACKAGE = Path(interp.__file__).parent

# From the bottom up. A module imports from its own line and from those above it here.
LAYERS = [
    ("interp.errors",),
    ("interp.config",),
    ("interp.tables",),
    ("interp.activation_tables",),
    ("interp.patterns",),
    ("interp.evidence",),
    ("interp.data",),
    ("interp.models",),
    ("interp.arithmetic",),
    ("interp.registry",),
    ("interp.analyses",),
    ("interp.inputs",),
    ("interp.text_inputs",),
    ("interp.measure",),
    ("interp.attending", "interp.activations", "interp.composing"),
    ("interp.quantization",),
    ("interp.ablation",),
    ("interp.comparison", "interp.doctor"),
    ("interp.training",),
    ("interp.views",),
    ("interp.cli",),
]
"""`interp` itself (its public names) and `interp.__main__` stand above all of them."""


UPWARDS = {
    ("interp.tables", "interp.views.drawing"),
    ("interp.comparison.result", "interp.views.drawing"),
}
"""A notebook asks a result how it looks: these two import upwards, inside that method alone."""


def modules():
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def is_type_checking(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports(path, *, top_only=False):
    """The modules that a file imports when it runs, each with its line.

    What stands under TYPE_CHECKING never runs. `from package import x` is package.x where that is
    a module.
    """
    found = []

    def visit(node):
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole if whole in MODULES else str(node.module), node.lineno))
        elif is_type_checking(node):
            for child in node.orelse:
                visit(child)
        elif not (top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def layer(module):
    for height, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return height
    return len(LAYERS)


def inside(module):
    return module == "interp" or module.startswith("interp.")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for imported, line in imports(MODULES[module]):
        if inside(imported) and (module, imported) not in UPWARDS:
            assert layer(imported) <= layer(module), f"{module}:{line} imports {imported}"


def test_what_imports_upwards_does_so_when_it_is_called():
    for module, imported in UPWARDS:
        assert imported in {name for name, _ in imports(MODULES[module])}
        assert imported not in {name for name, _ in imports(MODULES[module], top_only=True)}


def test_every_module_has_a_layer():
    above = [module for module in MODULES if layer(module) == len(LAYERS)]
    assert above == ["interp", "interp.__main__"]
    for names in LAYERS:
        assert set(names) <= MODULES.keys()


def test_an_analysis_imports_no_sibling():
    for module, path in MODULES.items():
        if module.startswith("interp.analyses."):
            for imported, line in imports(path):
                assert not imported.startswith("interp.analyses"), f"{module}:{line}"


def test_nothing_imports_an_analysis_by_name():
    for module, path in MODULES.items():
        for imported, line in imports(path):
            assert not imported.startswith("interp.analyses."), f"{module}:{line}"


def test_no_module_imports_itself_in_a_circle():
    graph = {
        module: {
            i
            for i, _ in imports(path)
            if inside(i) and i != "interp" and (module, i) not in UPWARDS
        }
        for module, path in MODULES.items()
    }
    while graph:
        leaves = {module for module, needed in graph.items() if not needed & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {module: needed for module, needed in graph.items() if module not in leaves}


def test_the_package_imports_neither_experiments_nor_tests():
    for module, path in MODULES.items():
        for imported, line in imports(path):
            first = imported.partition(".")[0]
            assert first not in {"experiments", "tests", "pytest", "hypothesis"}, f"{module}:{line}"


def test_transformer_lens_is_imported_at_the_top_of_one_module():
    found = {
        module
        for module, path in MODULES.items()
        for name, _ in imports(path, top_only=True)
        if name.partition(".")[0] == "transformer_lens"
    }
    assert found == {"interp.models.transformer"}


@pytest.mark.parametrize("module", ["interp", "interp.cli", "interp.config", "interp.registry"])
def test_what_the_command_line_needs_for_help_imports_nothing_heavy(module):
    """Through every module that is reached by imports at the top."""
    seen, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name, line in imports(MODULES[current], top_only=True):
            assert name.partition(".")[0] not in {
                "gguf",
                "huggingface_hub",
                "numpy",
                "pandas",
                "plotly",
                "safetensors",
                "tokenizers",
                "torch",
                "transformer_lens",
                "transformers",
            }, f"{current}:{line}"
            if name in MODULES:
                waiting.append(name)
    assert "interp.errors" in seen or module == "interp"


def test_the_walk_sees_imports_in_functions_but_not_those_for_types_only():
    cli = {name for name, _ in imports(MODULES["interp.cli.heads"])}
    assert "interp.measure" in cli
    assert "interp.measure" not in {
        n for n, _ in imports(MODULES["interp.cli.heads"], top_only=True)
    }
    assert "interp.models.watch" not in {n for n, _ in imports(MODULES["interp.registry"])}
    assert "interp.registry" in {n for n, _ in imports(MODULES["interp.measure"])}
