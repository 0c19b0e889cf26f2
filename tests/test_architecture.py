"""The house is as docs/architecture.md draws it: rooms, floors, and no circle."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.md"
PACKAGES = ("tbx_envs", "tbx_jax")
ROOM = re.compile(r"^(\d+)\s+(tbx_(?:envs|jax)\.\w+)\s+(\S.*)$", re.MULTILINE)


def module_files():
    """Name -> file of every module of both packages, packages themselves included."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    named = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    # The check worker is a program of its own: its files import one another from its own folder.
    return {name: file for name, file in named.items() if not name.startswith("tbx_envs.thinkingbox.grading.worker.")}


FILES = module_files()


class ImportsAtRunTime(ast.NodeVisitor):
    """The modules of ours that a file imports when it runs, in functions too; imports for type checkers are left
    out."""

    def __init__(self):
        self.found = set()

    def visit_If(self, node):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            for branch in node.orelse:
                self.visit(branch)
        else:
            self.generic_visit(node)

    def visit_Import(self, node):
        self.found |= {alias.name for alias in node.names if alias.name in FILES}

    def visit_ImportFrom(self, node):
        if node.level or node.module not in FILES:
            assert not node.level, f"a relative import of {node.module}: write the whole name"
            return
        parts = [f"{node.module}.{alias.name}" for alias in node.names]
        self.found |= {part if part in FILES else node.module for part in parts}


def imports(source):
    visitor = ImportsAtRunTime()
    visitor.visit(ast.parse(source))
    return visitor.found


@functools.cache
def all_imports():
    """Module -> modules it imports at run time; read when a test asks: each process of the suite imports this file."""
    return {name: imports(file.read_text(encoding="utf-8")) for name, file in FILES.items()}


def room_of(module):
    """The folder or the lone module, directly under its package, that a module belongs to."""
    return ".".join(module.split(".")[:2])


def folder_of(module):
    """The innermost folder a module is in; a module that stands beside folders stands alone."""
    file = FILES[module]
    folder = file.parent
    has_folders = any(child.is_dir() and any(child.glob("*.py")) for child in folder.iterdir())
    alone = has_folders and file.name != "__init__.py"
    return module if alone else ".".join(folder.relative_to(ROOT).parts)


def circle_in(graph):
    """A circle of a graph (node -> nodes), as the list of its nodes; None when there is none."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return None
        path.append(node)
        for following in sorted(graph.get(node, ())):
            if found := visit(following):
                return found
        done.add(path.pop())
        return None

    return next((found for node in sorted(graph) if (found := visit(node))), None)


def arrows(place_of):
    """place -> places that its modules import, without itself; the packages' own `__init__` are left out."""
    graph = {}
    for name, imported in all_imports().items():
        for other in imported:
            if "." in name and "." in other and place_of(name) != place_of(other):
                graph.setdefault(place_of(name), set()).add(place_of(other))
    return graph


def pictured():
    """Room -> (floor, package's order): the floors of tbx_jax are above those of tbx_envs."""
    rooms = ROOM.findall(PICTURE.read_text(encoding="utf-8"))
    assert len({room for _, room, _ in rooms}) == len(rooms), "a room is drawn twice"
    return {room: (room.startswith("tbx_jax."), int(floor)) for floor, room, _ in rooms}


def test_every_room_is_in_the_picture_and_nothing_else():
    rooms = {room_of(name) for name in FILES if "." in name}
    assert pictured().keys() == rooms


def test_rooms_import_only_from_lower_floors():
    floors = pictured()
    upwards = [
        f"{name} (floor {floors[room_of(name)][1]}) imports {other} (floor {floors[room_of(other)][1]})"
        for name, imported in all_imports().items()
        for other in imported
        if "." in name
        and "." in other
        and room_of(name) != room_of(other)
        and not floors[room_of(name)] > floors[room_of(other)]
    ]
    assert upwards == []


def test_no_module_imports_by_way_of_the_public_surface():
    """`from tbx_envs import ToolEnv` would be an arrow that no picture shows."""
    assert [name for name, imported in all_imports().items() if not imported.isdisjoint(PACKAGES)] == []
    assert imports("from tbx_envs import ToolEnv") == imports("import tbx_envs") == {"tbx_envs"}


def test_the_floors_of_a_package_are_listed_from_the_top_and_none_is_empty():
    for package in PACKAGES:
        floors = [floor for room, (_, floor) in pictured().items() if room.startswith(f"{package}.")]
        assert floors == sorted(floors, reverse=True)
        assert set(floors) == set(range(max(floors) + 1))


@pytest.mark.parametrize("place_of", [room_of, folder_of, lambda module: module], ids=["rooms", "folders", "modules"])
def test_there_is_no_circle(place_of):
    assert circle_in(arrows(place_of)) is None


def test_a_circle_would_be_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_imports_in_functions_count_and_those_for_type_checkers_do_not():
    source = (
        "if TYPE_CHECKING:\n    import tbx_envs.env\nelse:\n    import tbx_envs.task\n"
        "def f():\n    from tbx_envs.chat import ledger\n    from tbx_envs.errors import ConfigError\n"
    )
    assert imports(source) == {"tbx_envs.task", "tbx_envs.chat.ledger", "tbx_envs.errors"}


def test_every_module_says_what_it_is():
    silent = [
        name
        for name, file in FILES.items()
        if file.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ]
    assert silent == []
