"""The order of packages, and what may stand in which file."""

from __future__ import annotations

import ast

from . import measure


def test_packages_alone_stand_at_the_top():
    packages, modules = measure.top_level()
    assert sorted(packages) == sorted(measure.ORDER)
    assert modules == ["__init__.py", "cli.py"]


def test_a_package_imports_only_from_packages_before_it():
    assert measure.wrong_way() == []


def test_no_modules_import_one_another():
    assert measure.cycles() == []


def test_modules_are_imported_by_name_in_a_few_files():
    """An import by name is in no list of imports, so it could hide a cycle."""
    by_name = measure.files_with(r"\b(import_module|resolve_name|__import__)\b")
    # Extensions, the renderer of results, and the class of a result in a file; a function that nnsight sends by its name.
    assert by_name == ["core.registry", "core.rendering", "core.result_declarations", "remote.probe_in_trace"]


def test_names_with_an_underscore_stay_in_their_module():
    assert measure.private_imports() == []


def test_no_name_has_two_meanings():
    assert measure.two_meanings() == []


def test_one_file_registers_hooks_and_stops_forward_passes():
    assert measure.files_with(r"register_\w*hook\b") == ["sources.hooks"]
    assert measure.exceptions_in(measure.files_with(r"\bon_(enter|leave)\b")) == ["sources.hooks.StopForward"]


def test_model_libraries_are_imported_when_they_are_needed():
    # `core.arguments` looks at nnsight only when it was imported already.
    known = {"sources", "remote", "engine", "prompts", "costs", "training", "core.arguments"}
    for path in measure.files():
        tree, module = measure.parsed(path), measure.dotted(path)
        at_top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in (name.split(".")[0] for name in names):
                # Servers of nnsight answer in the format of torch.save, of which a reader without code reads the plain part.
                assert name != "pickle" or module == "remote.result_reader", path
                if name in ("transformer_lens", "nnsight"):
                    assert {module, measure.package_of(module)} & known, path
                    assert id(node) not in at_top, f"{path} imports {name} before it is needed"
