"""Docstrings for the reference: inherited and forwarded methods, arguments of a step, links to entries and modules.

Private fields of dataclasses have no entry.
"""

import ast
import re

import griffe


def forwarded(pkg, name, member):
    """The method that a wrapper makes of a buffer's method and a sentence, as an entry of the reference."""
    method, sentence = ast.parse(str(member.value), mode="eval").body.args
    kind = next(x for x in pkg["buffers"].members.values() if method.value.id in x.members and not x.is_alias)
    source = kind[method.value.id][name]
    entry = griffe.Function(name, lineno=member.lineno, parameters=source.parameters, returns=source.returns)
    entry.docstring = griffe.Docstring(sentence.value, parent=entry)
    return entry


def of_a_step(pkg):
    """The parameters of a tracer's method: the fields of a step."""
    fields = [x for x in pkg["transitions._windows.TracerSteps"].members.values() if x.is_attribute]
    kinds = griffe.ParameterKind.positional_or_keyword, griffe.ParameterKind.keyword_only
    for x in fields:
        is_named, default = "kw_only" in str(x.value), "None" if "default" in str(x.value) else None
        yield griffe.Parameter(x.name, annotation=x.annotation, kind=kinds[is_named], default=default)


class PublicFields(griffe.Extension):
    def on_class_members(self, *, cls, **_):
        for name, member in list(cls.members.items()):
            if name.startswith("_") and member.is_attribute:
                cls.del_member(name)

    def link_head(self, function):  # pages begin with the docstring of a module
        link = '<a href="./">the head of this page</a>'
        function.docstring.value = function.docstring.value.replace("the module docstring", link)

    def on_package(self, *, pkg, **_):
        names, *modules = pkg.docstring.value.partition("| *modules* |")
        names = re.sub(r"^\| (?!name )(\w+)", r"| [\1][jaxreplay.\1]", names, flags=re.MULTILINE)
        pkg.docstring.value = "".join([names, *modules])
        todo = [pkg]
        while todo:
            here = todo.pop()
            if here.docstring and not here.is_module:
                self.link_head(here)
            todo += [
                x for x in here.members.values() if not x.is_alias and (x.is_module or x.is_class or x.is_function)
            ]
            if here.is_class:
                for name, member in list(here.members.items()):
                    if member.is_attribute and str(member.value).startswith("forwarded("):
                        here.set_member(name, forwarded(pkg, name, member))
                for name, member in here.members.items():
                    if member.is_function and any("takes_a_step" in str(x.value) for x in member.decorators):
                        own = member.parameters["self"]
                        member.parameters = griffe.Parameters(own, *of_a_step(pkg))
                    bases = (base.members.get(name) for base in here.mro())
                    if member.is_function and not member.docstring:
                        member.docstring = next((x.docstring for x in bases if x and x.docstring), None)
