"""Docstrings for the reference: inherited and forwarded methods, and links to entries and to the heads of modules.

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
                    bases = (base.members.get(name) for base in here.mro())
                    if member.is_function and not member.docstring:
                        member.docstring = next((x.docstring for x in bases if x and x.docstring), None)
