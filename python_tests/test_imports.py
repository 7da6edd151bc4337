"""The floors hold: imports go down only, and heavy or optional modules are imported in one place each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "badam_kernels"
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
FLOOR_0 = {"formats", "rules", "blocks", "layers", "schedule", "visit"}
FLOOR_3 = {"monitor", "doctor", "cli", "__main__", "finetune", "integrations"}
FLOOR_1_ROOTS = {"backends", "store", "hostmem", "room"}
HOST_FRAMEWORKS = {"transformers", "accelerate", "badam", "deepspeed", "datasets", "peft"}
LINES_PER_MODULE, LINES_PER_FUNCTION, WIDTH = 400, 50, 130


def floor(module: str) -> int:
    """0 words, 1 mechanisms, 2 composition (whatever is not named elsewhere, and the package itself), 3 edges."""
    head, *_ = [*module.split(".")[1:], ""]
    return 0 if head in FLOOR_0 else 1 if head in FLOOR_1_ROOTS else 3 if head in FLOOR_3 else 2


def imports(module: str, path: Path):
    """(imported module, whether at module level) of everything that `module` imports, absolute, with names that are modules."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = package[:-1] if package[-1] == "__init__" else package
    for node in ast.walk(tree):
        at_top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                is_module = name in MODULES or f"{name}.__init__" in MODULES or name == f"{PACKAGE.name}._C"
                yield (name if is_module else source), at_top


def edges():
    for module, path in MODULES.items():
        for imported, at_top in imports(module, path):
            yield module.removesuffix(".__init__"), imported, at_top


def test_the_parser_sees_imports():
    """Against a parser that finds nothing, the tests below would pass."""
    found = {(module, imported) for module, imported, _ in edges()}
    assert ("badam_kernels.backends.reference", "badam_kernels.visit") in found
    assert ("badam_kernels.backends.reference", "badam_kernels.rules") in found
    assert ("badam_kernels.formats", "torch") in found
    assert floor("badam_kernels.formats") < floor("badam_kernels.backends.cpu") < floor("badam_kernels.optimizer") < 3


def test_imports_go_down_only():
    """The package itself may reach for an edge inside a function: importing it still brings in composition at most."""
    ours = [
        (a, b)
        for a, b, at_top in edges()
        if b.split(".")[0] == PACKAGE.name and not b.endswith("._C") and (at_top or a != PACKAGE.name)
    ]
    assert not [f"{a} imports {b}" for a, b in ours if floor(b) > floor(a)]
    backends = [(a, b) for a, b in ours if floor(a) == 1 == floor(b)]
    assert not [f"{a} imports {b}" for a, b in backends if a.split(".")[1] != b.split(".")[1] and "backends" in a + b]


@pytest.mark.parametrize(
    "name, allowed",
    [
        ("triton", lambda module: module.startswith("badam_kernels.backends.") and "triton" in module),
        ("badam_kernels._C", lambda module: module in ("badam_kernels.backends.cpu", "badam_kernels.store")),
        *((name, lambda module: floor(module) == 3) for name in sorted(HOST_FRAMEWORKS)),
    ],
)
def test_an_optional_module_is_imported_only_at_its_place(name, allowed):
    users = {module for module, imported, _ in edges() if imported == name or imported.startswith(name + ".")}
    assert not {module for module in users if not allowed(module)}


def test_words_need_nothing_but_torch_and_the_standard_library():
    outside = {(a, b) for a, b, _ in edges() if floor(a) == 0 and b.split(".")[0] != PACKAGE.name}
    assert not {(a, b) for a, b in outside if b.split(".")[0] not in sys.stdlib_module_names | {"torch"}}


def test_the_package_imports_without_triton_extension_and_frameworks():
    blocked = ["triton", "badam_kernels._C", "numpy", *sorted(HOST_FRAMEWORKS)]
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import badam_kernels, torch
assert badam_kernels.BlockAdam
from badam_kernels import backends
assert backends.resolve("auto", torch.device("cpu")).name == "reference"
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_budgets_are_measured_and_printed(capsys):
    """Taste, not law: what is over budget is said, not refused."""
    lines = {module: path.read_text().splitlines() for module, path in MODULES.items()}
    lengths = {f"{module}.{name}": n for module, path in MODULES.items() for name, n in functions(path)}
    over = [f"{name}: {len(text)} lines of {LINES_PER_MODULE}" for name, text in lines.items() if len(text) > LINES_PER_MODULE]
    over += [f"{name}: {n} lines of {LINES_PER_FUNCTION}" for name, n in lengths.items() if n > LINES_PER_FUNCTION]
    over += [f"{m}:{i}: {len(line)} characters" for m, text in lines.items() for i, line in enumerate(text, 1) if len(line) > WIDTH]
    with capsys.disabled():
        print(f"\n{len(lines)} modules, the longest {max(map(len, lines.values()))} lines, ", end="")
        print(f"the longest function {max(lengths.values())}; over budget: {', '.join(over) or 'nothing'}")
    assert lengths["badam_kernels.visit._dtype_names"] == 2
